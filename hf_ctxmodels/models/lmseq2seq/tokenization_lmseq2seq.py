"""Tokenizer of the translator made of two language models: the vocabulary of each."""

from collections.abc import Iterable
from os import PathLike
from typing import Any, ClassVar, Self

from transformers import AutoTokenizer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.tokenizers.translation import CtxTranslationTokenizer
from hf_ctxmodels.tokenizers.word_level import CtxReversibleWordTokenizer


class CtxLmSeq2SeqTokenizer(CtxTranslationTokenizer, CtxReversibleWordTokenizer):
    """Words of two languages, see `CtxTranslationTokenizer`; source texts end with [EOS] too. [EOS] is the decoder's
    first input: the target language model saw it before every text."""

    target_tokens: ClassVar[tuple[str, ...]] = CtxReversibleWordTokenizer.special_tokens
    target_start: ClassVar[str] = "[EOS]"

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, source_model: str = "", target_model: str = "", **kwargs: Any
    ) -> Self:
        """Count the words of both languages, or take those of two language models.

        Args:
            source_model, target_model: Directories or Hub ids of language models, both or neither; the words of their
                tokenizers are then taken in place of counted ones.
            texts, vocab_size, kwargs: See `CtxTranslationTokenizer.train`.

        Raises:
            CtxError: As there, or one of the two is missing or has other words.
        """
        if not source_model and not target_model:
            return super().train(texts, vocab_size, **kwargs)
        if not source_model or not target_model:
            raise CtxError(
                f"source_model={source_model!r}, target_model={target_model!r}: one language has no words.",
                hint="give both, or neither.",
            )
        return cls.from_pretrained_pair(source_model, target_model)

    @classmethod
    def from_pretrained_pair(cls, source: str | PathLike[str], target: str | PathLike[str], **kwargs: Any) -> Self:
        """The tokenizer with the words of two language models.

        Args:
            source, target: Directories or Hub ids with a `CtxReversibleWordTokenizer`.
            kwargs: Arguments of the class.

        Raises:
            CtxError: They cannot be opened, or are of another kind.
        """
        ours, theirs = _open(source), _open(target)
        if not theirs.split_punctuation:
            raise CtxError("Targets are split at punctuation; this tokenizer does not.", location=str(target))
        return cls(
            vocab={word: number for number, word in enumerate(ours.words)},
            counts=ours.counts,
            do_lower_case=ours.do_lower_case,
            split_punctuation=ours.split_punctuation,
            target_words=theirs.words,
            target_lower_case=theirs.do_lower_case,
            **{"model_max_length": min(ours.model_max_length, theirs.model_max_length), **kwargs},
        )


def _open(source: str | PathLike[str]) -> CtxReversibleWordTokenizer:
    tokenizer = load_pretrained(AutoTokenizer, source, "the language model's tokenizer")
    if not isinstance(tokenizer, CtxReversibleWordTokenizer):
        raise CtxError(
            f"{type(tokenizer).__name__} is no tokenizer of words that decode to the exact text.",
            location=str(source),
            hint="give a language model whose tokenizer is a CtxReversibleWordTokenizer.",
        )
    return tokenizer
