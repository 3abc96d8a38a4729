"""WordPiece (Wu et al. 2016, section 4.1) with BERT's pre-tokenisation (Devlin et al. 2019, section 3)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import WordPiece

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import (
    CtxTokenizer,
    check_special_tokens,
    empty_text_error,
    get_special_tokens,
    missing_vocabulary_error,
    read_text,
)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class WordPieceTokenizer(CtxTokenizer):
    """Cleans text, splits it at spaces, punctuation and Chinese characters, then into WordPiece tokens.

    The ids equal the ids of `transformers.BertTokenizer` with the same files (`vocab.txt` or `tokenizer.json`). For a
    directory without tokenizer files, it raises an error, where that class builds a vocabulary of five tokens.

    Args:
        vocab: Token -> id, or the path of a `vocab.txt` with one token per line, in the order of their ids.
        do_lower_case: Lower-case the text (the "uncased" models).
        tokenize_chinese_chars: Split every CJK ideograph off as a word.
        strip_accents: Remove combining accents; None for the value of `do_lower_case`, as in BERT.
        **kwargs: Passed on to `TokenizersBackend`: special tokens, `model_max_length`, `padding_side`, ...

    Raises:
        CtxError: The vocabulary is missing, unreadable or empty, or lacks a special token.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = WordPieceTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """

    vocab_files_names = {"vocab_file": "vocab.txt", "tokenizer_file": "tokenizer.json"}
    model = WordPiece
    defaults: ClassVar[dict[str, Any]] = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True)
    )
    first_tokens: ClassVar[tuple[str, ...]] = SPECIAL_TOKENS
    templates = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        do_lower_case: bool = True,
        tokenize_chinese_chars: bool = True,
        strip_accents: bool | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        self.do_lower_case = do_lower_case
        self.tokenize_chinese_chars = tokenize_chinese_chars
        self.strip_accents = strip_accents
        special_tokens = get_special_tokens(kwargs, self.defaults)
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            vocab = kwargs["tokenizer_object"].get_vocab(with_added_tokens=False)
        if vocab is None:
            raise missing_vocabulary_error(type(self), kwargs)
        file = vocab if isinstance(vocab, str) else None
        if isinstance(vocab, str):  # a token's id is the number of its line
            lines = read_text(vocab).removesuffix("\n").split("\n")
            vocab = {line.rstrip(): number for number, line in enumerate(lines)}
        check_special_tokens(vocab, special_tokens, kwargs, file)
        self._vocab = vocab
        text_options = (do_lower_case, tokenize_chinese_chars, strip_accents)
        self._tokenizer = _build_backend(self._vocab, str(kwargs["unk_token"]), *text_options)
        super().__init__(
            do_lower_case=do_lower_case,
            tokenize_chinese_chars=tokenize_chinese_chars,
            strip_accents=strip_accents,
            **kwargs,
        )

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        do_lower_case: bool = True,
        tokenize_chinese_chars: bool = True,
        strip_accents: bool | None = None,
        min_frequency: int = 2,
        limit_alphabet: int = 1000,
        model_max_length: int = 512,
    ) -> Self:
        """Learn a WordPiece vocabulary. The result is deterministic for texts in the same order.

        Args:
            texts: Strings of any length, iterated twice; an iterator is converted to a list.
            vocab_size: Number of tokens including special tokens; smaller for a small corpus.
            min_frequency: Minimum frequency of a merged pair.
            limit_alphabet: Maximum number of different characters; the most frequent are kept.
            model_max_length: Maximum input length in tokens, including special tokens.

        Raises:
            CtxError: There is no text, or `vocab_size` is too small for its characters.
        """
        if isinstance(texts, Iterator):
            texts = list(texts)
        text_options = (do_lower_case, tokenize_chinese_chars, strip_accents)
        backend = _build_backend({"[UNK]": 0}, "[UNK]", *text_options)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(backend.normalizer.normalize_str(text))
        by_frequency = sorted((-count, character) for character, count in counts.items() if not character.isspace())
        if not by_frequency:
            raise empty_text_error()
        alphabet = sorted(character for _, character in by_frequency[:limit_alphabet])
        # The trainer numbers "##x" tokens in the order of a randomly seeded hash map and breaks ties between merges by
        # number. Declaring these tokens first, in code point order, makes the result deterministic.
        continuations = [f"##{character}" for character in alphabet]
        minimum = len(cls.first_tokens) + 2 * len(alphabet)
        if vocab_size < minimum:
            raise CtxError(
                f"A vocabulary of {vocab_size} tokens is too small for {len(alphabet)} different characters with two "
                f"tokens each and {len(cls.first_tokens)} special tokens.",
                hint=f"ask for at least {minimum} tokens, or keep fewer characters with limit_alphabet.",
            )
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=[*cls.first_tokens, *continuations],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(
            vocab=backend.get_vocab(with_added_tokens=False),
            do_lower_case=do_lower_case,
            tokenize_chinese_chars=tokenize_chinese_chars,
            strip_accents=strip_accents,
            model_max_length=model_max_length,
        )


def _build_backend(
    vocab: dict[str, int], unk_token: str, lower_case: bool, chinese_characters: bool, strip_accents: bool | None
) -> Tokenizer:
    """The `tokenizers` pipeline without the post-processor."""
    backend = Tokenizer(WordPiece(vocab, unk_token=unk_token))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese_characters,
        strip_accents=strip_accents,
        lowercase=lower_case,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend
