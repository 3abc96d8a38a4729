"""The recurrences of LSTM and GRU layers in an exported graph: one `scan` of torch for any length.

Unlike with the custom operators of compiled graphs, an exported program then needs no code of this package, and ONNX
has the operator. The equations are the same as in `recurrence`, for rows with padding positions (see
`PackedSequences.with_padding`).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan  # it has no public name yet

State = tuple[Tensor, ...]
Step = Callable[[State, Tensor], State]


def scan_lstm(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
    token_mask: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, ...]:
    """Outputs (directions, tokens, output), and the last hidden state and cell; arguments as in `lstm_recurrence` and
    `StepOptions`."""
    gates, hidden, cell, state_weight = map(_detach_for_onnx, (gates, hidden, cell, state_weight))
    projection = None if projection is None else _detach_for_onnx(projection)

    def step(state: State, input_terms: Tensor) -> State:
        hidden, cell = state
        in_gate, forget, candidate, out_gate = torch.baddbmm(input_terms, hidden, state_weight.mT).chunk(4, -1)
        cell = _clip(forget.sigmoid() * cell + in_gate.sigmoid() * candidate.tanh(), cell_clip)
        unprojected = out_gate.sigmoid() * cell.tanh()
        return _clip(unprojected if projection is None else unprojected @ projection.mT, projection_clip), cell

    return _scan_steps(step, (hidden, cell), gates, token_mask, restarts)


def scan_gru(
    gates: Tensor,
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
    token_mask: Tensor,
    restarts: Tensor | None,
) -> tuple[Tensor, ...]:
    """Outputs (directions, tokens, hidden), and the last state; arguments as in `gru_recurrence` and `StepOptions`."""
    gates, hidden, state_weight, candidate_bias = map(_detach_for_onnx, (gates, hidden, state_weight, candidate_bias))

    def step(state: State, input_terms: Tensor) -> State:
        (hidden,) = state
        reset_input, update_input, candidate_input = input_terms.chunk(3, -1)
        reset, update, candidate = torch.bmm(hidden, state_weight.mT).chunk(3, -1)
        reset, update = (reset_input + reset).sigmoid(), (update_input + update).sigmoid()
        candidate = (candidate_input + reset * (candidate + candidate_bias[:, None])).tanh()
        return (candidate + update * (hidden - candidate),)

    return _scan_steps(step, (hidden,), gates, token_mask, restarts)


def _scan_steps(
    step: Step, initial: State, gates: Tensor, token_mask: Tensor, restarts: Tensor | None
) -> tuple[Tensor, ...]:
    """Run all steps of all rows.

    Args:
        step: The state and a step's (directions, rows, width) gates -> the next state.
        initial: Tensors (directions, rows, width), the state before the first step, which begins with the output.
        gates: (directions, tokens, width), all rows of the first step, all rows of the second, and so on.
        token_mask: (directions, tokens, 1) bool, False where the state is carried unchanged.
        restarts: (directions, tokens, 1) bool, True where the state is zeroed before the step; or None.

    Returns:
        (directions, tokens, width) outputs, and the tensors of the last state.
    """

    def combine(state: State, inputs: tuple[Tensor, ...]) -> tuple[State, Tensor]:
        step_gates, is_token, *restart = inputs
        before = tuple(tensor * ~restart[0] for tensor in state) if restart else state
        after = tuple(torch.where(is_token, new, old) for new, old in zip(step(before, step_gates), before))
        return after, after[0].clone()  # a scan's outputs must not share memory

    rows = initial[0].shape[1]
    inputs = [tensor for tensor in (gates, token_mask, restarts) if tensor is not None]
    steps = tuple(tensor.unflatten(1, (-1, rows)).transpose(0, 1) for tensor in inputs)
    last, outputs = scan(combine, initial, steps)
    return (outputs.transpose(0, 1).flatten(1, 2), *last)


def _detach_for_onnx(tensor: Tensor) -> Tensor:
    """The tensor, without its gradient in ONNX export, which does not support a `scan` with gradients."""
    return tensor.detach() if torch.onnx.is_in_onnx_export() else tensor


def _clip(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
