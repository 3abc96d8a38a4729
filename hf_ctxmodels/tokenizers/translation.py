"""Word tokenizer of translation models, with separate source and target vocabularies."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, processors

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer, build_reversible_backend, check_unique_words

TRANSLATION_SEPARATOR = "\t"  # between a text and its translation


class CtxTranslationTokenizer(CtxWordTokenizer):
    r"""Splits source text like `CtxWordTokenizer`, and `text_target` reversibly into words.

    Target words after white space begin with U+2581. Targets end with [EOS]. `decode` decodes source ids,
    `decode_target` target ids.

    Args:
        target_words: Words of the target language by id, special tokens first; None for only special tokens.
        target_lower_case: Lower-case targets.
        **kwargs: Arguments of `CtxWordTokenizer`.

    Attributes:
        target_tokens: First tokens of the target vocabulary.
        target_start: The decoder's first input.

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

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        target_words: Sequence[str] | None = None,
        target_lower_case: bool = False,
        **kwargs: Any,
    ) -> None:
        special = self.target_tokens
        self.target_words = list(special if target_words is None else target_words)
        check_unique_words(self.target_words)
        if tuple(self.target_words[: len(special)]) != special:
            raise CtxError(
                f"The target vocabulary begins with {self.target_words[: len(special)]}, expected {list(special)}.",
                location=kwargs.get("name_or_path") or None,
                hint="put these special tokens first.",
            )
        self.target_lower_case = target_lower_case
        self._target = self._target_backend(self.target_words, target_lower_case)
        super().__init__(vocab=vocab, target_words=self.target_words, target_lower_case=target_lower_case, **kwargs)
        self._source = self._tokenizer

    def _switch_to_target_mode(self) -> None:
        self._tokenizer = self._target

    def _switch_to_input_mode(self) -> None:
        self._tokenizer = self._source

    @property
    def target_pad_token_id(self) -> int:
        """Id of padding in targets."""
        return self.target_tokens.index("[PAD]")

    @property
    def target_start_id(self) -> int:
        """Id of the decoder's first input."""
        return self.target_tokens.index(self.target_start)

    @property
    def target_end_id(self) -> int:
        """Id of the end of a target."""
        return self.target_tokens.index("[EOS]")

    @property
    def target_unknown_id(self) -> int:
        """Id of words outside the target vocabulary."""
        return self.target_tokens.index("[UNK]")

    def decode_target(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Decode sequences of target ids, without special tokens except [UNK]."""
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
        """Learn both vocabularies, or take the source vocabulary from a word embedding model.

        Args:
            texts: Source texts, each optionally followed by a tab and its translation.
            vocab_size: Maximum number of source tokens, including special tokens.
            target_vocab_size: Maximum number of target tokens; 0 for `vocab_size`.
            min_target_count: Minimum frequency of a target word.
            target_lower_case: Lower-case targets.
            kwargs: Arguments for the source language, see `CtxWordTokenizer.train`.

        Raises:
            CtxError: As in `CtxWordTokenizer.train`.
        """
        texts = list(texts) if isinstance(texts, Iterator) else texts  # iterated twice
        kwargs["target_words"] = cls.count_target_words(
            texts, target_vocab_size or vocab_size, min_target_count, target_lower_case
        )
        return super().train(
            (text.partition(TRANSLATION_SEPARATOR)[0] for text in texts),
            vocab_size,
            target_lower_case=target_lower_case,
            **kwargs,
        )

    @classmethod
    def count_target_words(cls, texts: Iterable[str], size: int, min_count: int, lower_case: bool) -> list[str]:
        """The special tokens and the most frequent words of the translations, at most `size`."""
        backend = cls._target_backend(cls.target_tokens, lower_case)
        counts: Counter[str] = Counter()
        for text in texts:
            if (translation := text.partition(TRANSLATION_SEPARATOR)[2]).strip():
                words = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(translation))
                counts.update(word for word, _ in words)
        by_frequency = sorted((-count, word) for word, count in counts.items() if count >= min_count)
        return [*cls.target_tokens, *(word for _, word in by_frequency[: max(0, size - len(cls.target_tokens))])]

    @classmethod
    def _target_backend(cls, words: Sequence[str], lower_case: bool) -> Tokenizer:
        backend = build_reversible_backend({word: number for number, word in enumerate(words)}, lower_case)
        backend.post_processor = processors.TemplateProcessing(
            single="$A [EOS]", special_tokens=[("[EOS]", cls.target_tokens.index("[EOS]"))]
        )
        return backend
