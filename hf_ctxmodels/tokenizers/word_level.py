"""Word-level tokenizers, whose vocabulary is ordered by decreasing frequency."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import AutoTokenizer
from transformers.utils import to_py_obj

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.generation import check_target_vocabulary
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.tokenizers.base import (
    check_special_tokens,
    empty_text_error,
    missing_vocabulary_error,
    require_special_tokens,
)
from hf_ctxmodels.tokenizers.composed_offsets import ComposingTokenizer
from hf_ctxmodels.tokenizers.english_words import english_splitter

SPECIAL_TOKENS = ("[PAD]", "[UNK]")


class CtxWordTokenizer(ComposingTokenizer):
    """Splits text into words and stores their frequencies. It adds no special tokens.

    Args:
        vocab: Word -> id.
        counts: Frequency of each word in the training text by id, 0 for special tokens; None if unknown.
        **kwargs: `do_lower_case`; `split_punctuation`, to split between letters or digits and other characters in
            addition to white space; `treebank_words`, to split English text as in the Penn Treebank instead, for
            released vectors such as GloVe's (see `english_splitter`); special tokens, and arguments of
            `TokenizersBackend`.

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
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            vocab = kwargs["tokenizer_object"].get_vocab(with_added_tokens=False)
            counts = None  # they belong to the words of the original vocabulary
        if vocab is None:
            raise missing_vocabulary_error(type(self), kwargs)
        require_special_tokens(kwargs, "pad_token", "unk_token")
        check_special_tokens(vocab, ["pad_token", "unk_token"], kwargs, kwargs.get("name_or_path") or None)
        if counts is not None and len(counts) != len(vocab):
            raise CtxError(
                f"{len(counts)} counts for {len(vocab)} words.",
                location=kwargs.get("name_or_path") or None,
                hint="copy tokenizer.json and tokenizer_config.json of the same tokenizer, or train it again.",
            )
        self.do_lower_case, self.split_punctuation = kwargs["do_lower_case"], kwargs["split_punctuation"]
        self.counts = None if counts is None else list(counts)
        self.treebank_words = bool(kwargs.get("treebank_words"))
        self._tokenizer = self._backend(vocab, str(kwargs["unk_token"]), self.do_lower_case, self.split_punctuation)
        if self.treebank_words:
            self._tokenizer.pre_tokenizer = english_splitter(treebank=True)
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
        treebank_words: bool = False,
        pretrained_embeddings: str = "",
        model_max_length: int = 1_000_000,
        **kwargs: Any,
    ) -> Self:
        """Learn a vocabulary of the most frequent words. Ties are broken alphabetically.

        Args:
            vocab_size: Maximum number of tokens, including special tokens.
            pretrained_embeddings: Directory or Hub id of a word embedding model; its tokenizer's vocabulary and rules
                are used instead.
            model_max_length: Maximum input length in words.

        Raises:
            CtxError: There is no text, an option is out of range, no word reaches `min_count`, `vocab_size` is too
                small, or `pretrained_embeddings` has no word tokenizer that splits text in the same way.
        """
        check_range({"min_count": min_count, "model_max_length": model_max_length}, at_least=1)
        if pretrained_embeddings:
            source = load_pretrained(AutoTokenizer, pretrained_embeddings, "the tokenizer of the word embeddings")
            if not isinstance(source, CtxWordTokenizer):
                raise CtxError(f"{type(source).__name__} is not a word tokenizer.", location=pretrained_embeddings)
            if isinstance(source, CtxReversibleWordTokenizer) != issubclass(cls, CtxReversibleWordTokenizer):
                raise CtxError(
                    f"{cls.__name__} and {type(source).__name__} split text differently: only the tokens of one of the "
                    "two mark white space.",
                    location=pretrained_embeddings,
                    hint="train the tokenizer without pretrained_embeddings.",
                )
            return cls(
                vocab={word: number for number, word in enumerate(source.words)},
                counts=source.counts,
                do_lower_case=source.do_lower_case,
                split_punctuation=source.split_punctuation,
                treebank_words=source.treebank_words,
                model_max_length=model_max_length,
                **kwargs,
            )
        backend = cls._backend({"[UNK]": 0}, "[UNK]", do_lower_case, split_punctuation)
        if treebank_words:
            backend.pre_tokenizer = english_splitter(treebank=True)
        counts = count_words(texts, backend)
        if not counts:
            raise empty_text_error()
        for token in cls.special_tokens:
            del counts[token]
        words = most_frequent_words(counts, min_count, vocab_size - len(cls.special_tokens))
        if not words:
            raise CtxError(
                f"The vocabulary would be empty: {len(counts)} different words, the most frequent occurs "
                f"{max(counts.values())} times, min_count={min_count}, vocab_size={vocab_size}.",
                hint=f"use more text, a smaller min_count, or a vocab_size above {len(cls.special_tokens)}.",
            )
        return cls.from_words(
            words,
            [counts[word] for word in words],
            do_lower_case=do_lower_case,
            split_punctuation=split_punctuation,
            treebank_words=treebank_words,
            model_max_length=model_max_length,
            **kwargs,
        )

    @classmethod
    def from_words(cls, words: Sequence[str], counts: Sequence[int] | None = None, **kwargs: Any) -> Self:
        """Create a tokenizer of distinct words, with ids after the special tokens, and their frequencies, if known."""
        tokens = [*cls.special_tokens, *words]
        check_unique_words(tokens)
        vocab = {token: number for number, token in enumerate(tokens)}
        if counts is not None:
            counts = [0] * len(cls.special_tokens) + [int(count) for count in counts]
        return cls(vocab=vocab, counts=counts, **kwargs)

    @classmethod
    def normalizers(cls, do_lower_case: bool) -> list[normalizers.Normalizer]:
        """Normalization steps before text is split into words."""
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


def count_words(texts: Iterable[str], backend: Tokenizer) -> Counter[str]:
    """Frequencies of the words into which a backend splits texts."""
    split, normalize = backend.pre_tokenizer.pre_tokenize_str, backend.normalizer.normalize_str
    return Counter(word for text in texts for word, _ in split(normalize(text)))


def most_frequent_words(counts: Counter[str], min_count: int, size: int) -> list[str]:
    """At most `size` words by decreasing frequency, with ties in alphabetical order."""
    by_frequency = sorted((-count, word) for word, count in counts.items() if count >= min_count)
    return [word for _, word in by_frequency[: max(0, size)]]


def build_reversible_backend(vocab: dict[str, int], lower_case: bool, split_punctuation: bool = True) -> Tokenizer:
    """Create a backend that splits text reversibly into words; words after white space begin with U+2581."""
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

    Words after white space begin with U+2581. See `CtxWordTokenizer` for arguments, training and errors. The words of
    `treebank_words` are not reversible (CtxError).

    Example:
        >>> tokenizer = CtxReversibleWordTokenizer.train(["a cat, a dog."], vocab_size=20, min_count=1)
        >>> tokenizer.decode(tokenizer("a dog, a cat.").input_ids, skip_special_tokens=True)
        'a dog, a cat.'
    """

    special_tokens: ClassVar[tuple[str, ...]] = (*SPECIAL_TOKENS, "[EOS]")
    defaults: ClassVar[dict[str, Any]] = {**CtxWordTokenizer.defaults, "eos_token": "[EOS]"}
    templates = ("$A:0 {eos}:0", "$A:0 {eos}:0 $B:1 {eos}:1")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("treebank_words"):
            raise CtxError(
                f"{type(self).__name__} splits text reversibly, but treebank_words=True.", hint="omit treebank_words."
            )
        super().__init__(*args, **kwargs)

    @classmethod
    def _backend(cls, vocab: dict[str, int], unk_token: str, lower_case: bool, split_punctuation: bool) -> Tokenizer:
        return build_reversible_backend(vocab, lower_case, split_punctuation)


def check_unique_words(words: Sequence[str]) -> None:
    """Raise CtxError if a word is repeated."""
    if len(set(words)) != len(words):
        repeated = next(word for word, count in Counter(words).items() if count > 1)
        raise CtxError(f"The word {repeated!r} occurs twice in the vocabulary.", hint="remove one of the two.")


TRANSLATION_SEPARATOR = "\t"  # between a text and its translation


class CtxTranslationTokenizer(CtxWordTokenizer):
    r"""Splits source text like `CtxWordTokenizer`, and `text_target` reversibly into words.

    Target words after white space begin with U+2581. Targets end with [EOS]. `decode` and `batch_decode` decode target
    ids, such as the output of `generate`, or with `use_source_tokenizer=True` source ids.

    Args:
        target_words: Words of the target language by id, special tokens first; None for only special tokens, or, unless
            `requires_target_words`, for no target vocabulary.
        target_lower_case: Lower-case targets.
        **kwargs: Arguments of `CtxWordTokenizer`.

    Attributes:
        requires_target_words: Whether every tokenizer of the class has a target vocabulary. Otherwise, `target_words`
            may be None: there are neither `target_start_id` nor the other ids, and targets are encoded like sources.
        target_tokens: First tokens of the target vocabulary.
        target_start: The decoder's first input; `target_start_id` is its id.
        target_end_id, target_pad_token_id, target_unknown_id: Ids of the end of a target, of padding, and of words
            outside the target vocabulary.

    Raises:
        CtxError: As in `CtxWordTokenizer`, or the target vocabulary does not begin with the special tokens.

    Example:
        >>> pairs = ["a cat\teine Katze."]
        >>> tokenizer = CtxTranslationTokenizer.train(pairs, vocab_size=10, min_count=1, min_target_count=1)
        >>> tokenizer.decode_target(tokenizer(text_target=["eine Katze."]).input_ids)
        ['eine Katze.']
    """

    target_tokens: ClassVar[tuple[str, ...]] = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")
    target_start: ClassVar[str] = "[BOS]"
    requires_target_words: ClassVar[bool] = True
    target_words: list[str] | None

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        target_words: Sequence[str] | None = None,
        target_lower_case: bool = False,
        **kwargs: Any,
    ) -> None:
        if target_words is None and self.requires_target_words:
            target_words = self.target_tokens
        self._target: Tokenizer | None = None
        self.target_words = None
        if target_words is not None:
            self._set_target_words(list(target_words), target_lower_case, kwargs.get("name_or_path") or None)
            kwargs |= {"target_words": self.target_words, "target_lower_case": target_lower_case}
        super().__init__(vocab=vocab, **kwargs)
        self._source = self._tokenizer

    def _set_target_words(self, words: list[str], lower_case: bool, location: str | None) -> None:
        """Create the target vocabulary; raises CtxError for repeated words, or without special tokens."""
        special = self.target_tokens
        check_unique_words(words)
        if tuple(words[: len(special)]) != special:
            raise CtxError(
                f"The target vocabulary begins with {words[: len(special)]}, expected {list(special)}.",
                location=location,
                hint="put these special tokens first.",
            )
        self.target_words, self.target_lower_case = words, lower_case
        self.target_pad_token_id, self.target_unknown_id = special.index("[PAD]"), special.index("[UNK]")
        self.target_start_id, self.target_end_id = special.index(self.target_start), special.index("[EOS]")
        self._target = self._target_backend(words, lower_case)

    def _switch_to_target_mode(self) -> None:
        self._tokenizer = self._source if self._target is None else self._target

    def _switch_to_input_mode(self) -> None:
        self._tokenizer = self._source

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        *,
        use_source_tokenizer: bool = False,
        **kwargs: Any,
    ) -> str | list[str]:
        """Decode target ids of one text or a batch, like transformers' tokenizers with separate vocabularies.

        Args:
            token_ids: Target ids; source ids if the tokenizer has no target words.
            skip_special_tokens: Omit special tokens except [UNK], as in `decode_target`.
            use_source_tokenizer: The ids are source ids.
        """
        has_target_words = len(self.target_words or ()) > len(self.target_tokens)
        if use_source_tokenizer or not has_target_words:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        assert self._target is not None
        ids = to_py_obj(token_ids)
        ids = [ids] if isinstance(ids, int) else ids
        is_batch = len(ids) > 0 and isinstance(ids[0], list | tuple)
        sequences = ids if is_batch else [ids]
        if skip_special_tokens:
            texts = self.decode_target(sequences)
        else:
            texts = self._target.decode_batch(sequences, skip_special_tokens=False)
        return texts if is_batch else texts[0]

    def decode_target(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Decode sequences of target ids, without special tokens except [UNK]; raises CtxError without a target
        vocabulary."""
        check_target_vocabulary(self)
        assert self._target is not None
        skipped = {self.target_pad_token_id, self.target_start_id, self.target_end_id}
        kept_ids = [[int(token_id) for token_id in ids if int(token_id) not in skipped] for ids in sequences]
        return self._target.decode_batch(kept_ids, skip_special_tokens=False)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        target_vocab_size: int = 0,
        min_target_count: int = 2,
        target_lower_case: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Learn both vocabularies; see `CtxWordTokenizer.train`.

        Args:
            texts: Source texts, each optionally followed by a tab and its translation. A class that does not require a
                target vocabulary learns it only if all texts have translations.
            target_vocab_size: Maximum number of target tokens; 0 for `vocab_size`.
            kwargs: Arguments for the source language.
        """
        check_range({"target_vocab_size": target_vocab_size}, at_least=0)
        check_range({"min_target_count": min_target_count}, at_least=1)
        texts = list(texts) if isinstance(texts, Iterator) else texts  # iterated twice
        if not cls.requires_target_words and not all(TRANSLATION_SEPARATOR in text for text in texts):
            return super().train(texts, vocab_size, **kwargs)
        special = cls.target_tokens
        translations = (text.partition(TRANSLATION_SEPARATOR)[2] for text in texts)
        counts = count_words(translations, cls._target_backend(special, target_lower_case))
        size = (target_vocab_size or vocab_size) - len(special)
        kwargs["target_words"] = [*special, *most_frequent_words(counts, min_target_count, size)]
        return super().train(
            (text.partition(TRANSLATION_SEPARATOR)[0] for text in texts),
            vocab_size,
            target_lower_case=target_lower_case,
            **kwargs,
        )

    @classmethod
    def _target_backend(cls, words: Sequence[str], lower_case: bool) -> Tokenizer:
        backend = build_reversible_backend({word: number for number, word in enumerate(words)}, lower_case)
        backend.post_processor = processors.TemplateProcessing(
            single="$A [EOS]", special_tokens=[("[EOS]", cls.target_tokens.index("[EOS]"))]
        )
        return backend
