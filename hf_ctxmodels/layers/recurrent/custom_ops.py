"""The recurrences of LSTM and GRU layers as custom operators, for compiled graphs that do not depend on the length."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.layers.recurrent.packing import StepOptions
from hf_ctxmodels.layers.recurrent.recurrence import gru_gradients, lstm_gradients, run_gru, run_lstm

_OPTIONS = "Tensor step_mask, Tensor? restarts, float? cell_clip, float? projection_clip"


def _define_operator(name: str, tensors: str, num_states: int, run: Callable, compute_gradients: Callable) -> Any:
    """An operator with the arguments of `rnn.run_recurrence` and a backward operator, which repeats the forward pass.

    `tensors` is the schema of the tensors, which have gradients; `num_states` of them, after the gates, are states.
    """
    num_tensors, outputs = tensors.count(",") + 1, ", ".join(["Tensor"] * (num_states + 1))

    def run_steps(gates: Tensor, *inputs: Any) -> tuple[StepOptions, tuple, tuple]:
        rows = inputs[0].shape[1]
        options = StepOptions((rows,) * (gates.shape[1] // rows), *inputs[num_tensors - 1 :])
        return options, *run(options, gates.clone(), *inputs[: num_tensors - 1])

    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        _, values, last_states = run_steps(*inputs)
        return values[1], *last_states

    def backward(gradients: list[Tensor], *inputs: Any) -> list[Tensor]:
        options, values, _ = run_steps(*inputs)
        input_gradients = compute_gradients(options, values, gradients, *inputs[1:num_tensors])
        return [gradient.contiguous() for gradient in input_gradients if gradient is not None]

    schema = f"{tensors}, {_OPTIONS}"
    operator = torch.library.custom_op(
        f"hf_ctxmodels::{name}", forward, mutates_args=(), schema=f"({schema}) -> ({outputs})"
    )
    backward_operator = torch.library.custom_op(
        f"hf_ctxmodels::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor[] gradients, {schema}) -> Tensor[]",
    )

    @operator.register_fake
    def _output_shapes(gates: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = gates.new_empty(*gates.shape[:2], inputs[0].shape[2])
        return outputs, *(gates.new_empty(state.shape) for state in inputs[:num_states])

    @backward_operator.register_fake
    def _gradient_shapes(gradients: list[Tensor], *inputs: Any) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in inputs[:num_tensors] if tensor is not None]

    def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-2])
        ctx.clips = inputs[-2:]

    def differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        contiguous = [gradient.contiguous() for gradient in gradients]
        input_gradients = backward_operator(contiguous, *ctx.saved_tensors, *ctx.clips)
        return (*input_gradients, *[None] * (num_tensors + 4 - len(input_gradients)))

    operator.register_autograd(differentiate, setup_context=save_inputs)
    return operator


RECURRENCE_OPERATORS = {
    "lstm": _define_operator(
        "recurrence",
        "Tensor gates, Tensor hidden, Tensor cell, Tensor state_weight, Tensor? projection",
        2,
        run_lstm,
        lstm_gradients,
    ),
    "gru": _define_operator(
        "gru_recurrence",
        "Tensor gates, Tensor hidden, Tensor state_weight, Tensor candidate_bias",
        1,
        run_gru,
        gru_gradients,
    ),
}
