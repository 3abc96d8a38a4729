"""BERT's checkpoints in families with more segments, and such families in BERT's layout."""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_ctxmodels.architectures.bert_reference import ReferenceIsBert
from hf_ctxmodels.architectures.configuration_query_generation import GENERATION_TOKEN_FIELDS, PAIR_SEGMENTS
from hf_ctxmodels.core.weights import single_tensor

_TABLE = "embeddings.token_type_embeddings.weight"


def segment_conversion(copied: tuple[int, ...]) -> WeightConverter:
    """BERT's table of two segments <-> that of more, which begin as copies of the segments `copied`."""
    return WeightConverter(_TABLE, _TABLE, [_AddCopies(copied)])


def are_copies(table: Tensor, copied: tuple[int, ...]) -> bool:
    """Whether the rows of a (segments, hidden) table after BERT's are still what they began as."""
    return len(table) == PAIR_SEGMENTS + len(copied) and torch.equal(table[PAIR_SEGMENTS:], table[list(copied)])


class _AddCopies(ConversionOps):
    """(2, hidden) -> (2 + copies, hidden); a table of more rows stays as it is."""

    def __init__(self, copied: tuple[int, ...]) -> None:
        self.copied = copied

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Add the copies."""
        (found,) = input_dict.values()
        table = single_tensor(found)
        if len(table) == PAIR_SEGMENTS:
            table = torch.cat([table, table[list(self.copied)]])
        return {target_patterns[0]: table}

    @property
    def reverse_op(self) -> ConversionOps:
        """Leave them out."""
        return _LeaveOutCopies(self.copied)


class _LeaveOutCopies(_AddCopies):
    """(2 + copies, hidden) -> (2, hidden) while they are copies; all rows of a trained table."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Leave the copies out."""
        (found,) = input_dict.values()
        table = single_tensor(found)
        kept = table[:PAIR_SEGMENTS].clone() if are_copies(table, self.copied) else table
        return {target_patterns[0]: kept}

    @property
    def reverse_op(self) -> ConversionOps:
        """Add them."""
        return _AddCopies(self.copied)


class MoreSegmentsThanBert(ReferenceIsBert):
    """The part of a family's model base. An export has BERT's two segments, or all once the others were trained, which
    BERT opens as well, and says by which tokens the family writes, which BERT keeps."""

    def reference_config(self) -> dict[str, Any]:
        """As of every model, with the number of segments that the export has, and the tokens of `GENERATION_TOKEN_FIELDS`."""
        table = self.base_model.embeddings.token_type_embeddings.weight
        segments = PAIR_SEGMENTS if are_copies(table, self.config.copied_segments) else len(table)
        tokens = {name: getattr(self.config, name) for name in GENERATION_TOKEN_FIELDS}
        return super().reference_config() | {"type_vocab_size": segments} | tokens
