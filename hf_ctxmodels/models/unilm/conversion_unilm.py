"""UniLM weight names, which are BERT's, and the embeddings of six segments, of which BERT has two."""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform

from hf_ctxmodels.core.weights import single_tensor
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION, BERT_EXPORT
from hf_ctxmodels.models.unilm.configuration_unilm import BERT_SEGMENTS
from hf_ctxmodels.models.unilm.segments_unilm import COPIED_SEGMENTS

_TABLE = "embeddings.token_type_embeddings.weight"


class AddSegments(ConversionOps):
    """BERT's two segments are followed by copies of them; a table of more rows stays as it is."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """(2, hidden) -> (6, hidden)."""
        (found,) = input_dict.values()
        table = single_tensor(found)
        if len(table) == BERT_SEGMENTS:
            table = torch.cat([table, table[list(COPIED_SEGMENTS)]])
        return {target_patterns[0]: table}

    @property
    def reverse_op(self) -> ConversionOps:
        """Keep BERT's segments."""
        return _KeepPair()


class _KeepPair(ConversionOps):
    """The segments of a pair."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """(6, hidden) -> (2, hidden)."""
        (found,) = input_dict.values()
        return {target_patterns[0]: single_tensor(found)[:BERT_SEGMENTS].clone()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Add the others."""
        return AddSegments()


_SEGMENTS = WeightConverter(_TABLE, _TABLE, [AddSegments()])
UNILM_EXPORT: list[WeightTransform] = [*BERT_EXPORT, _SEGMENTS]
UNILM_CONVERSION: list[WeightTransform] = [*BERT_CONVERSION, _SEGMENTS]
