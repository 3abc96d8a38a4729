"""WordPiece (Wu et al. 2016, section 4.1) with BERT's pre-tokenization (Devlin et al. 2019, section 3)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import WordPiece

from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.loading import read_utf8
from hf_ctxmodels.tokenizers.base import (
    CtxTokenizer,
    check_special_tokens,
    check_vocab_size,
    empty_text_error,
    missing_vocabulary_error,
    require_special_tokens,
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
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            vocab = kwargs["tokenizer_object"].get_vocab(with_added_tokens=False)
        if vocab is None:
            raise missing_vocabulary_error(type(self), kwargs)
        file = vocab if isinstance(vocab, str) else None
        if isinstance(vocab, str):  # a token's id is the number of its line
            lines = read_utf8(vocab).removesuffix("\n").split("\n")
            vocab = {line.rstrip(): number for number, line in enumerate(lines)}
        require_special_tokens(kwargs, "unk_token")
        check_special_tokens(vocab, self.defaults, kwargs, file)
        self._vocab = vocab
        rules: dict[str, Any] = {
            "do_lower_case": do_lower_case,
            "tokenize_chinese_chars": tokenize_chinese_chars,
            "strip_accents": strip_accents,
        }
        self._tokenizer = _build_backend(vocab, str(kwargs["unk_token"]), **rules)
        super().__init__(**rules, **kwargs)

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
            min_frequency: Minimum frequency of a merged pair.
            limit_alphabet: Maximum number of different characters; the most frequent are kept.

        Raises:
            CtxError: There is no text, an option is out of range, or `vocab_size` is too small for its characters.
        """
        options = {
            "min_frequency": min_frequency,
            "limit_alphabet": limit_alphabet,
            "model_max_length": model_max_length,
        }
        check_range(options, at_least=1)
        if isinstance(texts, Iterator):
            texts = list(texts)
        rules: dict[str, Any] = {
            "do_lower_case": do_lower_case,
            "tokenize_chinese_chars": tokenize_chinese_chars,
            "strip_accents": strip_accents,
        }
        backend = _build_backend({"[UNK]": 0}, "[UNK]", **rules)
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
        content = f"{len(alphabet)} different characters (see limit_alphabet) with two tokens each and special tokens"
        check_vocab_size(vocab_size, minimum, content)
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=[*cls.first_tokens, *continuations],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(vocab=backend.get_vocab(with_added_tokens=False), model_max_length=model_max_length, **rules)


def _build_backend(
    vocab: dict[str, int], unk_token: str, do_lower_case: bool, tokenize_chinese_chars: bool, strip_accents: bool | None
) -> Tokenizer:
    """The `tokenizers` pipeline without the post-processor."""
    backend = Tokenizer(WordPiece(vocab, unk_token=unk_token))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=tokenize_chinese_chars, strip_accents=strip_accents, lowercase=do_lower_case
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend
