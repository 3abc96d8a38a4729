"""The recurrences of LSTM and GRU layers as custom operators, for compiled graphs that do not depend on the length.

Defining an operator takes torch tens of milliseconds, so this module is imported when a graph is compiled.
"""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.recurrent.recurrence import StepOptions, gru_gradients, lstm_gradients, run_gru, run_lstm


def _full_steps(gates: Tensor, hidden: Tensor) -> tuple[int, ...]:
    """Return `StepOptions.steps` for steps that each compute all rows."""
    rows = hidden.shape[1]
    return (rows,) * (gates.shape[1] // rows)


@torch.library.custom_op("hf_ctxmodels::recurrence", mutates_args=())
def lstm_custom_op(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    token_mask: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lstm_recurrence` with padding positions."""
    options = StepOptions(_full_steps(gates, hidden), cell_clip, projection_clip, token_mask, restarts)
    result = run_lstm(gates.clone(), hidden, cell, state_weight, projection, options)
    return result.outputs, result.last_hidden, result.last_cell


@lstm_custom_op.register_fake
def _lstm_shapes(
    gates: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = gates.new_empty(gates.shape[0], gates.shape[1], state_weight.shape[2])
    return outputs, gates.new_empty(hidden.shape), gates.new_empty(cell.shape)


@torch.library.custom_op("hf_ctxmodels::recurrence_backward", mutates_args=())
def _lstm_backward(
    gradients: list[Tensor],
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    token_mask: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> list[Tensor]:
    """Gradients of the first four arguments of `lstm_custom_op` and the projection, with recomputation."""
    options = StepOptions(_full_steps(gates, hidden), cell_clip, projection_clip, token_mask, restarts)
    result = run_lstm(gates.clone(), hidden, cell, state_weight, projection, options)
    d_outputs, d_last_hidden, d_last_cell = gradients
    result = result._replace(last_hidden=d_last_hidden, last_cell=d_last_cell)
    input_gradients = lstm_gradients(result, hidden, cell, state_weight, projection, options, d_outputs)
    return [gradient.contiguous() for gradient in input_gradients if gradient is not None]


@_lstm_backward.register_fake
def _lstm_gradient_shapes(gradients: list[Tensor], *inputs: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in inputs[:5] if tensor is not None]


def _save_lstm_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.clips = inputs[7:]


def _differentiate_lstm(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    contiguous = [gradient.contiguous() for gradient in gradients]
    input_gradients = _lstm_backward(contiguous, *ctx.saved_tensors, *ctx.clips)
    return (*input_gradients, *[None] * (9 - len(input_gradients)))


lstm_custom_op.register_autograd(_differentiate_lstm, setup_context=_save_lstm_inputs)


@torch.library.custom_op("hf_ctxmodels::gru_recurrence", mutates_args=())
def gru_custom_op(
    gates: Tensor,
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
    token_mask: Tensor,
    restarts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `gru_recurrence` with padding positions."""
    options = StepOptions(_full_steps(gates, hidden), token_mask=token_mask, restarts=restarts)
    result = run_gru(gates.clone(), hidden, state_weight, candidate_bias, options)
    return result.outputs, result.last_hidden


@gru_custom_op.register_fake
def _gru_shapes(gates: Tensor, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gates.new_empty(*gates.shape[:2], hidden.shape[2]), gates.new_empty(hidden.shape)


@torch.library.custom_op("hf_ctxmodels::gru_recurrence_backward", mutates_args=())
def _gru_backward(
    gradients: list[Tensor],
    gates: Tensor,
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
    token_mask: Tensor,
    restarts: Tensor | None,
) -> list[Tensor]:
    """Gradients of the first four arguments of `gru_custom_op`, with recomputation."""
    options = StepOptions(_full_steps(gates, hidden), token_mask=token_mask, restarts=restarts)
    result = run_gru(gates.clone(), hidden, state_weight, candidate_bias, options)
    d_outputs, d_last_hidden = gradients
    result = result._replace(last_hidden=d_last_hidden)
    input_gradients = gru_gradients(result, hidden, state_weight, options, d_outputs)
    return [gradient.contiguous() for gradient in input_gradients]


@_gru_backward.register_fake
def _gru_gradient_shapes(gradients: list[Tensor], *inputs: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in inputs[:4]]


def _save_gru_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gru(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    input_gradients = _gru_backward([gradient.contiguous() for gradient in gradients], *ctx.saved_tensors)
    return (*input_gradients, None, None)


gru_custom_op.register_autograd(_differentiate_gru, setup_context=_save_gru_inputs)
