"""Checks of the Triton kernels of LSTM steps without a GPU.

Usage: TRITON_INTERPRET=1 python lstm_kernel_checks.py interpret; python lstm_kernel_checks.py compile
"""

import sys
from itertools import product
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_ctxmodels.layers.recurrent import lstm_kernels, lstm_steps, recurrence
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}  # the interpreter truncates to bfloat16
TYPES = ("fp32", "bf16", "fp16")
CAPABILITIES = (75, 80, 90)
TOKENS = torch.arange(4) < torch.tensor([4, 1, 3, 4])[:, None]
CLIPS = {"cell_clip": 0.45, "projection_clip": 0.2}  # bfloat16 and float16 round 0.45 down
LAYERS: dict[str, dict[str, Any]] = {
    "one cell": {"cell_size": 1},
    "clips": {"cell_size": 16, **CLIPS},
    "projection and clips": {"cell_size": 37, "projection_size": 5, **CLIPS},
    "one direction, two blocks": {"cell_size": 600, "projection_size": 3, "directions": 1, "cell_clip": 0.45},
}


def interpret() -> None:
    """The kernels equal `lstm_steps` on the CPU."""
    check_layers()
    check_dtypes()
    check_extreme_numbers()


def check_layers() -> None:
    """Values and gradients, for rows of different lengths, and for padding and restarts."""
    for name, options in LAYERS.items():
        torch.manual_seed(0)
        layer = LSTM(3, **options)
        directions = len(layer.bias)
        for packing in (
            PackedSequences.build(TOKENS, directions=directions),
            PackedSequences.with_padding(TOKENS, (TOKENS.cumsum(1) > 2).long(), directions),
        ):
            results = (values_and_gradients(layer, packing, steps) for steps in (lstm_kernels, lstm_steps))
            for actual, expected in zip(*results, strict=True):
                error = ((actual - expected).norm() / expected.norm()).item()
                assert error < 1e-6, (name, packing.step_mask is None, error)


def values_and_gradients(layer: LSTM, packing: PackedSequences, steps: ModuleType) -> list[Tensor]:
    """Outputs and last states, and the gradients of a function of them."""
    recurrence._select_lstm_steps = lambda gates: steps
    torch.manual_seed(1)
    inputs = torch.randn(*packing.positions.shape, 3, requires_grad=True)
    # not contiguous, and the gradient of the outputs is expanded
    state = [torch.randn(tensor.shape[::-1]).permute(2, 1, 0).requires_grad_() for tensor in layer.zero_state(4)]
    outputs, last_state = layer(inputs, packing, state)
    total = outputs.sum() + sum((tensor * torch.randn_like(tensor)).sum() for tensor in last_state)
    return [outputs, *last_state, *torch.autograd.grad(total, [inputs, *state, *layer.parameters()])]


def check_dtypes() -> None:
    """One step, and its gradients from the same values, since rounding may decide whether a cell is clipped."""
    directions, rows, size = 2, 3, 37
    for (dtype, tolerance), clip in product(TOLERANCES.items(), (None, 0.45)):
        torch.manual_seed(0)
        gates = torch.randn(directions, rows, 4 * size).to(dtype)
        cell, d_output, d_cell = torch.randn(3, directions, rows, size).to(dtype)
        results: list[list[Tensor]] = []
        values: list[Tensor] = []
        for steps in (lstm_steps, lstm_kernels):
            step_values = [gates.clone(), torch.empty_like(cell), torch.empty_like(cell)]
            steps.lstm_step(step_values[0], cell, *step_values[1:], clip)
            values = values or step_values
            step_gradients = steps.LSTMStepGradients(*values[:2], cell, clip)
            d_previous_cell = step_gradients(slice(None), d_output, d_cell)
            results.append([*step_values, d_previous_cell, step_gradients.d_gates, step_gradients.unprojected_outputs])
        for expected, actual in zip(*results, strict=True):
            scale = expected.abs().max().item()
            torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


def check_extreme_numbers() -> None:
    """Relative to each number: tiny ones, large ones, infinity and NaN."""
    numbers = torch.cat([torch.logspace(-30, 3, 400), torch.tensor([torch.inf, torch.nan, 0.0])])
    numbers = torch.cat([-numbers, numbers])
    gates = torch.cat([torch.full_like(numbers, 0.5), numbers.flip(0), numbers, numbers])[None, None]
    for cell in (numbers, torch.zeros_like(numbers)):
        results = []
        for steps in (lstm_kernels, lstm_steps):
            values = [gates.clone(), *(torch.empty(1, 1, len(numbers)) for _ in range(2))]
            steps.lstm_step(values[0], cell[None, None], *values[1:], 3.0)
            results.append(values)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-37, equal_nan=True)


def check_compilation() -> None:
    """The kernels compile for GPUs, with aligned and odd sizes."""
    kernels = {lstm_kernels.step_kernel: 4, lstm_kernels.gradient_kernel: 7}  # with their numbers of tensors
    for (kernel, num_tensors), dtype, capability, size in product(kernels.items(), TYPES, CAPABILITIES, (37, 4096)):
        names = kernel.arg_names
        types = [f"*{dtype}"] * num_tensors + ["i32"] * (len(names) - num_tensors - 3) + ["fp32"] + ["constexpr"] * 2
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names) - 3)} if size == 4096 else {}
        source = ASTSource(kernel, dict(zip(names, types, strict=True)), {"size": size, "block": 64}, aligned)
        assert "cubin" in triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm


if __name__ == "__main__":
    {"interpret": interpret, "compile": check_compilation}[sys.argv[1]]()
