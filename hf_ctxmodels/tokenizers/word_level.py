"""Word-level tokenizers, whose vocabulary is ordered by decreasing frequency."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.tokenizers.base import CtxTokenizer, check_special_tokens, empty_text_error, missing_vocabulary_error

SPECIAL_TOKENS = ("[PAD]", "[UNK]")


class CtxWordTokenizer(CtxTokenizer):
    """Splits text into words and stores their frequencies. It adds no special tokens.

    Args:
        vocab: Word -> id.
        counts: Frequency of each word in the training text by id, 0 for special tokens; None if unknown.
        **kwargs: `do_lower_case`; `split_punctuation`, to split between letters or digits and other characters in
            addition to white space; special tokens, and arguments of `TokenizersBackend`.

    Raises:
        CtxError: The vocabulary is missing or lacks a special token, or the number of counts differs.

    Example:
        >>> tokenizer = CtxWordTokenizer.train(["a cat sat, a cat ran"], vocab_size=10, min_count=2)
        >>> tokenizer.tokenize("A cat slept")
        ['a', 'cat', '[UNK]']
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    model = WordLevel
    special_tokens: ClassVar[tuple[str, ...]] = SPECIAL_TOKENS  # first tokens of the vocabulary
    defaults: ClassVar[dict[str, Any]] = {
        "do_lower_case": True,
        "split_punctuation": True,
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }

    def __init__(self, vocab: dict[str, int] | None = None, counts: Sequence[int] | None = None, **kwargs: Any) -> None:
        kwargs = {**self.defaults, **kwargs}
        unk_token, pad_token = str(kwargs["unk_token"]), str(kwargs["pad_token"])
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            vocab = kwargs["tokenizer_object"].get_vocab(with_added_tokens=False)
            counts = None  # they belong to the words of the original vocabulary
        if vocab is None:
            raise missing_vocabulary_error(type(self), kwargs)
        check_special_tokens(vocab, [pad_token, unk_token], kwargs, kwargs.get("name_or_path") or None)
        if counts is not None and len(counts) != len(vocab):
            raise CtxError(
                f"{len(counts)} counts for {len(vocab)} words.",
                location=kwargs.get("name_or_path") or None,
                hint="copy tokenizer.json and tokenizer_config.json of the same tokenizer, or train it again.",
            )
        self.do_lower_case, self.split_punctuation = kwargs["do_lower_case"], kwargs["split_punctuation"]
        self.counts = None if counts is None else list(counts)
        self._tokenizer = self._backend(vocab, unk_token, self.do_lower_case, self.split_punctuation)
        super().__init__(counts=self.counts, **kwargs)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        min_count: int = 5,
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        pretrained_embeddings: str = "",
        model_max_length: int = 1_000_000,
        **kwargs: Any,
    ) -> Self:
        """Learn a vocabulary of the most frequent words. Ties are broken alphabetically.

        Args:
            texts: Strings of any length.
            vocab_size: Maximum number of tokens, including special tokens.
            min_count: Minimum frequency of a word.
            do_lower_case, split_punctuation: See the class.
            pretrained_embeddings: Directory or Hub id of a word embedding model; its tokenizer's vocabulary and rules
                are used instead.
            model_max_length: Maximum input length in words.
            kwargs: Arguments of the class.

        Raises:
            CtxError: There is no text, no word reaches `min_count`, `vocab_size` is too small, or
                `pretrained_embeddings` has no word tokenizer.
        """
        if pretrained_embeddings:
            return cls.from_pretrained_embeddings(pretrained_embeddings, model_max_length=model_max_length, **kwargs)
        backend = cls._backend({"[UNK]": 0}, "[UNK]", do_lower_case, split_punctuation)
        split, normalize = backend.pre_tokenizer.pre_tokenize_str, backend.normalizer.normalize_str
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(word for word, _ in split(normalize(text)))
        if not counts:
            raise empty_text_error()
        for token in cls.special_tokens:
            del counts[token]
        by_frequency = sorted((-count, word) for word, count in counts.items() if count >= min_count)
        by_frequency = by_frequency[: max(0, vocab_size - len(cls.special_tokens))]
        if not by_frequency:
            raise CtxError(
                f"The vocabulary would be empty: {len(counts)} different words, the most frequent occurs "
                f"{max(counts.values())} times, min_count={min_count}, vocab_size={vocab_size}.",
                hint=f"use more text, a smaller min_count, or a vocab_size above {len(cls.special_tokens)}.",
            )
        return cls.from_words(
            [word for _, word in by_frequency],
            [-count for count, _ in by_frequency],
            do_lower_case=do_lower_case,
            split_punctuation=split_punctuation,
            model_max_length=model_max_length,
            **kwargs,
        )

    @classmethod
    def from_pretrained_embeddings(cls, source: str, **kwargs: Any) -> Self:
        """Create a tokenizer with the vocabulary and rules of a word embedding model's tokenizer.

        Args:
            source: Directory or Hub id.
            kwargs: Arguments of the class.

        Raises:
            CtxError: The tokenizer cannot be loaded, or is not a word tokenizer.
        """
        embedding_tokenizer = load_pretrained(AutoTokenizer, source, "the tokenizer of the word embeddings")
        if not isinstance(embedding_tokenizer, CtxWordTokenizer):
            raise CtxError(f"{type(embedding_tokenizer).__name__} is not a word tokenizer.", location=source)
        return cls(
            vocab={word: number for number, word in enumerate(embedding_tokenizer.words)},
            counts=embedding_tokenizer.counts,
            do_lower_case=embedding_tokenizer.do_lower_case,
            split_punctuation=embedding_tokenizer.split_punctuation,
            **kwargs,
        )

    @classmethod
    def from_words(cls, words: Sequence[str], counts: Sequence[int] | None = None, **kwargs: Any) -> Self:
        """Create a tokenizer of these words, with ids after the special tokens.

        Args:
            words: Distinct words, without special tokens.
            counts: Frequency of each word; None if unknown.
            kwargs: Arguments of the class.
        """
        tokens = [*cls.special_tokens, *words]
        check_unique_words(tokens)
        vocab = {token: number for number, token in enumerate(tokens)}
        if counts is not None:
            counts = [0] * len(cls.special_tokens) + [int(count) for count in counts]
        return cls(vocab=vocab, counts=counts, **kwargs)

    @classmethod
    def normalizers(cls, do_lower_case: bool) -> list[normalizers.Normalizer]:
        """Normalisation steps before text is split into words."""
        return [normalizers.NFC(), *([normalizers.Lowercase()] if do_lower_case else [])]

    @classmethod
    def _backend(cls, vocab: dict[str, int], unk_token: str, lower_case: bool, split_punctuation: bool) -> Tokenizer:
        backend = Tokenizer(WordLevel(vocab, unk_token=unk_token))
        backend.normalizer = normalizers.Sequence(cls.normalizers(lower_case))
        backend.pre_tokenizer = pre_tokenizers.Whitespace() if split_punctuation else pre_tokenizers.WhitespaceSplit()
        return backend

    @property
    def words(self) -> list[str]:
        """Words by id, including special tokens."""
        return sorted(self._tokenizer.get_vocab(), key=self._tokenizer.get_vocab().__getitem__)


def build_reversible_backend(vocab: dict[str, int], lower_case: bool, split_punctuation: bool = True) -> Tokenizer:
    """Create a backend that splits text reversibly into words; words after white space begin with U+2581.

    Args:
        vocab: Word -> id, including [UNK].
        lower_case: Lower-case the text.
        split_punctuation: See `CtxWordTokenizer`.
    """
    backend = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence(CtxWordTokenizer.normalizers(lower_case))
    pattern = "\u2581?(?:\\w+|[^\\w\u2581]+)" if split_punctuation else "\u2581?[^\u2581]+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),  # so that offsets do not include white space
            pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(pattern), "isolated"),
        ]
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


class CtxReversibleWordTokenizer(CtxWordTokenizer):
    """Splits text reversibly into words; each text ends with [EOS]. For families that generate text.

    Words after white space begin with U+2581. See `CtxWordTokenizer` for arguments, training and errors.

    Example:
        >>> tokenizer = CtxReversibleWordTokenizer.train(["a cat, a dog."], vocab_size=20, min_count=1)
        >>> tokenizer.decode(tokenizer("a dog, a cat.").input_ids, skip_special_tokens=True)
        'a dog, a cat.'
    """

    special_tokens: ClassVar[tuple[str, ...]] = (*SPECIAL_TOKENS, "[EOS]")
    defaults: ClassVar[dict[str, Any]] = {**CtxWordTokenizer.defaults, "eos_token": "[EOS]"}
    templates = ("$A:0 {eos}:0", "$A:0 {eos}:0 $B:1 {eos}:1")

    @classmethod
    def _backend(cls, vocab: dict[str, int], unk_token: str, lower_case: bool, split_punctuation: bool) -> Tokenizer:
        return build_reversible_backend(vocab, lower_case, split_punctuation)


def check_unique_words(words: Sequence[str]) -> None:
    """Raise CtxError if a word is repeated."""
    if len(set(words)) != len(words):
        repeated = next(word for word, count in Counter(words).items() if count > 1)
        raise CtxError(f"The word {repeated!r} occurs twice in the vocabulary.", hint="remove one of the two.")
