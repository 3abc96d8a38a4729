"""Bottleneck adapters, invertible adapters and AdapterFusion, with the arithmetic of the library adapters (AdapterHub).

Parameters have the names of that library's files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_type_hints

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import matches_type
from hf_ctxmodels.layers.activations import get_activation
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear

LINEAR = ("linear", "identity")
_ACTIVATIONS = {"identity": "linear", "leakyrelu": "leaky_relu"}  # names of the library -> those of transformers


@dataclass(frozen=True)
class BottleneckConfig:
    """An adapter of every layer; the fields have the names of the library adapters.

    Attributes:
        mh_adapter, cross_adapter, output_adapter: Whether there is one after self-attention, after cross-attention, and
            after the feed-forward network.
        reduction_factor: Width of the model divided by that of the bottleneck; or a mapping of layer number, as text,
            to it, with the key "default" for the others.
        non_linearity: An activation by transformers' name; "linear" for none.
        original_ln_before: Whether the bottleneck reads the sum of the sub-layer's output and input after the layer's
            norm, in place of the output.
        original_ln_after: Whether sum and norm of the layer follow the adapters.
        residual_before_ln: Whether the adapter's residual is the sub-layer's output, not what the bottleneck reads;
            "post_add": the sum before the norm.
        adapter_residual_before_ln: Whether the residual is added before the adapter's own norm, if it has one.
        ln_before, ln_after: A norm of the adapter's own before and after the bottleneck.
        scaling: Factor of the bottleneck's output; "learned" for a parameter, "channel" for one of each feature.
        is_parallel: Whether the bottleneck reads the sub-layer's input (He et al. 2022, section 3.3).
        dropout: Dropout of the bottleneck's output.
        init_weights: "bert", normal with a deviation of 0.02; "houlsby", 0.01 cut at two deviations; "mam_adapter",
            where the adapter changes nothing at first.
        leave_out: Numbers of layers without an adapter, from 0; those of a decoder follow the encoder's.
        inv_adapter: "nice" for an invertible adapter of the embeddings (Pfeiffer et al. 2020, section 4.2.2), or None.
        inv_adapter_reduction_factor: Half of the embeddings' width divided by that of its bottlenecks.
        one_per_depth: Whether a layer that is applied at several depths (ALBERT) has an adapter for each; the library
            has one for the layer.
    """

    mh_adapter: bool = False
    cross_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 16
    non_linearity: str = "relu"
    original_ln_before: bool = True
    original_ln_after: bool = True
    residual_before_ln: bool | Literal["post_add"] = True
    adapter_residual_before_ln: bool = False
    ln_before: bool = False
    ln_after: bool = False
    scaling: float | Literal["learned", "channel"] = 1.0
    is_parallel: bool = False
    dropout: float = 0.0
    init_weights: Literal["bert", "houlsby", "mam_adapter"] = "bert"
    leave_out: tuple[int, ...] = ()
    inv_adapter: Literal["nice"] | None = None
    inv_adapter_reduction_factor: float | None = None
    one_per_depth: bool = False

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            if not matches_type(value, hints[name]):
                hint = hints[name]
                kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
                raise CtxError(f"{name}={value!r} of an adapter is no {kind}.", hint="give a value of that type.")
        factors = self.reduction_factor
        smallest = min(factors.values(), default=1) if isinstance(factors, Mapping) else factors
        if min(smallest, self.inv_adapter_reduction_factor or 1) <= 0 or not 0 <= self.dropout < 1:
            raise CtxError(
                f"reduction_factor={factors}, inv_adapter_reduction_factor={self.inv_adapter_reduction_factor} or "
                f"dropout={self.dropout} of an adapter is out of range.",
                hint="factors are above 0, a dropout is from 0 to below 1.",
            )

    @property
    def places(self) -> tuple[str, ...]:
        """The sub-layers that have an adapter."""
        given = {"attention": self.mh_adapter, "cross_attention": self.cross_adapter}
        given["feed_forward"] = self.output_adapter
        return tuple(place for place, wanted in given.items() if wanted)

    def bottleneck(self, width: int, layer: int) -> int:
        """Width of the bottleneck in a layer, at least 1."""
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            if str(layer) not in factor and "default" not in factor:
                raise CtxError(
                    f"reduction_factor has no value for layer {layer}.", hint='add it, or one for "default".'
                )
            factor = factor.get(str(layer), factor.get("default", 1))
        return max(1, int(width // factor))


@dataclass(frozen=True)
class FusionConfig:
    """AdapterFusion (Pfeiffer et al. 2021, section 3.2); the fields have the names of the library adapters.

    Attributes:
        query, key, value: Whether there is a map of these.
        query_before_ln: Whether the query is the sub-layer's output, not what the bottlenecks read.
        residual_before: Whether the residual is added to every value, not to the result.
        value_before_softmax: Whether values are mapped before they are mixed.
        value_initialized: Whether the map of values begins as the identity.
        regularization: Whether the training loss has `0.01 * |value - identity|^2`.
        dropout_prob: Dropout of the scores; None for none.
    """

    query: bool = True
    key: bool = True
    value: bool = True
    query_before_ln: bool = False
    residual_before: bool = False
    value_before_softmax: bool = True
    value_initialized: bool = True
    regularization: bool = True
    dropout_prob: float | None = None


class BottleneckAdapter(nn.Module):
    """One adapter after one sub-layer: down, activation, up (Houlsby et al. 2019, section 2.1; Pfeiffer et al. 2021).

    Args:
        width: Of the layer.
        config: Its form.
        layer: Number of the layer, for `reduction_factor`.
    """

    def __init__(self, width: int, config: BottleneckConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        inner = config.bottleneck(width, layer)
        norms = [nn.LayerNorm(width)] if config.ln_before else []
        self.adapter_down = nn.Sequential(*norms, nn.Linear(width, inner), adapter_activation(config.non_linearity))
        self.adapter_up = nn.Linear(inner, width)
        self.adapter_norm_after = nn.LayerNorm(width) if config.ln_after else None
        self.dropout = Dropout(config.dropout)
        self.scaling: Tensor | float
        if isinstance(config.scaling, str):
            self.scaling = nn.Parameter(torch.ones(width if config.scaling == "channel" else 1))
        else:
            self.scaling = float(config.scaling)
        _initialise(self.linear_down, self.adapter_up, config.init_weights)

    @property
    def linear_down(self) -> nn.Linear:
        """The map to the bottleneck."""
        return self.adapter_down[-2]  # type: ignore[return-value]

    def inputs(self, output: Tensor, states: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """What the bottleneck reads, and the adapter's residual.

        Args:
            output: (..., width) of the sub-layer, or of the adapters below.
            states: (..., width) the sub-layer's input, before a norm.
            norm: The norm after the sub-layer, or None.
        """
        config, residual = self.config, output
        if config.is_parallel:
            return states, output
        read = output
        if config.original_ln_before:
            total = states + output
            read = total if norm is None else norm(total)
            residual = total if config.residual_before_ln == "post_add" else output
        return read, residual if config.residual_before_ln else read

    def forward(self, read: Tensor) -> Tensor:
        """(..., width) -> (..., width), scaled, before dropout and residual."""
        *norms, _, activation = self.adapter_down
        for norm in norms:
            read = norm(read)
        lifted = linear(self.adapter_up, activation(linear(self.linear_down, read)))
        return lifted if isinstance(self.scaling, float) and self.scaling == 1 else lifted * self.scaling

    def with_residual(self, lifted: Tensor, residual: Tensor) -> Tensor:
        """The adapter's result."""
        lifted = self.dropout(lifted)
        if self.adapter_norm_after is None:
            return lifted + residual
        if self.config.adapter_residual_before_ln and not self.config.is_parallel:
            return self.adapter_norm_after(lifted + residual)
        return self.adapter_norm_after(lifted) + residual


class InvertibleAdapter(nn.Module):
    """Two additive couplings of the halves of an embedding (NICE; Pfeiffer et al. 2020, section 4.2.2, equations 4-7).

    Args:
        width: Of the embeddings.
        non_linearity: Between the maps of a coupling.
        reduction_factor: Width of a half divided by that of the bottleneck.
    """

    def __init__(self, width: int, non_linearity: str, reduction_factor: float) -> None:
        super().__init__()
        self.first = width // 2
        rest = width - self.first
        self.F = _coupling(rest, self.first, non_linearity, reduction_factor)
        self.G = _coupling(self.first, rest, non_linearity, reduction_factor)

    def forward(self, embedded: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        first, second = embedded[..., : self.first], embedded[..., self.first :]
        first = first + self.F(second)
        return torch.cat([first, second + self.G(first)], -1)

    def inverse(self, states: Tensor) -> Tensor:
        """(..., width) -> (..., width), such that `inverse(forward(x))` is x."""
        first, second = states[..., : self.first], states[..., self.first :]
        second = second - self.G(first)
        return torch.cat([first - self.F(second), second], -1)


class AdapterFusion(nn.Module):
    """Mixes adapters at every token by attention over their outputs (Pfeiffer et al. 2021, section 3.2).

    Args:
        width: Of the layer.
        config: Its form.
    """

    def __init__(self, width: int, config: FusionConfig) -> None:
        super().__init__()
        self.config = config
        self.dropout = Dropout(config.dropout_prob or 0.0)
        self.query = nn.Linear(width, width) if config.query else None
        self.key = nn.Linear(width, width) if config.key else None
        self.value = nn.Linear(width, width, bias=False) if config.value else None
        for layer in (self.query, self.key, self.value):
            if layer is not None:
                _initialise_normal(layer)
        if self.value is not None and config.value_initialized:
            nn.init.constant_(self.value.weight, 1e-6)
            with torch.no_grad():
                self.value.weight.diagonal().fill_(1.0)

    def forward(self, read: Tensor, lifted: Tensor, residual: Tensor) -> Tensor:
        """Mix the adapters.

        Args:
            read: (..., width) the query.
            lifted: (..., adapters, width) outputs of the bottlenecks.
            residual: (..., width).
        """
        config, values = self.config, lifted
        if config.residual_before:
            values = values + residual[..., None, :]
        keys = values if self.key is None else linear(self.key, values)
        query = read if self.query is None else linear(self.query, read)
        if self.value is not None and config.value_before_softmax:
            values = linear(self.value, values)
        scores = self.dropout((keys @ query[..., None])[..., 0])
        mixed = (scores.softmax(-1)[..., None, :] @ values)[..., 0, :]
        if self.value is not None and not config.value_before_softmax:
            mixed = linear(self.value, mixed)
        return mixed if config.residual_before else mixed + residual

    def penalty(self) -> Tensor | None:
        """The squared distance of the map of values from the identity, times 0.01; None without regularization."""
        if self.value is None or not self.config.regularization:
            return None
        weight = self.value.weight
        return 0.01 * (weight - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)).square().sum()


def adapter_activation(name: str) -> nn.Module:
    """An activation by the name that files of adapters have for it; raises CtxError for an unknown one."""
    try:
        return get_activation(_ACTIVATIONS.get(name.lower(), name.lower()))
    except KeyError as error:
        raise CtxError(f"There is no activation {name!r}.", hint="non_linearity: relu, swish, gelu, linear.") from error


def _coupling(inputs: int, outputs: int, non_linearity: str, reduction_factor: float) -> nn.Sequential:
    inner = max(1, int(inputs // reduction_factor))
    maps = nn.Linear(inputs, inner), nn.Linear(inner, outputs)
    for layer in maps:
        _initialise_normal(layer)
    return nn.Sequential(maps[0], adapter_activation(non_linearity), maps[1])


def _initialise(down: nn.Linear, up: nn.Linear, how: str) -> None:
    if how == "bert":
        _initialise_normal(down)
        _initialise_normal(up)
        return
    for layer in (down, up):
        if how == "houlsby":
            nn.init.trunc_normal_(layer.weight, std=1e-2, a=-2e-2, b=2e-2)
        elif layer is down:
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
        else:
            nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def _initialise_normal(layer: nn.Linear) -> None:
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
