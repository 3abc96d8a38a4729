"""Kullback-Leibler divergence between two predictions over a vocabulary, a chunk of rows at a time (Hinton et al. 2015,
arXiv 1503.02531, section 2)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.layers.cpu.linear import fast_linear, is_plain_linear, product
from hf_ctxmodels.layers.lm_loss import cross_entropy as chunked
from hf_ctxmodels.layers.lm_loss.cross_entropy import DeferredLogits


def chunked_kl_divergence(student: DeferredLogits, teacher: DeferredLogits, temperature: float) -> Tensor:
    """T^2 times the sum over rows of KL(teacher || student) in nats, both softmaxes at temperature T.

    Equal to `F.kl_div` of whole logits with reduction "sum", but both logits and their gradient are in memory for one
    chunk of rows only. The teacher gets no gradient.

    Args:
        student, teacher: The same number of rows and one vocabulary.
        temperature: T; the logits are divided by it.
    """
    if torch.compiler.is_compiling() or not (is_plain_linear(student.decoder) and is_plain_linear(teacher.decoder)):
        with torch.no_grad():
            targets = teacher.decoder(teacher.rows)
        return kl_divergence(student.decoder(student.rows), targets, temperature)
    target, decoder = teacher.decoder, student.decoder
    weights = decoder.weight, decoder.bias, target.weight, target.bias
    return _ChunkedDivergence.apply(student.rows, teacher.rows, *weights, temperature, torch.is_grad_enabled())


def kl_divergence(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """`chunked_kl_divergence` of (..., classes) logits that are there."""
    predicted = F.log_softmax(logits.float() / temperature, -1)
    targets = F.log_softmax(teacher_logits.detach().float() / temperature, -1)
    return F.kl_div(predicted, targets, reduction="sum", log_target=True) * temperature**2


class _ChunkedDivergence(torch.autograd.Function):
    """The divergence, whose forward also computes the gradients of the student's rows, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        teacher_rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        temperature: float,
        trains: bool,  # from outside: within the function gradients are disabled
    ) -> Tensor:
        device = rows.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        wants = [ctx.needs_input_grad[place] and trains for place in (0, 2, 3)]
        total = rows.new_zeros((), dtype=torch.float32)
        gradients: list[Tensor | None] = [
            torch.zeros_like(each) if each is not None and wanted else None
            for each, wanted in zip((rows, weight, bias), wants)
        ]
        with torch.autocast(device, enabled=False):
            student = _Decoder(weight, bias, dtype, temperature)
            teacher = _Decoder(teacher_weight, teacher_bias, dtype, temperature)
            for part in _chunks(len(rows), len(weight)):
                own = rows[part].to(dtype)
                predicted, targets = student.log_softmax(own), teacher.log_softmax(teacher_rows[part].to(dtype))
                total += (targets.exp() * (targets - predicted)).sum()
                if any(wants):  # the gradient of the logits, times T^2
                    change = predicted.exp_().sub_(targets.exp_()).mul_(temperature)
                    _add(gradients, part, change.to(dtype), own, student.weight)
        ctx.gradients = gradients
        return total * temperature**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias = (None if each is None else each * grad.to(each.dtype) for each in ctx.gradients)
        return rows, None, weight, bias, None, None, None, None


class _Decoder:
    """A linear map to the vocabulary in the type of the computation, its logits divided by the temperature."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, temperature: float) -> None:
        self.weight, self.temperature = weight.to(dtype), temperature
        self.bias = (weight.new_zeros(len(weight)) if bias is None else bias / temperature).to(dtype)

    def log_softmax(self, rows: Tensor) -> Tensor:
        """(rows, width) -> (rows, vocabulary) in single precision."""
        logits = fast_linear(rows / self.temperature, self.weight, self.bias)
        return torch.log_softmax(logits.float(), -1)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    """Of equal size, with the logits of two models in the memory of `chunked.CHUNK_ELEMENTS` each."""
    number = max(1, math.ceil(rows * vocabulary / chunked.CHUNK_ELEMENTS))
    size = max(1, math.ceil(rows / number))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _add(gradients: list[Tensor | None], part: slice, change: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Add a chunk's gradients of rows, weight and bias, where they are wanted.

    Args:
        gradients: Those three.
        part: The chunk's rows.
        change: (chunk, vocabulary) gradient of the logits.
        rows: (chunk, width).
        weight: (vocabulary, width).
    """
    of_rows, of_weight, of_bias = gradients
    if of_rows is not None:
        of_rows[part] = product(change, weight.T).to(of_rows.dtype)
    if of_weight is not None:
        of_weight += product(change.T, rows.T).to(of_weight.dtype)
    if of_bias is not None:
        of_bias += change.sum(0).to(of_bias.dtype)
