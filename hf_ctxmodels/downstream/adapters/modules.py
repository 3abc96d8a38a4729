"""Bottleneck adapters, invertible adapters and AdapterFusion, with AdapterHub's computation and parameter names."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.adapters.configuration import BottleneckConfig, FusionConfig
from hf_ctxmodels.layers.common import get_activation
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear

StackItem = str | tuple[str, ...]
"""One adapter, or the names of fused adapters."""


def adapter_names(*items: StackItem) -> list[str]:
    """The names of the adapters and fused adapters of a stack."""
    return [name for item in items for name in ([item] if isinstance(item, str) else item)]


_ACTIVATIONS = {"identity": "linear", "leakyrelu": "leaky_relu"}  # AdapterHub's name -> transformers' name


class BottleneckAdapter(nn.Module):
    """Bottleneck after one sub-layer: down-projection, activation, up-projection (Houlsby et al. 2019, section 2.1;
    Pfeiffer et al. 2021). `layer_index` selects the `reduction_factor`."""

    def __init__(self, hidden_size: int, config: BottleneckConfig, layer_index: int) -> None:
        super().__init__()
        self.config = config
        bottleneck_size = config.bottleneck_size(hidden_size, layer_index)
        norms = [nn.LayerNorm(hidden_size)] if config.ln_before else []
        self.adapter_down = nn.Sequential(
            *norms, nn.Linear(hidden_size, bottleneck_size), adapter_activation(config.non_linearity)
        )
        self.adapter_up = nn.Linear(bottleneck_size, hidden_size)
        self.adapter_norm_after = nn.LayerNorm(hidden_size) if config.ln_after else None
        self.dropout = Dropout(config.dropout)
        self.scaling: Tensor | float
        if isinstance(config.scaling, str):
            self.scaling = nn.Parameter(torch.ones(hidden_size if config.scaling == "channel" else 1))
        else:
            self.scaling = float(config.scaling)
        for layer in (self.linear_down, self.adapter_up):
            if config.init_weights == "bert":
                _init_normal(layer)
                continue
            if config.init_weights == "houlsby":
                nn.init.trunc_normal_(layer.weight, std=1e-2, a=-2e-2, b=2e-2)
            elif layer is self.linear_down:
                nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
            else:
                nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    @property
    def linear_down(self) -> nn.Linear:
        """The down-projection."""
        return self.adapter_down[-2]  # type: ignore[return-value]

    def input_and_residual(
        self, hidden_states: Tensor, output: Tensor, norm: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        """The input of the bottleneck and the adapter's residual, (..., hidden); arguments as in `ResidualSum`."""
        if self.config.is_parallel:
            return hidden_states, output
        bottleneck_input = residual = output
        if self.config.original_ln_before:
            total = hidden_states + output
            bottleneck_input = total if norm is None else norm(total)
            residual = total if self.config.residual_before_ln == "post_add" else output
        return bottleneck_input, residual if self.config.residual_before_ln else bottleneck_input

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden), scaled, before dropout and residual."""
        *norms, _, activation = self.adapter_down
        for norm in norms:
            hidden_states = norm(hidden_states)
        output = linear(self.adapter_up, activation(linear(self.linear_down, hidden_states)))
        return output if isinstance(self.scaling, float) and self.scaling == 1 else output * self.scaling

    def add_residual(self, output: Tensor, residual: Tensor) -> Tensor:
        """Apply dropout, norm and residual to the output of `forward`."""
        output = self.dropout(output)
        if self.adapter_norm_after is None:
            return output + residual
        if self.config.adapter_residual_before_ln and not self.config.is_parallel:
            return self.adapter_norm_after(output + residual)
        return self.adapter_norm_after(output) + residual


class AdapterFusion(nn.Module):
    """Attention over the outputs of several adapters at every token (Pfeiffer et al. 2021, section 3.2)."""

    def __init__(self, hidden_size: int, config: FusionConfig) -> None:
        super().__init__()
        self.config = config
        self.dropout = Dropout(config.dropout_prob or 0.0)
        self.query = nn.Linear(hidden_size, hidden_size) if config.query else None
        self.key = nn.Linear(hidden_size, hidden_size) if config.key else None
        self.value = nn.Linear(hidden_size, hidden_size, bias=False) if config.value else None
        for layer in (self.query, self.key, self.value):
            if layer is not None:
                _init_normal(layer)
        if self.value is not None and config.value_initialized:
            nn.init.constant_(self.value.weight, 1e-6)
            with torch.no_grad():
                self.value.weight.diagonal().fill_(1.0)

    def forward(self, query: Tensor, outputs: Tensor, residual: Tensor) -> Tensor:
        """Mix `outputs` (..., adapters, hidden) of the bottlenecks; `query` and `residual` are (..., hidden)."""
        values = outputs + residual[..., None, :] if self.config.residual_before else outputs
        keys = values if self.key is None else linear(self.key, values)
        query = query if self.query is None else linear(self.query, query)
        if self.value is not None and self.config.value_before_softmax:
            values = linear(self.value, values)
        scores = self.dropout((keys @ query[..., None])[..., 0])
        mixed = (scores.softmax(-1)[..., None, :] @ values)[..., 0, :]
        if self.value is not None and not self.config.value_before_softmax:
            mixed = linear(self.value, mixed)
        return mixed if self.config.residual_before else mixed + residual

    def regularization_loss(self) -> Tensor | None:
        """0.01 times the squared distance of the value weight from the identity; None without regularization."""
        if self.value is None or not self.config.regularization:
            return None
        weight = self.value.weight
        return 0.01 * (weight - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)).square().sum()


class SublayerAdapters(nn.Module):
    """The adapters after one sub-layer of a block, hooked to its `ResidualSum`.

    Attributes:
        members: Name -> adapter; with `one_per_depth`, name -> {depth: adapter}.
        fusions: Names joined by commas -> fusion of these adapters.
        active: The applied adapters and fusions, from the lowest up; names that this sub-layer lacks are skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleDict()
        self.fusions = nn.ModuleDict()
        self.active: tuple[StackItem, ...] = ()
        self.handles: list[RemovableHandle] = []

    def attach(self, residual_sum: nn.Module) -> None:
        """Hook the adapters to a block's residual sum."""
        self.handles.append(residual_sum.register_forward_pre_hook(self._adapt_output))
        self.handles.append(residual_sum.register_forward_hook(self._skip_residual_sum))

    def forward(self, hidden_states: Tensor, output: Tensor, norm: nn.Module | None, layer_index: int) -> Tensor:
        """The adapted output of the sub-layer; arguments as in `ResidualSum`."""
        for item in self.active:
            adapters = self.adapters_at(adapter_names(item), layer_index)
            if not adapters:
                continue
            bottleneck_input, residual = adapters[-1].input_and_residual(hidden_states, output, norm)
            if isinstance(item, str):
                output = adapters[-1].add_residual(adapters[-1](bottleneck_input), residual)
            else:
                fusion: AdapterFusion = self.fusions[",".join(item)]  # type: ignore[assignment]
                query = output if fusion.config.query_before_ln else bottleneck_input
                output = fusion(query, torch.stack([adapter(bottleneck_input) for adapter in adapters], -2), residual)
        return output

    def adapters_at(self, names: Sequence[str], layer_index: int) -> list[BottleneckAdapter]:
        """The adapters of these names that exist at a depth."""
        adapters = []
        for name in names:
            adapter = self.members._modules.get(name)
            if isinstance(adapter, nn.ModuleDict):
                adapter = adapter._modules.get(str(layer_index))
            if adapter is not None:
                adapters.append(adapter)
        return adapters  # type: ignore[return-value]

    def _adapt_output(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return arguments[0], self(*arguments), *arguments[2:]

    def _skip_residual_sum(self, module: nn.Module, arguments: tuple[Any, ...], total: Tensor) -> Tensor:
        """The adapted output itself if the last adapter has `original_ln_after=False`, else the sum."""
        adapters = self.adapters_at(adapter_names(*self.active), arguments[3])
        return total if not adapters or adapters[-1].config.original_ln_after else arguments[1]


class InvertibleAdapter(nn.Module):
    """Two additive couplings of the halves of an embedding (NICE; Pfeiffer et al. 2020, section 4.3).

    A half's width divided by `reduction_factor` is the width of the bottleneck between the linear layers of a coupling.
    """

    def __init__(self, embedding_size: int, non_linearity: str, reduction_factor: float) -> None:
        super().__init__()
        self.first_half = embedding_size // 2
        second_half = embedding_size - self.first_half
        self.F = _coupling(second_half, self.first_half, non_linearity, reduction_factor)
        self.G = _coupling(self.first_half, second_half, non_linearity, reduction_factor)

    def forward(self, embeddings: Tensor) -> Tensor:
        """(..., embedding) -> (..., embedding)."""
        first, second = embeddings[..., : self.first_half], embeddings[..., self.first_half :]
        first = first + self.F(second)
        return torch.cat([first, second + self.G(first)], -1)

    def inverse(self, states: Tensor) -> Tensor:
        """(..., embedding) -> (..., embedding), such that `inverse(forward(x))` is x."""
        first, second = states[..., : self.first_half], states[..., self.first_half :]
        second = second - self.G(first)
        return torch.cat([first - self.F(second), second], -1)


class InvertibleAdapters(nn.Module):
    """The invertible adapters (name -> adapter) of the embeddings, hooked to the embeddings' output and to inputs of
    output layers; `active` is the name of the applied one, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleDict()
        self.active: str | None = None
        self.handles: list[RemovableHandle] = []

    def attach(self, embedding_output: nn.Module) -> None:
        """Hook the adapters to the embeddings' output."""
        self.handles.append(embedding_output.register_forward_hook(self._adapt_embeddings))

    def attach_inverse(self, output_layer_input: nn.Module) -> None:
        """Hook the inverse to the input of an output layer that is tied to the embeddings, unless it is hooked
        already."""
        if not any(getattr(hook, "__self__", None) is self for hook in output_layer_input._forward_hooks.values()):
            self.handles.append(output_layer_input.register_forward_hook(self._invert_states))

    def forward(self, embeddings: Tensor) -> Tensor:
        """(..., embedding) -> (..., embedding)."""
        return embeddings if self.active is None else self.members[self.active](embeddings)

    def inverse(self, states: Tensor) -> Tensor:
        """(..., embedding) -> (..., embedding), before the output layer."""
        return states if self.active is None else self.members[self.active].inverse(states)  # type: ignore[operator]

    def _adapt_embeddings(self, module: nn.Module, arguments: tuple[Any, ...], embeddings: Tensor) -> Tensor:
        return self(embeddings)

    def _invert_states(self, module: nn.Module, arguments: tuple[Any, ...], states: Tensor) -> Tensor:
        return self.inverse(states)


def adapter_activation(name: str) -> nn.Module:
    """The activation of an AdapterHub name; raises CtxError for an unknown name."""
    try:
        return get_activation(_ACTIVATIONS.get(name.lower(), name.lower()))
    except KeyError as error:
        raise CtxError(
            f"There is no activation {name!r}.", location="non_linearity", hint="use relu, swish, gelu or linear."
        ) from error


def _coupling(inputs: int, outputs: int, non_linearity: str, reduction_factor: float) -> nn.Sequential:
    bottleneck_size = max(1, int(inputs // reduction_factor))
    down, up = nn.Linear(inputs, bottleneck_size), nn.Linear(bottleneck_size, outputs)
    for layer in (down, up):
        _init_normal(layer)
    return nn.Sequential(down, adapter_activation(non_linearity), up)


def _init_normal(layer: nn.Linear) -> None:
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
