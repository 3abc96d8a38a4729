"""The places of a model that adapters stand in, and the modules there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.adapter_slots import (
    BLOCK_SLOT,
    EMBEDDING_SLOT,
    AdapterSlot,
    BlockAdapters,
    InvertibleSlot,
    blocks_of,
    embeddings_of,
    width_of,
)
from hf_ctxmodels.layers.adapters import BottleneckAdapter, BottleneckConfig, InvertibleAdapter
from hf_ctxmodels.registry import FAMILIES

PLACES = ("attention", "cross_attention", "feed_forward")


@dataclass(frozen=True)
class Block:
    """A block that can have adapters.

    Attributes:
        number: From 0; those of a decoder follow the encoder's. A block at several depths counts once.
        name: Of the module in the base model.
        module: The block.
        depths: At which it is applied.
    """

    number: int
    name: str
    module: Any
    depths: tuple[int, ...]

    @property
    def slots(self) -> dict[str, AdapterSlot]:
        """Its slots by sub-layer; none without adapters."""
        return dict(self.module.adapters or {})


def encoder_of(model: nn.Module) -> CtxPreTrainedModel:
    """The base model, in which adapters stand.

    Raises:
        CtxError: It has no Transformer layers.
    """
    base = getattr(model, "base_model", model)
    if not isinstance(base, CtxPreTrainedModel) or next(blocks_of(base), None) is None:
        able = [name for name, family in FAMILIES.items() if issubclass(family.config, CtxTransformerConfig)]
        raise CtxError(
            f"{type(model).__name__} has no Transformer layers, in which adapters stand.",
            hint=f"use a model of one of these families: {', '.join(able)}.",
        )
    return base


def blocks(base: nn.Module) -> list[Block]:
    """The blocks of a base model."""
    applied = getattr(base, "layers", None)
    order = [] if applied is None else list(applied)
    found = []
    for number, (name, module) in enumerate(blocks_of(base)):
        depths = tuple(depth for depth, layer in enumerate(order) if layer is module) or (number,)
        found.append(Block(number, name, module, depths))
    return found


def layer_count(base: nn.Module, config: BottleneckConfig) -> int:
    """How many layers `leave_out` counts: blocks, or the depths they are applied at."""
    return sum(len(block.depths) if config.one_per_depth else 1 for block in blocks(base))


def place_adapter(base: nn.Module, name: str, config: BottleneckConfig) -> None:
    """Add an adapter to the places of its form.

    Raises:
        CtxError: The model has none of them, or not the layers of `leave_out`.
    """
    count = layer_count(base, config)
    if any(not 0 <= number < count for number in config.leave_out):
        raise CtxError(
            f"leave_out={list(config.leave_out)}, but the model has {count} layers.",
            hint=f"give numbers from 0 to {count - 1}.",
        )
    placed = sum([_place_in_block(block, name, config) for block in blocks(base)])
    if not placed:
        raise CtxError(
            f"An adapter with {', '.join(config.places) or 'no place'} and leave_out={list(config.leave_out)} stands "
            f"nowhere in {type(base).__name__}.",
            hint="set mh_adapter, output_adapter, or in an encoder-decoder cross_adapter, and leave out fewer layers.",
        )
    if config.inv_adapter is not None:
        _place_at_embeddings(base, name, config)


def _place_in_block(block: Block, name: str, config: BottleneckConfig) -> int:
    """The number of places filled."""
    width, several, filled = width_of(block.module), config.one_per_depth and len(block.depths) > 1, 0
    if block.module.adapters is None:
        own = [place for place in PLACES if getattr(block.module, place, None) is not None]
        setattr(block.module, BLOCK_SLOT, BlockAdapters({place: AdapterSlot() for place in own}))
    for place in config.places:
        if place not in block.module.adapters:
            continue
        adapter: nn.Module
        if several:
            wanted = [depth for depth in block.depths if depth not in config.leave_out]
            adapter = nn.ModuleDict({str(depth): BottleneckAdapter(width, config, depth) for depth in wanted})
        else:
            number = block.depths[0] if config.one_per_depth else block.number
            if number in config.leave_out:
                continue
            adapter = BottleneckAdapter(width, config, number)
        block.module.adapters[place].members[name] = adapter
        filled += 1
    like(block.module.adapters, block.module.feed_forward_norm)
    return filled


def _place_at_embeddings(base: nn.Module, name: str, config: BottleneckConfig) -> None:
    holder: Any = embeddings_of(base)
    if holder.invertible is None:
        setattr(holder, EMBEDDING_SLOT, InvertibleSlot())
    width = base.get_input_embeddings().embedding_dim  # type: ignore[operator]
    factor = config.inv_adapter_reduction_factor or 2
    holder.invertible.members[name] = InvertibleAdapter(width, config.non_linearity, factor)
    like(holder.invertible, base.get_input_embeddings())  # type: ignore[operator]


def like(module: nn.Module, other: nn.Module) -> None:
    """Give a module the device, type and mode of another one."""
    parameter = next(other.parameters())
    module.to(device=parameter.device, dtype=parameter.dtype if parameter.is_floating_point() else torch.float32)
    module.train(other.training)


def slots(base: nn.Module) -> Iterator[tuple[Block, str, AdapterSlot]]:
    """All slots with their block and sub-layer."""
    for block in blocks(base):
        for place, slot in block.slots.items():
            yield block, place, slot


def invertible_slot(base: nn.Module) -> InvertibleSlot | None:
    """The slot at the embeddings, if there is one."""
    return getattr(embeddings_of(base), EMBEDDING_SLOT, None)


def remove_slots(base: nn.Module) -> None:
    """Leave the model as it was before any adapter."""
    for block in blocks(base):
        block.module.adapters = None
    holder = embeddings_of(base)
    if holder is not None:
        holder.invertible = None  # type: ignore[assignment]
