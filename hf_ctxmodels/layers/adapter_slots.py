"""Where adapters stand in a model: after the sub-layers of its blocks, and after its embeddings.

A model without adapters has None in these places, and computes what it did.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.adapters import AdapterFusion, BottleneckAdapter, InvertibleAdapter

BLOCK_SLOT, EMBEDDING_SLOT = "adapters", "invertible"  # attributes that are None, or a module of this file
Item = str | tuple[str, ...]
"""What stands in a stack of adapters: one, or a fusion of several."""


def add_residual(
    adapters: "BlockAdapters | None", place: str, norm: nn.Module | None, states: Tensor, output: Tensor, depth: int = 0
) -> Tensor:
    """The sum of a sub-layer's input and its output, which passes through the block's adapters, if it has any.

    Args:
        adapters: Those of the block.
        place: The sub-layer: "attention", "cross_attention" or "feed_forward".
        norm: Applied to the sum, or None.
        states: (..., hidden) the sub-layer's input, before a norm.
        output: (..., hidden) its output, after dropout.
        depth: Number of the block in the order of application.
    """
    if adapters is not None:
        return adapters(place, norm, states, output, depth)
    total = states + output
    return total if norm is None else norm(total)


class AdapterSlot(nn.Module):
    """The adapters after one sub-layer.

    Attributes:
        members: Name -> adapter; or depth -> adapter, for those of `one_per_depth`.
        fusions: Names with commas -> fusion of these adapters.
        active: What is applied, from the lowest up; adapters that this place lacks are passed over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleDict()
        self.fusions = nn.ModuleDict()
        self.active: tuple[Item, ...] = ()

    def forward(self, norm: nn.Module | None, states: Tensor, output: Tensor, depth: int) -> Tensor:
        """As `add_residual`."""
        last = None
        for item in self.active:
            fused = isinstance(item, tuple)
            members = self.at([*item] if fused else [item], depth)  # type: ignore[list-item]
            if not members:
                continue
            last = members[-1]
            read, residual = last.inputs(output, states, norm)
            if fused:
                fusion: AdapterFusion = self.fusions[",".join(item)]  # type: ignore[assignment]
                query = output if fusion.config.query_before_ln else read
                output = fusion(query, torch.stack([member(read) for member in members], -2), residual)
            else:
                output = last.with_residual(last(read), residual)
        if last is not None and not last.config.original_ln_after:
            return output
        return add_residual(None, "", norm, states, output)

    def at(self, names: Sequence[str], depth: int) -> list[BottleneckAdapter]:
        """The adapters of these names at a depth, as far as there are any."""
        found = []
        for name in names:
            member = self.members._modules.get(name)
            if isinstance(member, nn.ModuleDict):
                member = member._modules.get(str(depth))
            found += [] if member is None else [member]
        return found  # type: ignore[return-value]


class BlockAdapters(nn.ModuleDict):
    """The adapters of a block: sub-layer -> slot."""

    def forward(self, place: str, norm: nn.Module | None, states: Tensor, output: Tensor, depth: int) -> Tensor:
        """As `add_residual`."""
        return self[place](norm, states, output, depth)


class InvertibleSlot(nn.Module):
    """The invertible adapters of the embeddings.

    Attributes:
        members: Name -> adapter.
        active: The one that is applied, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleDict()
        self.active: str | None = None

    @property
    def adapter(self) -> InvertibleAdapter | None:
        """The active one."""
        return None if self.active is None else self.members[self.active]  # type: ignore[return-value]

    def forward(self, embedded: Tensor) -> Tensor:
        """(..., embedding) -> (..., embedding)."""
        return embedded if self.adapter is None else self.adapter(embedded)

    def inverse(self, states: Tensor) -> Tensor:
        """(..., embedding) -> (..., embedding), before the output layer."""
        return states if self.adapter is None else self.adapter.inverse(states)


def after_embeddings(invertible: InvertibleSlot | None, embedded: Tensor) -> Tensor:
    """(..., embedding) -> (..., embedding) through the active invertible adapter, if any."""
    return embedded if invertible is None else invertible(embedded)


def before_output_layer(invertible: InvertibleSlot | None, states: Tensor) -> Tensor:
    """(..., embedding) -> (..., embedding), the inverse of `after_embeddings` before the map to the vocabulary, which
    is tied to the embeddings (Pfeiffer et al. 2020, section 4.2.2)."""
    return states if invertible is None else invertible.inverse(states)


def is_adapter_parameter(name: str) -> bool:
    """Whether the name of a parameter, a module or a file's key is that of an adapter, or of a part of one."""
    return not {BLOCK_SLOT, EMBEDDING_SLOT}.isdisjoint(name.split("."))


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks that can have adapters with their names, each once, those of an encoder before a decoder's."""
    for name, module in model.named_modules():
        if BLOCK_SLOT in module._modules:
            yield name, module


def embeddings_of(model: nn.Module) -> nn.Module | None:
    """The module whose embeddings can have invertible adapters: of an encoder-decoder, the encoder; or None."""
    return next((module for module in model.modules() if EMBEDDING_SLOT in module._modules), None)


def width_of(block: nn.Module) -> int:
    """Width of a block.

    Raises:
        CtxError: Its norm does not say.
    """
    shape = getattr(getattr(block, "feed_forward_norm", None), "normalized_shape", None)
    if not shape:
        raise CtxError(f"The width of {type(block).__name__} is unknown.")
    return int(shape[0])
