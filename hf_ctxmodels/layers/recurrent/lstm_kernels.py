"""The functions of `lstm_steps` as Triton kernels, one forward and one backward, instead of several torch kernels.

The import requires Triton. A program computes a block of one row's cells in float32, for float32, bfloat16 and float16
tensors on a CUDA device. The gates of all steps must be contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 512


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    # triton.language has no tanh
    exponential = tl.exp(-2.0 * tl.abs(x))  # cannot overflow
    magnitude = (1.0 - exponential) / (1.0 + exponential)
    square = x * x  # near zero, the difference would cancel
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0.0, -magnitude, magnitude))


@triton.jit
def _load(pointer: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(pointer, mask).to(tl.float32)


@triton.jit
def _round_to_dtype(number: tl.tensor, pointer: tl.tensor) -> tl.tensor:
    """A number in float32, rounded to the dtype of a tensor."""
    return number.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def step_kernel(
    gates: tl.tensor,
    cell: tl.tensor,
    new_cell: tl.tensor,
    output: tl.tensor,
    gates_stride: tl.tensor,
    cell_stride: tl.tensor,
    new_cell_stride: tl.tensor,
    output_stride: tl.tensor,
    cell_clip: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute `lstm_step` for a block of cells. The strides are the element strides of dimension 0, the directions."""
    row, direction = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < size
    gates += direction * gates_stride + row * 4 * size + column
    in_gate, forget = tl.sigmoid(_load(gates, mask)), tl.sigmoid(_load(gates + size, mask))
    candidate, out_gate = _tanh(_load(gates + 2 * size, mask)), tl.sigmoid(_load(gates + 3 * size, mask))
    tl.store(gates, in_gate, mask)
    tl.store(gates + size, forget, mask)
    tl.store(gates + 2 * size, candidate, mask)
    tl.store(gates + 3 * size, out_gate, mask)
    state = forget * _load(cell + direction * cell_stride + row * size + column, mask) + in_gate * candidate
    state = tl.where(state > cell_clip, cell_clip, tl.where(state < -cell_clip, -cell_clip, state))  # keeps NaN
    tl.store(new_cell + direction * new_cell_stride + row * size + column, state, mask)
    value = out_gate * _tanh(_round_to_dtype(state, new_cell))
    tl.store(output + direction * output_stride + row * size + column, value, mask)


@triton.jit
def gradient_kernel(
    gates: tl.tensor,
    cell: tl.tensor,
    previous_cell: tl.tensor,
    d_output: tl.tensor,
    d_cell: tl.tensor,
    d_gates: tl.tensor,
    d_previous_cell: tl.tensor,
    gates_stride: tl.tensor,
    cell_stride: tl.tensor,
    d_output_stride: tl.tensor,
    d_cell_stride: tl.tensor,
    d_previous_cell_stride: tl.tensor,
    cell_clip: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the gradients of `lstm_step` for a block of cells. Strides as in `step_kernel`."""
    row, direction = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < size
    first_gate, position = direction * gates_stride + row * 4 * size + column, row * size + column
    in_gate, forget = _load(gates + first_gate, mask), _load(gates + first_gate + size, mask)
    candidate, out_gate = _load(gates + first_gate + 2 * size, mask), _load(gates + first_gate + 3 * size, mask)
    state = _load(cell + direction * cell_stride + position, mask)
    previous_state = _load(previous_cell + direction * cell_stride + position, mask)
    d_value = _load(d_output + direction * d_output_stride + position, mask)
    tanh_state = _tanh(state)
    d_state = _load(d_cell + direction * d_cell_stride + position, mask)
    d_state += d_value * out_gate * (1.0 - tanh_state * tanh_state)
    bound = _round_to_dtype(tl.full([block], cell_clip, tl.float32), cell)
    d_state = tl.where(tl.abs(state) >= bound, 0.0, d_state)
    d_gates += first_gate
    tl.store(d_gates, d_state * candidate * (in_gate - in_gate * in_gate), mask)
    tl.store(d_gates + size, d_state * previous_state * (forget - forget * forget), mask)
    tl.store(d_gates + 2 * size, d_state * in_gate * (1.0 - candidate * candidate), mask)
    tl.store(d_gates + 3 * size, d_value * tanh_state * (out_gate - out_gate * out_gate), mask)
    tl.store(d_previous_cell + direction * d_previous_cell_stride + position, d_state * forget, mask)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], strided: tuple[Tensor, ...], cell_clip: float | None) -> None:
    """Run a kernel with tensors, the last one (directions, rows, cell), and the strides of dimension 0 of `strided`."""
    directions, rows, size = tensors[-1].shape
    block = min(triton.next_power_of_2(size), _MAX_BLOCK)
    strides, bound = [tensor.stride(0) for tensor in strided], float("inf") if cell_clip is None else float(cell_clip)
    with torch.cuda.device_of(tensors[0]):
        kernel[rows, triton.cdiv(size, block), directions](*tensors, *strides, bound, size=size, block=block)


def _make_rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def lstm_step(gates: Tensor, cell: Tensor, new_cell: Tensor, output: Tensor, cell_clip: float | None) -> None:
    """Compute one LSTM step by `step_kernel`; arguments as in `lstm_steps.lstm_step`."""
    tensors = gates, _make_rows_contiguous(cell), new_cell, output
    _launch(step_kernel, tensors, tensors, cell_clip)


class LSTMStepGradients:
    """Gradients of LSTM steps by `gradient_kernel`; arguments as in `lstm_steps.LSTMStepGradients`."""

    def __init__(self, gates: Tensor, cells: Tensor, previous_cells: Tensor, cell_clip: float | None) -> None:
        self._gates, self._cells, self._cell_clip = gates, cells, cell_clip
        self._previous_cells, self.d_gates = previous_cells.contiguous(), torch.empty_like(gates)

    def __call__(self, step: slice, d_output: Tensor, d_cell: Tensor) -> Tensor:  # noqa: D102
        gates, cells, d_gates = self._gates[:, step], self._cells[:, step], self.d_gates[:, step]
        d_output, d_cell = _make_rows_contiguous(d_output), _make_rows_contiguous(d_cell)
        d_previous_cell = torch.empty_like(d_cell, memory_format=torch.contiguous_format)
        tensors = gates, cells, self._previous_cells[:, step], d_output, d_cell, d_gates, d_previous_cell
        _launch(gradient_kernel, tensors, (gates, cells, d_output, d_cell, d_previous_cell), self._cell_clip)
        return d_previous_cell

    @property
    def unprojected_outputs(self) -> Tensor:  # noqa: D102
        return self._gates[..., 3 * self._cells.shape[2] :] * self._cells.tanh()
