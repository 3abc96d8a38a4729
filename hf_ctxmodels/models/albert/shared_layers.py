"""Cross-layer parameter sharing (Lan et al. 2019, section 3.1 and table 4)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import nn

Scope = Literal["all", "attention", "ffn", "none"]
# the modules of a `TransformerBlock` that are shared in each scope: a sub-layer with its LayerNorm
SHARED_SUBLAYERS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "attention_norm"),
    "ffn": ("feed_forward", "feed_forward_norm"),
}


class SharedLayers(nn.Module):
    """The layers of an encoder with shared parameters; iteration yields the layers in the order of application.

    Layers are indexed as in `nn.ModuleList`, so that `model.layers = model.layers[:number]` removes the last layers.

    `num_layers` consecutive depths form `num_groups` groups of equal size, and parameters are shared within a group.
    Each depth applies `inner` layers with different parameters.

    Each parameter is registered once, in the first layer that uses it. Later layers refer to a shared module without
    registering it; tools that wrap or copy single layers (`nn.DataParallel`, FSDP's per-layer wrapping) therefore
    support only the scopes "all" and "none".

    Args:
        scope: "all", the depths of a group apply the same layer objects; "attention" or "ffn", they share this
            sub-layer and its LayerNorm; "none", they share no parameters.
    """

    def __init__(
        self, make_layer: Callable[[], nn.Module], num_layers: int, *, scope: Scope, num_groups: int = 1, inner: int = 1
    ) -> None:
        super().__init__()
        depths_per_group = num_layers // num_groups
        num_depths = num_groups if scope == "all" else num_layers  # with distinct layer objects
        self.repetitions = num_layers // num_depths
        for depth in range(num_depths):
            self.add_module(str(depth), nn.ModuleList(make_layer() for _ in range(inner)))
        for depth in range(num_depths if scope in SHARED_SUBLAYERS else 0):
            first_depth = depth - depth % depths_per_group
            if depth != first_depth:
                for layer, owner in zip(self._layers_at(depth), self._layers_at(first_depth), strict=True):
                    for name in SHARED_SUBLAYERS[scope]:  # a registered module would be saved under both names
                        delattr(layer, name)
                        layer.__dict__[name] = getattr(owner, name)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(
            [layer for layers in self.children() for layer in [*cast(nn.ModuleList, layers)] * self.repetitions]
        )

    def __getitem__(self, index: int | slice) -> nn.Module:
        """The layer with a number, or an `nn.ModuleList` of the layers of a slice."""
        layers = list(self)
        return nn.ModuleList(layers[index]) if isinstance(index, slice) else layers[index]

    def __len__(self) -> int:
        return sum(len(cast(nn.ModuleList, layers)) for layers in self.children()) * self.repetitions

    def _layers_at(self, depth: int) -> nn.ModuleList:
        return cast(nn.ModuleList, getattr(self, str(depth)))


@contextmanager
def cache_autocast_casts(device: torch.device) -> Iterator[None]:
    """Cast shared parameters once per forward pass under autocast, on the device of the model.

    Autocast caches the casts of parameters, but not in inference mode, where a shared layer would be cast at each
    depth. In that case this context uses no-grad mode.
    """
    is_inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    if is_inference and torch.is_autocast_enabled(device.type):
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
