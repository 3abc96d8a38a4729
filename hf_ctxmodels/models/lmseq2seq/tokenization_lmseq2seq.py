"""Tokenizer with the vocabularies of two language models."""

from collections.abc import Iterable
from os import PathLike
from typing import Any, ClassVar, Self

from transformers import AutoTokenizer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.tokenizers.word_level import CtxReversibleWordTokenizer, CtxTranslationTokenizer


class CtxLmSeq2SeqTokenizer(CtxTranslationTokenizer, CtxReversibleWordTokenizer):
    """Source and target words, see `CtxTranslationTokenizer`.

    Source texts end with [EOS] too. [EOS] is also the decoder's first input, as in the target language model, where it
    precedes every text.
    """

    target_tokens: ClassVar[tuple[str, ...]] = CtxReversibleWordTokenizer.special_tokens
    target_start: ClassVar[str] = "[EOS]"

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, source_model: str = "", target_model: str = "", **kwargs: Any
    ) -> Self:
        """Learn both vocabularies, see `CtxTranslationTokenizer.train`, or take them from two language models.

        With language models, `vocab_size` is ignored, and `model_max_length` is the only other option.

        Args:
            source_model, target_model: Directories or Hub ids of the language models, both or neither.

        Raises:
            CtxError: As in `CtxTranslationTokenizer.train`; or a language model is missing or has another tokenizer, or
                an option is not supported with language models.
        """
        if not source_model and not target_model:
            return super().train(texts, vocab_size, **kwargs)
        if not source_model or not target_model:
            raise CtxError(
                f"source_model={source_model!r}, target_model={target_model!r}: one of them is missing.",
                hint="pass both, or neither.",
            )
        if unused := [name for name in kwargs if name != "model_max_length"]:
            raise CtxError(
                f"{', '.join(unused)}: the vocabularies and rules of the language models are used.",
                location=f"source_model={source_model!r}, target_model={target_model!r}",
                hint="omit these options, or the language models.",
            )
        return cls.from_pretrained_pair(source_model, target_model, **kwargs)

    @classmethod
    def from_pretrained_pair(cls, source: str | PathLike[str], target: str | PathLike[str], **kwargs: Any) -> Self:
        """Create the tokenizer with the vocabularies of two language models, directories or Hub ids.

        Raises:
            CtxError: A tokenizer cannot be loaded or is no `CtxReversibleWordTokenizer`.
        """
        source_tokenizer, target_tokenizer = _load_tokenizer(source), _load_tokenizer(target)
        if not target_tokenizer.split_punctuation:
            raise CtxError("The target tokenizer does not split at punctuation.", location=str(target))
        return cls(
            vocab={word: number for number, word in enumerate(source_tokenizer.words)},
            counts=source_tokenizer.counts,
            do_lower_case=source_tokenizer.do_lower_case,
            split_punctuation=source_tokenizer.split_punctuation,
            target_words=target_tokenizer.words,
            target_lower_case=target_tokenizer.do_lower_case,
            **{"model_max_length": min(source_tokenizer.model_max_length, target_tokenizer.model_max_length), **kwargs},
        )


def _load_tokenizer(source: str | PathLike[str]) -> CtxReversibleWordTokenizer:
    tokenizer = load_pretrained(AutoTokenizer, source, "the language model's tokenizer")
    if not isinstance(tokenizer, CtxReversibleWordTokenizer):
        raise CtxError(
            f"{type(tokenizer).__name__} is not a reversible word tokenizer.",
            location=str(source),
            hint="use a language model whose tokenizer is a CtxReversibleWordTokenizer.",
        )
    return tokenizer
