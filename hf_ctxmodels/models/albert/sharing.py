"""Parameters shared across layers (Lan et al. 2019, section 3.1, "cross-layer parameter sharing", and table 4)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn

Scope = Literal["all", "attention", "ffn", "none"]
# What a `TransformerBlock` borrows in each scope that shares a part of it: a sub-layer goes with its LayerNorm.
SHARED_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "attention_norm"),
    "ffn": ("feed_forward", "feed_forward_norm"),
}


class SharedLayers(nn.Module):
    """The layers of an encoder, some of whose parameters serve at several depths.

    Iterating gives the layers in the order they are applied. `num_layers` consecutive depths are cut into `num_groups`
    groups of equal size, and parameters are shared within a group. Each depth applies `inner` layers with parameters
    of their own, which the next depth of the group applies again.

    - "all": a group has one set of layers, which the iteration gives again at each of its depths: one object to cast
      and to compile, whatever the depth.
    - "attention", "ffn": every depth has layers of its own, whose attention (or feed-forward network), with its
      LayerNorm, is that of the first depth of the group.
    - "none": every depth has layers of its own.

    Every parameter is registered once, at the first layer that holds it: one name in `state_dict`, one entry in
    `parameters()`, one gradient. A later layer refers to the part it borrows without owning it; tools that wrap or copy
    layer by layer (`nn.DataParallel`, FSDP's per-layer wrapping) therefore know only the scopes "all" and "none".

    Args:
        make_layer: Makes one layer.
        num_layers: Number of depths.
        scope: What is shared, see above.
        num_groups: Number of groups; must divide `num_layers`. Without effect when nothing is shared.
        inner: Layers applied at each depth.
    """

    def __init__(
        self, make_layer: Callable[[], nn.Module], num_layers: int, *, scope: Scope, num_groups: int = 1, inner: int = 1
    ) -> None:
        super().__init__()
        depths_per_group = num_layers // num_groups
        stacks = num_groups if scope == "all" else num_layers
        self.applications = num_layers // stacks
        for number in range(stacks):
            self.add_module(str(number), nn.ModuleList(make_layer() for _ in range(inner)))
        for number in range(stacks) if scope in SHARED_PARTS else ():
            owner = number - number % depths_per_group
            for layer, owning_layer in zip(self._stack(number), self._stack(owner), strict=True):
                if layer is not owning_layer:
                    _borrow(layer, owning_layer, SHARED_PARTS[scope])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for stack in self.children() for layer in [*cast(nn.ModuleList, stack)] * self.applications])

    def __len__(self) -> int:
        return sum(len(cast(nn.ModuleList, stack)) for stack in self.children()) * self.applications

    def _stack(self, number: int) -> nn.ModuleList:
        return cast(nn.ModuleList, getattr(self, str(number)))


def _borrow(layer: nn.Module, owner: nn.Module, parts: tuple[str, ...]) -> None:
    """Use the owner's parts in `layer`, as plain attributes: a registered module would be saved under both names."""
    for name in parts:
        delattr(layer, name)
        layer.__dict__[name] = getattr(owner, name)


@contextmanager
def cache_autocast_casts(device: torch.device) -> Iterator[None]:
    """Cast each parameter once, however often a forward under autocast applies it.

    Autocast keeps the cast of a parameter for as long as it lasts, but not in inference mode, where a shared layer
    would be cast again at every depth. In that case what is computed here is computed in no-grad mode.

    Args:
        device: Where the model is.
    """
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    if inference and torch.is_autocast_enabled(device.type):
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
