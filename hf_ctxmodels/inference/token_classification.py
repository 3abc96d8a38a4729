"""transformers' tagging pipeline for words that are given as their characters."""

from typing import Any

import torch
from transformers import TokenClassificationPipeline

from hf_ctxmodels.core.errors import CtxError


class WordTaggingPipeline(TokenClassificationPipeline):
    """`token-classification` where `input_ids` are (batch, words, characters), in which transformers looks for one id.

    Words are then those of the text, as they stand there, and none is a part of another. All arguments and results
    are those of `TokenClassificationPipeline`.

    Raises:
        CtxError: the tokenizer gives no offsets, so that a word cannot be found in the text.

    Example:
        >>> from transformers import pipeline
        >>> pipeline("token-classification", directory, pipeline_class=WordTaggingPipeline)("A cat")  # doctest: +SKIP
    """

    def gather_pre_entities(
        self, sentence: str, input_ids: Any, scores: Any, offset_mapping: Any, *arguments: Any, **kwargs: Any
    ) -> list[dict]:
        """See `TokenClassificationPipeline`, which takes the text at its offsets for a word outside the vocabulary."""
        if offset_mapping is None:
            raise CtxError("The tokenizer gives no offsets of words in the text.", hint="use the family's tokenizer.")
        if input_ids.ndim > 1:
            input_ids = torch.full((len(input_ids),), self.tokenizer.unk_token_id)
        return super().gather_pre_entities(sentence, input_ids, scores, offset_mapping, *arguments, **kwargs)
