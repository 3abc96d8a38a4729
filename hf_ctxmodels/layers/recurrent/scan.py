"""The recurrences of LSTM and GRU layers in an exported graph: one `scan` of torch, whatever the length.

Unlike the operators of compiled graphs, an exported program then needs no code of this package, and ONNX has the
operator. The equations are those of `lstm_recurrence` and `gru_recurrence`, for rows with padding positions (see
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
    present: Tensor,
    restarts: Tensor | None,
    cell_clip: float | None,
    projection_clip: float | None,
) -> tuple[Tensor, ...]:
    """Outputs (directions, tokens, output), and the last hidden state and cell; arguments as in
    `lstm_recurrence.recur`."""
    gates, hidden, cell, state_weight = map(_as_exported, (gates, hidden, cell, state_weight))
    projection = None if projection is None else _as_exported(projection)

    def step(state: State, given: Tensor) -> State:
        hidden, cell = state
        in_gate, forget, candidate, out_gate = torch.baddbmm(given, hidden, state_weight.mT).chunk(4, -1)
        cell = _clipped(forget.sigmoid() * cell + in_gate.sigmoid() * candidate.tanh(), cell_clip)
        shown = out_gate.sigmoid() * cell.tanh()
        return _clipped(shown if projection is None else shown @ projection.mT, projection_clip), cell

    return _scanned(step, (hidden, cell), gates, present, restarts)


def scan_gru(
    gates: Tensor,
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
    present: Tensor,
    restarts: Tensor | None,
) -> tuple[Tensor, ...]:
    """Outputs (directions, tokens, hidden), and the last state; arguments as in `gru_recurrence.recur`."""
    gates, hidden, state_weight, candidate_bias = map(_as_exported, (gates, hidden, state_weight, candidate_bias))

    def step(state: State, given: Tensor) -> State:
        (hidden,) = state
        from_reset, from_update, from_candidate = given.chunk(3, -1)
        reset, update, candidate = torch.bmm(hidden, state_weight.mT).chunk(3, -1)
        reset, update = (from_reset + reset).sigmoid(), (from_update + update).sigmoid()
        candidate = (from_candidate + reset * (candidate + candidate_bias[:, None])).tanh()
        return (candidate + update * (hidden - candidate),)

    return _scanned(step, (hidden,), gates, present, restarts)


def _scanned(step: Step, start: State, gates: Tensor, present: Tensor, restarts: Tensor | None) -> tuple[Tensor, ...]:
    """All steps of all rows.

    Args:
        step: The state and a step's (directions, rows, width) gates -> the next state.
        start: (directions, rows, width) the state before the first step, whose first part is the output.
        gates: (directions, tokens, width), all rows of the first step, all rows of the second, and so on.
        present: (directions, tokens, 1) bool, False where the state is carried unchanged.
        restarts: (directions, tokens, 1) bool, True where the state is zeroed before the step; or None.

    Returns:
        (directions, tokens, width) outputs, and the parts of the last state.
    """

    def guarded(state: State, given: tuple[Tensor, ...]) -> tuple[State, Tensor]:
        step_gates, there, *restarted = given
        before = tuple(part * ~restarted[0] for part in state) if restarted else state
        after = tuple(torch.where(there, new, old) for new, old in zip(step(before, step_gates), before))
        return after, after[0].clone()  # a scan's outputs must not share memory

    rows = start[0].shape[1]
    given = [each for each in (gates, present, restarts) if each is not None]
    steps = tuple(each.unflatten(1, (-1, rows)).transpose(0, 1) for each in given)
    last, outputs = scan(guarded, start, steps)
    return (outputs.transpose(0, 1).flatten(1, 2), *last)


def _as_exported(tensor: Tensor) -> Tensor:
    """The tensor, for an ONNX graph without gradient: torch takes no `scan` with one into it."""
    return tensor.detach() if torch.onnx.is_in_onnx_export() else tensor


def _clipped(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
