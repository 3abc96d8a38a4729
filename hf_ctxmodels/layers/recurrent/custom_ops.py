"""The recurrences of LSTM and GRU as operations of a compiled graph.

Defining an operation takes torch tens of milliseconds, so this module is imported where a graph is compiled.
"""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.recurrent.gru_recurrence import gru_gradients, run_gru
from hf_ctxmodels.layers.recurrent.lstm_recurrence import Rules, lstm_gradients, run_lstm


def _rules(gates: Tensor, hidden: Tensor, *others: Any) -> Rules:
    """Rules of steps with all rows; `others` are `present`, `restarts` and both clips."""
    present, restarts, cell_clip, projection_clip = others
    rows = hidden.shape[1]
    return Rules((rows,) * (gates.shape[1] // rows), cell_clip, projection_clip, present, restarts)


@torch.library.custom_op("hf_ctxmodels::recurrence", mutates_args=())
def lstm_custom_op(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    present: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lstm_recurrence.recur` as one operation of a compiled graph, so that the graph does not depend on the length."""
    rules = _rules(gates, hidden, present, restarts, cell_clip, projection_clip)
    ran = run_lstm(gates.clone(), hidden, cell, state_weight, projection, rules)
    return ran.outputs, ran.last_hidden, ran.last_cell


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
    present: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> list[Tensor]:
    """Gradients of `lstm_custom_op` in its first four arguments and the projection, with recomputation."""
    rules = _rules(gates, hidden, present, restarts, cell_clip, projection_clip)
    ran = run_lstm(gates.clone(), hidden, cell, state_weight, projection, rules)
    d_outputs, d_hidden, d_cell = gradients
    ran = ran._replace(last_hidden=d_hidden, last_cell=d_cell)
    found = lstm_gradients(ran, hidden, cell, state_weight, projection, rules, d_outputs)
    return [each.contiguous() for each in found if each is not None]


@_lstm_backward.register_fake
def _lstm_gradient_shapes(gradients: list[Tensor], *given: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in given[:5] if each is not None]


def _keep_lstm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.clips = inputs[7:]


def _differentiate_lstm(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    parts = [each.contiguous() for each in gradients]
    found = _lstm_backward(parts, *ctx.saved_tensors, *ctx.clips)
    return (*found, *[None] * (9 - len(found)))


lstm_custom_op.register_autograd(_differentiate_lstm, setup_context=_keep_lstm)


@torch.library.custom_op("hf_ctxmodels::gru_recurrence", mutates_args=())
def gru_custom_op(
    gates: Tensor,
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
    present: Tensor,
    restarts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`gru_recurrence.recur` as one operation of a compiled graph, so that the graph does not depend on the length."""
    rules = _rules(gates, hidden, present, restarts, None, None)
    return run_gru(gates.clone(), hidden, state_weight, candidate_bias, rules)[2:]


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
    present: Tensor,
    restarts: Tensor | None,
) -> list[Tensor]:
    """Gradients of `gru_custom_op` in its first four arguments, with recomputation."""
    rules = _rules(gates, hidden, present, restarts, None, None)
    values, shown, outputs, _ = run_gru(gates.clone(), hidden, state_weight, candidate_bias, rules)
    found = gru_gradients((values, shown, outputs, hidden, state_weight), rules, *gradients)
    return [each.contiguous() for each in found]


@_gru_backward.register_fake
def _gru_gradient_shapes(gradients: list[Tensor], *given: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in given[:4]]


def _keep_gru(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gru(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    found = _gru_backward([each.contiguous() for each in gradients], *ctx.saved_tensors)
    return (*found, None, None)


gru_custom_op.register_autograd(_differentiate_gru, setup_context=_keep_gru)
