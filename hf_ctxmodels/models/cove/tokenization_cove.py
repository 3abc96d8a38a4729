"""CoVe tokenizer: words of the source language, and words of the target language in a vocabulary of their own."""

from collections.abc import Iterable, Iterator
from typing import Any, Self

from transformers import AutoTokenizer

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.tokenization_translation import CtxTranslationTokenizer
from hf_ctxmodels.tokenization_words import CtxWordTokenizer


class CtxCoveTokenizer(CtxTranslationTokenizer):
    """Words of two languages, see `CtxTranslationTokenizer`; those of the source language may be a static model's."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        static_model: str = "",
        target_vocab_size: int = 0,
        min_target_count: int = 2,
        target_lower_case: bool = False,
        min_count: int = 5,
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        model_max_length: int = 1_000_000,
        **kwargs: Any,
    ) -> Self:
        """Count the words of both languages, or take the source language's from a model of fixed vectors.

        Args:
            static_model: A directory or Hub id whose tokenizer's words, in their order, are the source language's: the
                model's table then fits; `min_count`, `do_lower_case` and `split_punctuation` are not asked.
            texts, vocab_size, target_vocab_size, min_target_count, target_lower_case, min_count, do_lower_case,
                split_punctuation, model_max_length, kwargs: See `CtxTranslationTokenizer.train`.

        Raises:
            CtxError: As there, or `static_model` cannot be opened.
        """
        if not static_model:
            return super().train(
                texts,
                vocab_size,
                target_vocab_size=target_vocab_size,
                min_target_count=min_target_count,
                target_lower_case=target_lower_case,
                min_count=min_count,
                do_lower_case=do_lower_case,
                split_punctuation=split_punctuation,
                model_max_length=model_max_length,
                **kwargs,
            )
        texts = list(texts) if isinstance(texts, Iterator) else texts
        target_words = cls.count_target_words(
            texts, target_vocab_size or vocab_size, min_target_count, target_lower_case
        )
        try:
            static = AutoTokenizer.from_pretrained(static_model)
        except (OSError, ValueError) as error:
            raise CtxError(f"Cannot open the tokenizer of the vectors: {error}", where=static_model) from error
        if not isinstance(static, CtxWordTokenizer):
            raise CtxError(f"{type(static).__name__} is no tokenizer of whole words.", where=static_model)
        return cls(
            vocab={word: number for number, word in enumerate(static.words)},
            counts=static.counts,
            do_lower_case=static.do_lower_case,
            split_punctuation=static.split_punctuation,
            target_words=target_words,
            target_lower_case=target_lower_case,
            model_max_length=model_max_length,
            **kwargs,
        )
