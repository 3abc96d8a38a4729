"""Token-classification pipeline for models that read the characters of words (ELMo)."""

from typing import Any

import torch
from transformers import TokenClassificationPipeline

from hf_ctxmodels.core.errors import CtxError


class WordTaggingPipeline(TokenClassificationPipeline):
    """`TokenClassificationPipeline` that also accepts `input_ids` of shape (batch, words, characters).

    It returns words of the text instead of tokens; arguments and results are otherwise the same.

    Raises:
        CtxError: The tokenizer has no offsets.

    Example:
        >>> from transformers import pipeline
        >>> pipeline("token-classification", directory, pipeline_class=WordTaggingPipeline)("A cat")  # doctest: +SKIP
    """

    def gather_pre_entities(
        self, sentence: str, input_ids: Any, scores: Any, offset_mapping: Any, *arguments: Any, **kwargs: Any
    ) -> list[dict]:
        """Group the scores of tokens into words; character ids are passed on as unknown tokens, whose offsets give the
        words of the text."""
        if offset_mapping is None:
            raise CtxError("The tokenizer returns no character offsets.", hint="use the family's tokenizer.")
        if input_ids.ndim > 1:
            input_ids = torch.full((len(input_ids),), self.tokenizer.unk_token_id)
        return super().gather_pre_entities(sentence, input_ids, scores, offset_mapping, *arguments, **kwargs)
