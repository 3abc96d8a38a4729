"""Changes of a model's modules that its configuration records, such as pruned heads."""

from collections.abc import Callable

from transformers import PreTrainedModel

from hf_ctxmodels.core.attention_heads import PRUNED_HEADS, apply_pruned_heads

STRUCTURE_CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {PRUNED_HEADS: apply_pruned_heads}
"""Field of the configuration -> function that makes the recorded change in a model under construction, before its
weights are initialized or loaded. A model with a head calls it after its encoder: a change that is in effect is
skipped. Changes are made in this order."""


def structure_changes(model: PreTrainedModel) -> list[str]:
    """The fields of `STRUCTURE_CHANGES` that the configuration of a model sets."""
    return [field for field in STRUCTURE_CHANGES if getattr(model.config, field, None)]
