"""Cross-layer parameter sharing (Lan et al. 2019, section 3.1 and table 4)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn

Scope = Literal["all", "attention", "ffn", "none"]
# The shared parts of a `TransformerBlock` in each scope: a sub-layer with its LayerNorm.
SHARED_SUBLAYERS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "attention_norm"),
    "ffn": ("feed_forward", "feed_forward_norm"),
}


class SharedLayers(nn.Module):
    """The layers of an encoder with shared parameters; iteration gives the layers in the order of application.

    `num_layers` consecutive depths form `num_groups` groups of equal size, and parameters are shared within a group.
    Each depth applies `inner` layers with different parameters.

    - "all": the depths of a group apply the same layer objects.
    - "attention", "ffn": every depth has its own layers, but their attention (or feed-forward network), with its
      LayerNorm, is that of the group's first depth.
    - "none": every depth has its own layers.

    Every parameter is registered once, at the first layer that holds it. A later layer refers to a shared part without
    registering it; tools that wrap or copy layer by layer (`nn.DataParallel`, FSDP's per-layer wrapping) therefore
    support only the scopes "all" and "none".

    Args:
        make_layer: Creates one layer.
        num_layers: Number of depths.
        scope: The shared parts, see above.
        num_groups: Number of groups; must divide `num_layers`. No effect with "none".
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
        for number in range(stacks) if scope in SHARED_SUBLAYERS else ():
            owner = number - number % depths_per_group
            for layer, owning_layer in zip(self._stack(number), self._stack(owner), strict=True):
                if layer is not owning_layer:
                    _borrow(layer, owning_layer, SHARED_SUBLAYERS[scope])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for stack in self.children() for layer in [*cast(nn.ModuleList, stack)] * self.applications])

    def __len__(self) -> int:
        return sum(len(cast(nn.ModuleList, stack)) for stack in self.children()) * self.applications

    def _stack(self, number: int) -> nn.ModuleList:
        return cast(nn.ModuleList, getattr(self, str(number)))


def _borrow(layer: nn.Module, owner: nn.Module, parts: tuple[str, ...]) -> None:
    """Use the owner's parts in `layer` as plain attributes: registered modules would be saved under both names."""
    for name in parts:
        delattr(layer, name)
        layer.__dict__[name] = getattr(owner, name)


@contextmanager
def cache_autocast_casts(device: torch.device) -> Iterator[None]:
    """Cast each parameter once under autocast, however often a forward applies it.

    Autocast caches casts of parameters, but not in inference mode, where a shared layer would be cast again at every
    depth. In that case this context uses no-grad mode instead.

    Args:
        device: The model's device.
    """
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    if inference and torch.is_autocast_enabled(device.type):
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
