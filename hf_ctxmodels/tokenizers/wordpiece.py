"""WordPiece (Wu et al. 2016, section 4.1) as BERT prepares text for it (Devlin et al. 2019, section 3)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import WordPiece

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import CtxTokenizer, no_text, no_vocabulary, require_tokens

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class WordPieceTokenizer(CtxTokenizer):
    """Cleans text, splits it at spaces, punctuation and Chinese characters, then into word pieces.

    Gives the ids of `transformers.BertTokenizer` on the same files (`vocab.txt` or `tokenizer.json`), but never
    starts from an empty vocabulary: upstream silently builds five tokens when a directory holds no tokenizer file.

    Args:
        vocab: token -> id, or the path of a `vocab.txt` with one token a line (its line number is its id).
        do_lower_case: lower-case the text (the "uncased" models).
        tokenize_chinese_chars: make every CJK ideograph a word of its own.
        strip_accents: remove combining accents; `None` does it exactly when `do_lower_case` is set, as BERT did.
        **kwargs: passed on to `TokenizersBackend` (`model_max_length`, `padding_side`, ...).

    Raises:
        CtxError: the vocabulary is missing, unreadable, empty, or without one of the special tokens.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = WordPieceTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("a cat sat").input_ids)
        '[CLS] a cat sat [SEP]'
    """

    vocab_files_names = {"vocab_file": "vocab.txt", "tokenizer_file": "tokenizer.json"}
    model = WordPiece

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        do_lower_case: bool = True,
        unk_token: str = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str = "[MASK]",
        tokenize_chinese_chars: bool = True,
        strip_accents: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.do_lower_case = do_lower_case
        self.tokenize_chinese_chars = tokenize_chinese_chars
        self.strip_accents = strip_accents
        special_tokens = [str(token) for token in (pad_token, unk_token, cls_token, sep_token, mask_token)]
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            vocab = kwargs["tokenizer_object"].get_vocab(with_added_tokens=False)
        self._vocab = _checked_vocabulary(type(self), vocab, special_tokens, kwargs)
        self._tokenizer = _build_backend(
            self._vocab, str(unk_token), do_lower_case, tokenize_chinese_chars, strip_accents
        )
        super().__init__(
            do_lower_case=do_lower_case,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=mask_token,
            tokenize_chinese_chars=tokenize_chinese_chars,
            strip_accents=strip_accents,
            **kwargs,
        )
        self.set_template("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")

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
        """Learn a WordPiece vocabulary. The same texts in the same order always give the same vocabulary.

        Args:
            texts: strings of any length; read twice, so an iterator is first turned into a list.
            vocab_size: number of tokens wanted, the five special ones included; a small corpus may give fewer.
            do_lower_case, tokenize_chinese_chars, strip_accents: see the class.
            min_frequency: a pair seen fewer times is not merged.
            limit_alphabet: how many different characters are kept, the most frequent first.
            model_max_length: longest input, special tokens included, of the model this tokenizer is for.

        Raises:
            CtxError: there is no text, or `vocab_size` is too small for the characters of the text.
        """
        if isinstance(texts, Iterator):
            texts = list(texts)
        case = (do_lower_case, tokenize_chinese_chars, strip_accents)
        backend = _build_backend({"[UNK]": 0}, "[UNK]", *case)
        alphabet = _frequent_characters(texts, backend.normalizer, limit_alphabet)
        # The trainer numbers "##x" pieces in the order of a randomly seeded hash map and breaks ties between merges
        # by number. Declaring those pieces first, in code point order, makes its result a function of its input.
        continuations = [f"##{character}" for character in alphabet]
        needed = len(SPECIAL_TOKENS) + 2 * len(alphabet)
        if vocab_size < needed:
            raise CtxError(
                f"A vocabulary of {vocab_size} tokens cannot hold the {len(alphabet)} different characters of the text "
                f"(each alone and as a continuation) and {len(SPECIAL_TOKENS)} special tokens.",
                hint=f"ask for at least {needed} tokens, or keep fewer characters with limit_alphabet.",
            )
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=[*SPECIAL_TOKENS, *continuations],
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
    """The `tokenizers` pipeline without its post-processor, which needs the ids of the special tokens."""
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


def _frequent_characters(texts: Iterable[str], normalizer: normalizers.Normalizer, limit: int) -> list[str]:
    """The `limit` most frequent characters after normalisation, in code point order; ties go to the lower one."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    visible = [(-count, character) for character, count in counts.items() if not character.isspace()]
    if not visible:
        raise no_text()
    return sorted(character for _, character in sorted(visible)[:limit])


def _checked_vocabulary(
    cls: type, vocab: str | dict[str, int] | None, special_tokens: list[str], kwargs: dict[str, Any]
) -> dict[str, int]:
    """The vocabulary as a dictionary, or a `CtxError` that says what is wrong with it."""
    if vocab is None:
        raise no_vocabulary(cls, kwargs)
    file = vocab if isinstance(vocab, str) else None
    if isinstance(vocab, str):
        vocab = _read_vocabulary_file(vocab)
    require_tokens(vocab, special_tokens, kwargs, file)
    return vocab


def _read_vocabulary_file(path: str) -> dict[str, int]:
    """token -> line number of a `vocab.txt`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise CtxError(f"The vocabulary cannot be read: {error.strerror}.", location=path, hint="check it.") from error
    except UnicodeDecodeError as error:
        raise CtxError(
            f"The vocabulary is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}.",
            location=f"{path}, byte {error.start}",
            hint="copy it again from its source.",
        ) from error
    return {line.rstrip(): number for number, line in enumerate(lines)}
