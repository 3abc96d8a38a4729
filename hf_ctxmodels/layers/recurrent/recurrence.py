"""The recurrences of LSTM and GRU layers after the products of the inputs.

One buffer holds the values of all steps. The backward pass visits the steps in reverse, and computes the gradient of
each weight in one product for all steps. On a CPU a step multiplies few rows by large weights, where oneDNN with
prepacked weights is several times faster than torch's BLAS. On a GPU `run_by_torch` runs all steps in one cuDNN call,
if cuDNN has the layer; else `lstm_kernels` runs the elementwise part of an LSTM's step in one kernel.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan  # it has no public name yet
from transformers.utils import logging

from hf_ctxmodels.core.devices import autocast_dtype, without_autocast
from hf_ctxmodels.layers.cpu.linear import (
    can_use_onednn,
    fast_linear,
    linear,
    matmul_transposed,
    onednn_linear,
    prepack_weight,
)
from hf_ctxmodels.layers.recurrent import lstm_steps
from hf_ctxmodels.layers.recurrent.packing import StepOptions

logger = logging.get_logger(__name__)

State = tuple[Tensor, ...]
"""Hidden state, the last output, and in an LSTM cell state: (directions, sequences, width) each."""

LSTM_GATES, GRU_GATES = 4, 3
_MIN_PREPACKED_STEPS = 12  # with fewer steps, prepacking a weight costs more than it saves
_LSTM_KERNELS = "hf_ctxmodels.layers.recurrent.lstm_kernels"
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def input_gates(layer: Any, packed: Tensor, bias: Tensor) -> Tensor:
    """The contribution of the input (directions, tokens, input) to the gates, (directions, tokens, gates).

    The layer has an `input_weight` (directions, gates, input), or `input_maps`, a linear layer per direction.
    """
    layers = getattr(layer, "input_maps", None)
    if layers is not None:
        return torch.stack([linear(module, states) for module, states in zip(layers, packed)]) + bias[:, None]
    weights = layer.input_weight.to(packed.dtype)
    return torch.stack([fast_linear(*arguments) for arguments in zip(packed, weights, bias)])


def computation_dtype(packed: Tensor) -> tuple[torch.dtype, AbstractContextManager[None]]:
    """The dtype of a layer for this input, and a context that disables autocast, if it is enabled: an exported program
    cannot be saved with an autocast context."""
    device = packed.device.type
    dtype = autocast_dtype(device)
    return (packed.dtype, nullcontext()) if dtype is None else (dtype, without_autocast(device))


class _StepProduct:
    """Repeated products with the transpose of a weight, (directions, out, in)."""

    def __init__(self, weight: Tensor, num_steps: int) -> None:
        self.weight = weight
        self.matrices: Sequence[Tensor] = weight.unbind()
        self.uses_onednn = can_use_onednn(weight, bfloat16=True)
        if self.uses_onednn and num_steps >= _MIN_PREPACKED_STEPS:
            self.matrices = [prepack_weight(matrix) for matrix in self.matrices]

    def add_to(self, target: Tensor, left: Tensor) -> None:
        """Compute `target += left @ weight.T`, both (directions, rows, ...)."""
        if not self.uses_onednn or not left.shape[1]:
            target.baddbmm_(left, self.weight.mT)
            return
        for direction, rows, matrix in zip(target, left, self.matrices, strict=True):
            direction.add_(onednn_linear(rows, matrix))

    def __call__(self, left: Tensor) -> Tensor:
        """(directions, rows, in) -> (directions, rows, out)."""
        if not self.uses_onednn or not left.shape[1]:
            return left @ self.weight.mT
        return torch.stack([onednn_linear(*pair) for pair in zip(left, self.matrices, strict=True)])


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """(directions, tokens, m), (directions, tokens, n) -> (directions, m, n)."""
    return torch.stack([matmul_transposed(first.T, second.T) for first, second in zip(left, right, strict=True)])


def _previous_states(initial: Tensor, states: Tensor, options: StepOptions) -> Tensor:
    """(directions, tokens, width) the state before each packed token's step; `initial` at the first step."""
    previous, start = [initial[:, : options.steps[0]]], 0
    for rows, next_rows in pairwise(options.steps):
        previous.append(states[:, start : start + next_rows])
        start += rows
    concatenated = torch.cat(previous, 1)
    return concatenated if options.restarts is None else concatenated * ~options.restarts


@cache
def has_lstm_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels of `lstm_kernels` run on a device: Triton must be installed and find a C compiler."""
    if find_spec("triton") is None:
        return False
    try:
        kernels = import_module(_LSTM_KERNELS)
        gates, *cells = (torch.zeros(1, 1, width, device=device, dtype=dtype) for width in (LSTM_GATES, 1, 1, 1))
        kernels.lstm_step(gates, *cells, None)
        kernels.LSTMStepGradients(gates, *cells[:2], None)(slice(0, 1), *cells[:2])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton, its compilers or the driver
        logger.warning(
            f"LSTM steps run without Triton, which failed with {type(error).__name__}: {error}\n  Fix: install a C "
            "compiler, or uninstall triton."
        )
        return False
    return True


def _select_lstm_steps(gates: Tensor) -> ModuleType:
    """`lstm_kernels` if they run on the device of the gates, which must be contiguous and of a supported dtype; else
    `lstm_steps`."""
    has_kernels = gates.is_cuda and gates.dtype in _KERNEL_DTYPES and gates.is_contiguous()
    return import_module(_LSTM_KERNELS) if has_kernels and has_lstm_kernels(gates.device, gates.dtype) else lstm_steps


def run_lstm(
    options: StepOptions, gates: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, projection: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The forward pass; the gates are overwritten in place.

    Returns:
        (directions, tokens, ...) gates after their non-linearities, hidden and cell states after each step; and the
        (directions, rows, ...) hidden and cell state after each row's last token.
    """
    directions, tokens, width = gates.shape
    size, num_steps = width // LSTM_GATES, len(options.steps)
    lstm_step = _select_lstm_steps(gates).lstm_step
    multiply_state = _StepProduct(state_weight, num_steps)
    project = None if projection is None else _StepProduct(projection, num_steps)
    outputs = gates.new_empty(directions, tokens, state_weight.shape[2])
    cells = gates.new_empty(directions, tokens, size)
    last_states: list[tuple[Tensor, Tensor]] = []  # of the rows without further tokens
    start = 0
    for rows in options.steps:
        if rows < hidden.shape[1]:
            last_states.append((hidden[:, rows:], cell[:, rows:]))
            hidden, cell = hidden[:, :rows], cell[:, :rows]
        step = slice(start, start := start + rows)
        if options.restarts is not None:
            continues = ~options.restarts[:, step]
            hidden, cell = hidden * continues, cell * continues
        step_gates, new_hidden, new_cell = gates[:, step], outputs[:, step], cells[:, step]
        multiply_state.add_to(step_gates, hidden)
        unprojected = new_hidden if project is None else new_cell.new_empty(new_cell.shape)
        lstm_step(step_gates, cell, new_cell, unprojected, options.cell_clip)
        if project is not None:
            new_hidden.copy_(project(unprojected))
        if options.projection_clip is not None:
            new_hidden.clamp_(-options.projection_clip, options.projection_clip)
        if options.step_mask is not None:
            is_token = options.step_mask[:, step]
            new_hidden.copy_(torch.where(is_token, new_hidden, hidden))
            new_cell.copy_(torch.where(is_token, new_cell, cell))
        hidden, cell = new_hidden, new_cell
    last_states.append((hidden, cell))
    return (gates, outputs, cells), tuple(torch.cat(states[::-1], 1) for states in zip(*last_states, strict=True))


def lstm_gradients(
    options: StepOptions,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    hidden: Tensor,
    cell: Tensor,
    state_weight: Tensor,
    projection: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments of `run_lstm`, from the values of all steps that it returned, and the gradients of the
    outputs and of the last states."""
    gates, outputs, cells = values
    d_outputs, d_last_hidden, d_last_cell = gradients
    num_steps = len(options.steps)
    backpropagate_state = _StepProduct(state_weight.transpose(1, 2), num_steps)
    backpropagate_projection = None if projection is None else _StepProduct(projection.transpose(1, 2), num_steps)
    previous_cells = _previous_states(cell, cells, options)
    backpropagate_step = _select_lstm_steps(gates).LSTMStepGradients(gates, cells, previous_cells, options.cell_clip)
    del previous_cells
    d_gates = backpropagate_step.d_gates
    d_pre_clip = d_outputs.clone()  # of the outputs before clipping
    is_clipped_output = None if options.projection_clip is None else outputs.abs() >= options.projection_clip
    d_hidden, d_cell = d_last_hidden[:, :0], d_last_cell[:, :0]
    stop = gates.shape[1]
    for rows in reversed(options.steps):
        later_rows, step = d_hidden.shape[1], slice(stop - rows, stop)
        if rows > later_rows:  # rows whose last token is in this step
            d_hidden = torch.cat([d_hidden, d_last_hidden[:, later_rows:rows]], 1)
            d_cell = torch.cat([d_cell, d_last_cell[:, later_rows:rows]], 1)
        d_output = d_pre_clip[:, step].add_(d_hidden)
        if options.step_mask is not None:
            is_padding = ~options.step_mask[:, step]
            d_carried_hidden, d_carried_cell = d_output * is_padding, d_cell * is_padding
            d_output.masked_fill_(is_padding, 0)
            d_cell = d_cell.masked_fill(is_padding, 0)
        if is_clipped_output is not None:
            d_output.masked_fill_(is_clipped_output[:, step], 0)
        d_unprojected = d_output if backpropagate_projection is None else backpropagate_projection(d_output)
        d_cell = backpropagate_step(step, d_unprojected, d_cell)
        d_hidden = backpropagate_state(d_gates[:, step])
        if options.step_mask is not None:
            d_cell, d_hidden = d_cell + d_carried_cell, d_hidden + d_carried_hidden
        if options.restarts is not None:
            continues = ~options.restarts[:, step]
            d_cell, d_hidden = d_cell * continues, d_hidden * continues
        stop -= rows
    d_state_weight = _sum_products(d_gates, _previous_states(hidden, outputs, options))
    d_projection = None
    if projection is not None:
        d_projection = _sum_products(d_pre_clip, backpropagate_step.unprojected_outputs)
    return d_gates, d_hidden, d_cell, d_state_weight, d_projection


def run_gru(
    options: StepOptions, gates: Tensor, hidden: Tensor, state_weight: Tensor, candidate_bias: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The forward pass; the gates are overwritten in place.

    Returns:
        (directions, tokens, ...) gates after their non-linearities, states after each step, and contributions of the
        state to each candidate; and the (directions, rows, hidden) state after each row's last token.
    """
    size = hidden.shape[2]
    multiply_state = _StepProduct(state_weight, len(options.steps))
    candidate_terms, outputs = (gates.new_empty(*gates.shape[:2], size) for _ in range(2))
    last_states: list[Tensor] = []  # of the rows without further tokens
    start = 0
    for rows in options.steps:
        if rows < hidden.shape[1]:
            last_states.append(hidden[:, rows:])
            hidden = hidden[:, :rows]
        step = slice(start, start := start + rows)
        if options.restarts is not None:
            hidden = hidden * ~options.restarts[:, step]
        step_gates, candidate_term, new_hidden = gates[:, step], candidate_terms[:, step], outputs[:, step]
        state_terms = multiply_state(hidden)
        step_gates[..., : 2 * size].add_(state_terms[..., : 2 * size]).sigmoid_()
        reset, update, candidate = step_gates.split(size, -1)
        torch.add(state_terms[..., 2 * size :], candidate_bias[:, None], out=candidate_term)
        candidate.addcmul_(reset, candidate_term).tanh_()
        torch.lerp(candidate, hidden, update, out=new_hidden)
        if options.step_mask is not None:
            new_hidden.copy_(torch.where(options.step_mask[:, step], new_hidden, hidden))
        hidden = new_hidden
    last_states.append(hidden)
    return (gates, outputs, candidate_terms), (torch.cat(last_states[::-1], 1),)


def gru_gradients(
    options: StepOptions,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    hidden: Tensor,
    state_weight: Tensor,
    candidate_bias: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of the arguments of `run_gru`, see `lstm_gradients`."""
    gates, outputs, candidate_terms = values
    d_outputs, d_last_hidden = gradients
    size = hidden.shape[2]
    previous = _previous_states(hidden, outputs, options)
    backpropagate_state = _StepProduct(state_weight.transpose(1, 2), len(options.steps))
    d_state_terms = torch.empty_like(gates)  # of the contributions of the state to the gates
    d_candidates = torch.empty_like(outputs)  # of the candidates before their non-linearity
    d_hidden = d_last_hidden[:, :0]
    stop = gates.shape[1]
    for rows in reversed(options.steps):
        later_rows, step = d_hidden.shape[1], slice(stop - rows, stop)
        if rows > later_rows:  # rows whose last token is in this step
            d_hidden = torch.cat([d_hidden, d_last_hidden[:, later_rows:rows]], 1)
        reset, update, candidate = gates[:, step].split(size, -1)
        d_new = d_outputs[:, step] + d_hidden
        d_carried = None
        if options.step_mask is not None:
            is_padding = ~options.step_mask[:, step]
            d_carried = d_new * is_padding
            d_new = d_new.masked_fill(is_padding, 0)
        d_reset, d_update, d_candidate_term = d_state_terms[:, step].split(size, -1)
        d_candidate = d_candidates[:, step]
        torch.mul(d_new * (1 - update), 1 - candidate.square(), out=d_candidate)
        torch.mul(d_candidate * candidate_terms[:, step], reset - reset.square(), out=d_reset)
        torch.mul(d_new * (previous[:, step] - candidate), update - update.square(), out=d_update)
        torch.mul(d_candidate, reset, out=d_candidate_term)
        d_hidden = torch.addcmul(backpropagate_state(d_state_terms[:, step]), d_new, update)
        if d_carried is not None:
            d_hidden = d_hidden + d_carried
        if options.restarts is not None:
            d_hidden = d_hidden * ~options.restarts[:, step]
        stop -= rows
    d_gates = torch.cat([d_state_terms[..., : 2 * size], d_candidates], -1)
    return d_gates, d_hidden, _sum_products(d_state_terms, previous), d_state_terms[..., 2 * size :].sum(1)


def uses_cudnn(layer: Any, packed: Tensor, options: StepOptions) -> bool:
    """Whether cuDNN has the layer: without clipping, padding positions and replaced linear layers, and with a
    projection only to a smaller width."""
    has_cudnn = packed.is_cuda and torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()
    is_plain = all(option is None for option in options[1:]) and getattr(layer, "input_maps", None) is None
    projection = getattr(layer, "projection", None)
    is_narrower = projection is None or projection.shape[1] < projection.shape[2]
    return has_cudnn and is_plain and is_narrower and not torch.compiler.is_compiling()


def run_by_torch(
    name: str, weights: Sequence[Tensor], options: StepOptions, packed: Tensor, *state: Tensor
) -> tuple[Tensor, ...]:
    """All steps of a layer by torch's LSTM or GRU: on a GPU one cuDNN call for each direction.

    Args:
        name: "lstm" or "gru".
        weights: (directions, ...) of the input, recurrent, the bias of each, and the projection, if any.
        packed: (directions, tokens, input).
        state: (directions, rows, width) tensors.

    Returns:
        As `rnn.run_recurrence`.
    """
    # cuDNN has no bfloat16 in all versions; with few rows in a step, the time of float32 is about the same
    dtype = torch.float32 if packed.dtype is torch.bfloat16 else packed.dtype
    batch_sizes, run = torch.tensor(options.steps), getattr(torch._VF, name)
    results = []
    for direction, inputs in enumerate(packed.to(dtype)):
        # one buffer in cuDNN's order, which it would otherwise allocate itself, with a warning
        buffer = torch.cat([weight[direction].flatten() for weight in weights]).to(dtype)
        pieces = buffer.split([weight[0].numel() for weight in weights])
        parameters = [piece.view(weight.shape[1:]) for piece, weight in zip(pieces, weights, strict=True)]
        initial = [tensor[direction, None].to(dtype) for tensor in state]
        arguments = batch_sizes, initial if name == "lstm" else initial[0], parameters, True, 1, 0.0
        # without dropout, "training" keeps what the backward pass needs
        results.append(run(inputs, *arguments, torch.is_grad_enabled(), False))
    outputs, *last_states = zip(*results, strict=True)
    last = (torch.cat(tensors).to(packed.dtype) for tensors in last_states)
    return torch.stack(outputs).to(packed.dtype), *last


def scan_lstm(
    options: StepOptions, gates: Tensor, hidden: Tensor, cell: Tensor, state_weight: Tensor, projection: Tensor | None
) -> tuple[Tensor, ...]:
    """`rnn.run_recurrence` of an LSTM."""
    gates, hidden, cell, state_weight = map(_detach_for_onnx, (gates, hidden, cell, state_weight))
    projection = None if projection is None else _detach_for_onnx(projection)

    def step(state: State, input_terms: Tensor) -> State:
        hidden, cell = state
        in_gate, forget, candidate, out_gate = torch.baddbmm(input_terms, hidden, state_weight.mT).chunk(4, -1)
        cell = _clip(forget.sigmoid() * cell + in_gate.sigmoid() * candidate.tanh(), options.cell_clip)
        unprojected = out_gate.sigmoid() * cell.tanh()
        hidden = unprojected if projection is None else unprojected @ projection.mT
        return _clip(hidden, options.projection_clip), cell

    return _scan_steps(step, (hidden, cell), gates, options)


def scan_gru(
    options: StepOptions, gates: Tensor, hidden: Tensor, state_weight: Tensor, candidate_bias: Tensor
) -> tuple[Tensor, ...]:
    """`rnn.run_recurrence` of a GRU."""
    gates, hidden, state_weight, candidate_bias = map(_detach_for_onnx, (gates, hidden, state_weight, candidate_bias))

    def step(state: State, input_terms: Tensor) -> State:
        (hidden,) = state
        reset_input, update_input, candidate_input = input_terms.chunk(3, -1)
        reset, update, candidate = torch.bmm(hidden, state_weight.mT).chunk(3, -1)
        reset, update = (reset_input + reset).sigmoid(), (update_input + update).sigmoid()
        candidate = (candidate_input + reset * (candidate + candidate_bias[:, None])).tanh()
        return (candidate + update * (hidden - candidate),)

    return _scan_steps(step, (hidden,), gates, options)


def _scan_steps(
    step: Callable[[State, Tensor], State], initial: State, gates: Tensor, options: StepOptions
) -> tuple[Tensor, ...]:
    """Run all steps of all rows by torch's `scan`, for exported graphs of any length, without custom operators.

    `step` computes a state, which begins with the output, from the state before it and (directions, rows, width) gates.
    """

    def combine(state: State, inputs: tuple[Tensor, ...]) -> tuple[State, Tensor]:
        step_gates, is_token, *restart = inputs
        before = tuple(tensor * ~restart[0] for tensor in state) if restart else state
        after = tuple(torch.where(is_token, new, old) for new, old in zip(step(before, step_gates), before))
        return after, after[0].clone()  # a scan's outputs must not share memory

    rows = initial[0].shape[1]
    inputs = [tensor for tensor in (gates, options.step_mask, options.restarts) if tensor is not None]
    steps = tuple(tensor.unflatten(1, (-1, rows)).transpose(0, 1) for tensor in inputs)
    last, outputs = scan(combine, initial, steps)
    return (outputs.transpose(0, 1).flatten(1, 2), *last)


def _detach_for_onnx(tensor: Tensor) -> Tensor:
    """The tensor, in ONNX export without its gradient, which is not supported in a `scan`."""
    return tensor.detach() if torch.onnx.is_in_onnx_export() else tensor


def _clip(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
