"""Kullback-Leibler divergence of predictions over a vocabulary (Hinton et al. 2015, arXiv 1503.02531, section 2)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.devices import autocast_dtype, without_autocast
from hf_ctxmodels.layers.cpu.linear import fast_linear, is_plain_linear, matmul_transposed
from hf_ctxmodels.layers.lm_loss import cross_entropy
from hf_ctxmodels.layers.lm_loss.cross_entropy import DeferredLogits, split_low_rank


def chunked_kl_divergence(student: DeferredLogits, teacher: DeferredLogits, temperature: float) -> Tensor:
    """T^2 times the sum over rows of KL(teacher || student) in nats, with both softmaxes at temperature T.

    Equal to `F.kl_div` of whole logits with reduction "sum", but both logits and their gradient are in memory for one
    chunk of rows only. The teacher gets no gradient.
    """
    student, teacher = split_low_rank(*student), split_low_rank(*teacher)
    if torch.compiler.is_compiling() or not (is_plain_linear(student.decoder) and is_plain_linear(teacher.decoder)):
        with torch.no_grad():
            teacher_logits = teacher.decoder(teacher.hidden_states)
        return kl_divergence(student.decoder(student.hidden_states), teacher_logits, temperature)
    return _ChunkedKLDivergence.apply(
        student.hidden_states,
        teacher.hidden_states,
        student.decoder.weight,
        student.decoder.bias,
        teacher.decoder.weight,
        teacher.decoder.bias,
        temperature,
        torch.is_grad_enabled(),
    )


def kl_divergence(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Compute `chunked_kl_divergence` from (..., classes) logits."""
    student = F.log_softmax(logits.float() / temperature, -1)
    teacher = F.log_softmax(teacher_logits.detach().float() / temperature, -1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2


class _ChunkedKLDivergence(torch.autograd.Function):
    """The divergence, whose forward pass also computes the gradients of the student's states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        teacher_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        temperature: float,
        is_grad_enabled: bool,  # an argument, since gradients are always disabled within the function
    ) -> Tensor:
        device = hidden_states.device.type
        dtype = autocast_dtype(device) or hidden_states.dtype
        needs_states, needs_weight, needs_bias = (ctx.needs_input_grad[i] and is_grad_enabled for i in (0, 2, 3))
        states_grad = torch.zeros_like(hidden_states) if needs_states else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        bias_grad = torch.zeros_like(bias) if bias is not None and needs_bias else None
        total = hidden_states.new_zeros((), dtype=torch.float32)
        size = cross_entropy.chunk_size(len(hidden_states), len(weight), weight.device)

        def log_softmax(states: Tensor, decoder_weight: Tensor, decoder_bias: Tensor) -> Tensor:
            logits = fast_linear(states / temperature, decoder_weight, decoder_bias)
            return torch.log_softmax(logits.float(), -1)

        with without_autocast(device):
            decoders = (weight, bias), (teacher_weight, teacher_bias)
            cast_weight, cast_teacher_weight = (decoder_weight.to(dtype) for decoder_weight, _ in decoders)
            cast_bias, cast_teacher_bias = (
                (w.new_zeros(len(w)) if b is None else b / temperature).to(dtype) for w, b in decoders
            )
            for start in range(0, len(hidden_states), size):
                chunk = slice(start, start + size)
                chunk_states = hidden_states[chunk].to(dtype)
                student_log_probs = log_softmax(chunk_states, cast_weight, cast_bias)
                teacher_chunk = teacher_states[chunk].to(dtype)
                teacher_log_probs = log_softmax(teacher_chunk, cast_teacher_weight, cast_teacher_bias)
                total += (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum()
                if not (needs_states or needs_weight or needs_bias):
                    continue
                # the gradient of the logits, times T^2
                logits_grad = student_log_probs.exp_().sub_(teacher_log_probs.exp_()).mul_(temperature).to(dtype)
                if states_grad is not None:
                    states_grad[chunk] = matmul_transposed(logits_grad, cast_weight.T).to(states_grad.dtype)
                if weight_grad is not None:
                    weight_grad += matmul_transposed(logits_grad.T, chunk_states.T).to(weight_grad.dtype)
                if bias_grad is not None:
                    bias_grad += logits_grad.sum(0).to(bias_grad.dtype)
        ctx.gradients = states_grad, weight_grad, bias_grad
        return total * temperature**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states_grad, weight_grad, bias_grad = (
            None if gradient is None else gradient * grad.to(gradient.dtype) for gradient in ctx.gradients
        )
        return states_grad, None, weight_grad, bias_grad, None, None, None, None
