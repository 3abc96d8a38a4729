"""Names of adapters' parameters in files: those of the library adapters (AdapterHub) where it knows the family."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.insertion import invertible_slot, slots
from hf_ctxmodels.layers.adapter_slots import AdapterSlot


@dataclass(frozen=True)
class FileLayout:
    """How a family's places are named in files.

    Attributes:
        prefix: Of all names; None for the base model's own.
        blocks: Patterns of a block's name here -> its name there.
        places: Sub-layer -> name within the block; "encoder.feed_forward" is that of an encoder alone.
    """

    prefix: str | None
    blocks: Mapping[str, str]
    places: Mapping[str, str]

    def block(self, name: str) -> str:
        """The name of a block."""
        for pattern, replacement in self.blocks.items():
            name, found = re.subn(pattern, replacement, name)
            if found:
                return name
        return name

    def place(self, block: str, place: str) -> str:
        """The name of a sub-layer's adapters."""
        stack = block.split(".")[0]
        return self.places.get(f"{stack}.{place}", self.places[place])


_NAMED = {
    "attention": "attention_adapters",
    "cross_attention": "cross_attention_adapters",
    "feed_forward": "output_adapters",
}
_NATIVE = FileLayout(None, {}, _NAMED)
_BERT = FileLayout(None, {r"^layers\.": "encoder.layer."}, {"attention": "attention.output", "feed_forward": "output"})
_LAYOUTS = {
    **dict.fromkeys(("bert", "ernie", "roberta", "xlm-roberta", "electra"), _BERT),
    "albert": FileLayout(
        "albert",
        {r"^layers\.(\d+)\.": r"encoder.albert_layer_groups.\1.albert_layers."},
        {"attention": "attention.attention_adapters", "feed_forward": "output_adapters"},
    ),
    "gpt2": FileLayout("transformer", {r"^layers\.": "h."}, _NAMED),
    "bart": FileLayout("model", {}, _NAMED),
    "t5": FileLayout(
        "transformer",
        {r"^(encoder|decoder)\.layers\.": r"\1.block."},
        {
            "attention": "layer.0",
            "cross_attention": "layer.1",
            "encoder.feed_forward": "layer.1",
            "feed_forward": "layer.2",
        },
    ),
}


def layout_of(base: CtxPreTrainedModel) -> FileLayout:
    """The layout of a base model's files."""
    return _LAYOUTS.get(base.reference_model_type or "", _NATIVE)


def model_types(base: CtxPreTrainedModel) -> tuple[str, ...]:
    """What files may say for the model's type, the one to write first."""
    own = base.config.model_type
    return tuple(dict.fromkeys((base.reference_model_type or own, own)))


def adapter_tensors(base: CtxPreTrainedModel, name: str) -> dict[str, Tensor]:
    """The parameters of an adapter by their names in files."""
    found: dict[str, Tensor] = {}
    for file_prefix, slot in _slots(base):
        if name in slot.members:
            found |= _named(f"{file_prefix}.adapters.{name}", slot.members[name])
    invertible = invertible_slot(base)
    if invertible is not None and name in invertible.members:
        stack = "encoder." if base.config.is_encoder_decoder else ""
        found |= _named(f"{_prefix(base)}.{stack}invertible_adapters.{name}", invertible.members[name])
    return found


def fusion_tensors(base: CtxPreTrainedModel, names: str) -> dict[str, Tensor]:
    """The parameters of a fusion by their names in files."""
    found: dict[str, Tensor] = {}
    for file_prefix, slot in _slots(base):
        if names in slot.fusions:
            found |= _named(f"{file_prefix}.adapter_fusion_layer.{names}", slot.fusions[names])
    return found


def current_name(key: str) -> str:
    """A name in a file, of any release, as the last one has it."""
    key = re.sub(r"\.(attention|layer)_text_(task|lang)_adapters\.", ".adapters.", key)
    return re.sub(r"(^|\.)invertible_lang_adapters\.", r"\1invertible_adapters.", key)


def _prefix(base: CtxPreTrainedModel) -> str:
    return layout_of(base).prefix or base.base_model_prefix


def _slots(base: CtxPreTrainedModel) -> Iterator[tuple[str, AdapterSlot]]:
    layout = layout_of(base)
    for block, place, slot in slots(base):
        yield f"{_prefix(base)}.{layout.block(block.name)}.{layout.place(block.name, place)}", slot


def _named(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{key}": value for key, value in module.state_dict(keep_vars=True).items()}
