"""The token-classification pipeline for words as characters."""

from typing import Any

import torch
from transformers import TokenClassificationPipeline

from hf_ctxmodels.core.errors import CtxError


class WordTaggingPipeline(TokenClassificationPipeline):
    """`token-classification` also for `input_ids` of shape (batch, words, characters).

    Words are then those of the text. Arguments and results are those of `TokenClassificationPipeline`.

    Raises:
        CtxError: The tokenizer has no offsets.

    Example:
        >>> from transformers import pipeline
        >>> pipeline("token-classification", directory, pipeline_class=WordTaggingPipeline)("A cat")  # doctest: +SKIP
    """

    def gather_pre_entities(
        self, sentence: str, input_ids: Any, scores: Any, offset_mapping: Any, *arguments: Any, **kwargs: Any
    ) -> list[dict]:
        """See `TokenClassificationPipeline`, which uses the offsets of words outside the vocabulary."""
        if offset_mapping is None:
            raise CtxError("The tokenizer has no offsets of words in the text.", hint="use the family's tokenizer.")
        if input_ids.ndim > 1:
            input_ids = torch.full((len(input_ids),), self.tokenizer.unk_token_id)
        return super().gather_pre_entities(sentence, input_ids, scores, offset_mapping, *arguments, **kwargs)
