"""BERT checkpoints in families with more segments, and the export of such families to BERT."""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_ctxmodels.architectures.configurations import GENERATION_TOKEN_FIELDS, PAIR_SEGMENTS
from hf_ctxmodels.core.weights import single_tensor

_EMBEDDINGS = "embeddings.token_type_embeddings.weight"


def segment_conversion(copied: tuple[int, ...]) -> WeightConverter:
    """Conversion between BERT's two segment embeddings and more, initialised as copies of the segments `copied`."""
    return WeightConverter(_EMBEDDINGS, _EMBEDDINGS, [_AddCopies(copied)])


def are_copies(embeddings: Tensor, copied: tuple[int, ...]) -> bool:
    """Whether the (segments, hidden) embeddings after BERT's are still equal to the copied ones."""
    has_size = len(embeddings) == PAIR_SEGMENTS + len(copied)
    return has_size and torch.equal(embeddings[PAIR_SEGMENTS:], embeddings[list(copied)])


def exported_segment_fields(model: Any) -> dict[str, Any]:
    """Fields of the exported configuration of a family with more segments than BERT.

       The export has BERT's two segments, or all segments if the additional ones have been trained; BERT supports both.
       It
    includes the ids of the tokens for generation.
    """
    embeddings = model.base_model.embeddings.token_type_embeddings.weight
    segments = PAIR_SEGMENTS if are_copies(embeddings, model.config.copied_segments) else len(embeddings)
    return {"type_vocab_size": segments} | {name: getattr(model.config, name) for name in GENERATION_TOKEN_FIELDS}


class _AddCopies(ConversionOps):
    """(2, hidden) -> (2 + copies, hidden); more embeddings are unchanged."""

    def __init__(self, copied: tuple[int, ...]) -> None:
        self.copied = copied

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Add the copies."""
        (value,) = input_dict.values()
        embeddings = single_tensor(value)
        if len(embeddings) == PAIR_SEGMENTS:
            embeddings = torch.cat([embeddings, embeddings[list(self.copied)]])
        return {target_patterns[0]: embeddings}

    @property
    def reverse_op(self) -> ConversionOps:
        """Remove the copies."""
        return _RemoveCopies(self.copied)


class _RemoveCopies(_AddCopies):
    """(2 + copies, hidden) -> (2, hidden) if the copies are unchanged; all embeddings if they have been trained."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Remove the copies."""
        (value,) = input_dict.values()
        embeddings = single_tensor(value)
        if are_copies(embeddings, self.copied):
            embeddings = embeddings[:PAIR_SEGMENTS].clone()
        return {target_patterns[0]: embeddings}

    @property
    def reverse_op(self) -> ConversionOps:
        """Add the copies."""
        return _AddCopies(self.copied)
