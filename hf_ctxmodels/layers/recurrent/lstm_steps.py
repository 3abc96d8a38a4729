"""The elementwise part of a step of an LSTM layer, see `rnn.LSTM` for its equations.

`lstm_kernels` has the same functions for CUDA devices.
"""

import torch
from torch import Tensor


def lstm_step(gates: Tensor, cell: Tensor, new_cell: Tensor, output: Tensor, cell_clip: float | None) -> None:
    """Compute one LSTM step: the next cell state, and the output before the projection.

    Args:
        gates: (directions, rows, 4 * cell) gates, which are replaced by their values after the non-linearities.
        cell: (directions, rows, cell) cell state before the step.
        new_cell, output: (directions, rows, cell) results.
        cell_clip: Bound of the absolute value of the cell state; None for no bound.
    """
    size = new_cell.shape[2]
    in_gate, forget, candidate, out_gate = gates.split(size, -1)
    gates[..., : 2 * size].sigmoid_()
    candidate.tanh_()
    out_gate.sigmoid_()
    torch.mul(forget, cell, out=new_cell)
    new_cell.addcmul_(in_gate, candidate)
    if cell_clip is not None:
        new_cell.clamp_(-cell_clip, cell_clip)
    torch.mul(out_gate, new_cell.tanh(), out=output)


class LSTMStepGradients:
    """Gradients of `lstm_step`, whose factors are computed for all steps at once.

    Args:
        gates: (directions, tokens, 4 * cell) gates after their non-linearities.
        cells, previous_cells: (directions, tokens, cell) cell states after and before each token's step.
        cell_clip: See `lstm_step`.

    Attributes:
        d_gates: (directions, tokens, 4 * cell) gradients of the gates before their non-linearities.
        unprojected_outputs: (directions, tokens, cell) outputs of `lstm_step`.
    """

    def __init__(self, gates: Tensor, cells: Tensor, previous_cells: Tensor, cell_clip: float | None) -> None:
        size = cells.shape[2]
        tanh_cells = cells.tanh()
        # The factors by which a step multiplies the gradients: s - s^2 is the derivative of a sigmoid s, 1 - t^2 of a
        # tanh t.
        self.d_gates = torch.empty_like(gates)
        one = gates.new_ones(())
        in_gate, self._forget, candidate, out_gate = gates.split(size, -1)
        d_in, d_forget, d_candidate, d_out_gate = self.d_gates.split(size, -1)
        torch.addcmul(in_gate, in_gate, in_gate, value=-1, out=d_in).mul_(candidate)
        torch.addcmul(self._forget, self._forget, self._forget, value=-1, out=d_forget).mul_(previous_cells)
        torch.addcmul(one, candidate, candidate, value=-1, out=d_candidate).mul_(in_gate)
        torch.addcmul(out_gate, out_gate, out_gate, value=-1, out=d_out_gate).mul_(tanh_cells)
        self._cell_derivatives = torch.addcmul(one, tanh_cells, tanh_cells, value=-1).mul_(out_gate)
        self._is_clipped = None if cell_clip is None else cells.abs() >= cell_clip
        self._out_gate, self._tanh_cells = out_gate, tanh_cells

    def __call__(self, step: slice, d_output: Tensor, d_cell: Tensor) -> Tensor:
        """Compute `d_gates[:, step]` from (directions, rows, cell) gradients of output and cell state after a step;
        returns the gradient of the cell state before the step."""
        size, d_step_gates = d_cell.shape[2], self.d_gates[:, step]
        d_cell = torch.addcmul(d_cell, d_output, self._cell_derivatives[:, step])
        if self._is_clipped is not None:
            d_cell.masked_fill_(self._is_clipped[:, step], 0)
        d_step_gates[..., : 3 * size].unflatten(-1, (3, size)).mul_(d_cell[:, :, None])
        d_step_gates[..., 3 * size :].mul_(d_output)
        return d_cell * self._forget[:, step]

    @property
    def unprojected_outputs(self) -> Tensor:  # noqa: D102
        return self._out_gate * self._tanh_cells
