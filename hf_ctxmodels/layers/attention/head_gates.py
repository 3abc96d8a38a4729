"""Gates on attention heads: factors of the context of each head, and heads that attend uniformly.

The gates are hooks on the output projection, so that they hold in every layout, attention implementation, cache and
adapter; layers with prepacked weights run in the ordinary way while they have hooks.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_ctxmodels.core.attention_heads import (
    AttentionLayer,
    HeadSelection,
    attention_layers,
    check_shared_layers,
    select_heads,
)
from hf_ctxmodels.core.errors import CtxError

DisabledMode = Literal["zero", "uniform"]
"""How a head is disabled: "zero" multiplies its context by 0 (Michel et al. 2019, section 2.3); "uniform" distributes
its attention equally over the keys that a query may attend to (Kovaleva et al. 2019, section 4.6)."""


@contextmanager
def disabled_heads(model: nn.Module, heads: HeadSelection, mode: DisabledMode = "zero") -> Iterator[None]:
    """Disable attention heads within the context, in training and in evaluation.

    Args:
        model: A Transformer of this package, with or without a head; or one of transformers whose output projections,
            and for the mode "uniform" whose query projections, can be located.
        heads: Layer -> heads. Layers are numbered from 0; in an encoder-decoder, numbers are layers of the encoder, and
            "decoder.0" and "cross.0" are the self-attention and the cross-attention of the decoder.

    Raises:
        CtxError: The model has no such layer or head, or does not support the mode.

    Example:
        >>> import torch
        >>> from hf_ctxmodels import CtxBertConfig, CtxBertModel, disabled_heads
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = CtxBertModel(CtxBertConfig(vocab_size=9, **sizes)).eval()
        >>> with disabled_heads(model, {0: [0, 1], 1: [1]}):
        ...     outputs = model(torch.tensor([[1, 2, 3]]))
    """
    with install_disabled_heads(model, heads, mode):
        yield


def install_disabled_heads(model: nn.Module, heads: HeadSelection, mode: DisabledMode = "zero") -> ExitStack:
    """Disable heads until the result is closed; arguments and errors as in `disabled_heads`."""
    if mode not in get_args(DisabledMode):
        raise CtxError(f"mode={mode!r} is unknown.", hint=f"use one of {', '.join(get_args(DisabledMode))}.")
    selected = select_heads(model, heads)
    gates = {
        layer.name: torch.tensor([float(head not in numbers) for head in layer.heads]) for layer, numbers in selected
    }
    return install_gates(model, gates) if mode == "zero" else _install_uniform(model, gates)


@torch.no_grad()
def disable_heads(model: nn.Module, heads: HeadSelection) -> None:
    """Disable heads for good: their weights in the output projections are set to 0, and training does not change them,
    so that the saved model has the same outputs.

    Raises:
        CtxError: As in `disabled_heads`; or layers that share their weights are not treated equally (ALBERT).
    """
    selected = select_heads(model, heads)
    check_shared_layers(model, selected)
    for layer, numbers in selected:
        weight: Any = layer.out_proj.weight
        axis = 0 if isinstance(layer.out_proj, Conv1D) else 1  # of the input features
        for number in numbers:
            weight.unflatten(axis, (len(layer.heads), -1)).select(axis, layer.heads.index(number)).zero_()
    install_disabled_heads(model, heads)


def install_gates(model: nn.Module, gates: Mapping[str, Tensor]) -> ExitStack:
    """Multiply the context of each head by a gate until the result is closed.

    Args:
        gates: Name of a layer -> (heads,) factors, which may require gradients.
    """
    return _install(model, gates, _install_context_gates)


def _install(model: nn.Module, gates: Mapping[str, Tensor], install: Any) -> ExitStack:
    """Call `install` for each module, with the gates of all layers that share it."""
    layers = attention_layers(model)
    modules: dict[int, list[AttentionLayer]] = {}
    for layer in layers.values():
        modules.setdefault(id(layer.out_proj), []).append(layer)
    stack = ExitStack()
    _reset_compiled_graphs()
    stack.callback(_reset_compiled_graphs)
    for sharing in modules.values():
        gates_by_number = {layer.number: gates[layer.name] for layer in sharing if layer.name in gates}
        if not gates_by_number:
            continue
        current = _CurrentGates(gates_by_number, None if len(sharing) > 1 else sharing[0].number)
        if len(sharing) > 1:  # the layer number is an argument of shared modules
            handle = sharing[0].module.register_forward_pre_hook(current.select, with_kwargs=True)
            stack.callback(handle.remove)
        install(stack, sharing[0], current)
    return stack


@dataclass(eq=False)
class _CurrentGates:
    """The gates of the layer that a module computes; layers may share a module."""

    gates_by_number: dict[int, Tensor]
    number: int | None

    def select(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a shared attention module."""
        self.number = kwargs["layer_index"]

    def get(self, like: Tensor) -> Tensor | None:
        """The (heads,) gates in the dtype and on the device of a tensor; None if the layer has no gates."""
        gates = self.gates_by_number.get(self.number)  # type: ignore[arg-type]
        return None if gates is None else gates.to(like)


def _install_context_gates(stack: ExitStack, layer: AttentionLayer, current: _CurrentGates) -> None:
    def multiply(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        context = args[0]
        gates = current.get(context)
        if gates is None:
            return args
        return ((context.unflatten(-1, (len(gates), -1)) * gates[:, None]).flatten(-2), *args[1:])

    stack.callback(layer.out_proj.register_forward_pre_hook(multiply).remove)


def _install_uniform(model: nn.Module, gates: Mapping[str, Tensor]) -> ExitStack:
    if any(
        layer.query_proj is None or isinstance(layer.out_proj, Conv1D) for layer in attention_layers(model).values()
    ):
        raise CtxError(
            f"{type(model).__name__} does not support the mode 'uniform': its queries cannot be located, or its scores "
            "depend on relative positions.",
            hint="open the checkpoint with a family of this package, or use the mode 'zero'.",
        )
    return _install(model, gates, _install_query_gates)


def _install_query_gates(stack: ExitStack, layer: AttentionLayer, current: _CurrentGates) -> None:
    """Set queries and the bias of the scores to 0: all scores of a query are equal before masking."""
    attention, query_proj = layer.module, layer.query_proj
    assert query_proj is not None
    out_proj: Any = layer.out_proj
    width = attention.head_dim if attention is not None else out_proj.in_features // len(layer.heads)

    def multiply(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        start = args[1] if len(args) > 1 else 0  # of the range of output features
        gates = current.get(output)
        if gates is None or start:
            return None
        size = len(gates) * width
        query = output[..., :size].unflatten(-1, (len(gates), -1)) * gates[:, None]
        return torch.cat([query.flatten(-2), output[..., size:]], -1)

    stack.callback(query_proj.register_forward_hook(multiply).remove)
    if attention is not None and current.number is not None:  # layers with a bias do not share their weights
        previous = attention.bias_gates
        stack.callback(setattr, attention, "bias_gates", previous)
        gates = current.gates_by_number[current.number]
        attention.bias_gates = gates if previous is None else previous * gates


def _reset_compiled_graphs() -> None:
    """Discard compiled graphs, which do not notice new and removed hooks."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
