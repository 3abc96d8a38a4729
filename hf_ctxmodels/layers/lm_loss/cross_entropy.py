"""Prediction heads, and cross-entropy over the vocabulary with the logits of one chunk of rows in memory at a time."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.core.compiled_ops import define_operator, is_compiled
from hf_ctxmodels.core.devices import autocast_dtype, without_autocast
from hf_ctxmodels.layers.common import HookPoint, get_activation
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import can_use_onednn, fast_linear, is_plain_linear, linear, matmul_transposed
from hf_ctxmodels.layers.lm_loss.sampling import sample_categorical

# Maximum number of float32 logits in memory; bfloat16 allows twice as many. On a CPU larger chunks were not faster, and
# smaller ones underutilize the matrix units. Half as many logits of bfloat16 took 1.3 times as long (1,024 rows, 50,257
# tokens, width 768), since summing the weight's gradients takes a larger part of the time.
CHUNK_ELEMENTS = 1 << 23
# On a GPU a chunk is about 12 kernels of 5 us to launch. With a vocabulary of 30,522 and a width of 768, 2^23 logits
# are 274 rows, 13 GFLOP and 26 us at 500 TFLOP/s: the GPU would wait for the host. 2^26 are 2,198 rows, 0.2 ms and
# 268 MB in float32.
_GPU_CHUNK_ELEMENTS = 1 << 26


class DeferredLogits(NamedTuple):
    """A vocabulary projection that is not computed yet: its (rows, width) input, and the layer or its replacement."""

    hidden_states: Tensor
    decoder: nn.Module


def split_low_rank(hidden_states: Tensor, decoder: nn.Module) -> DeferredLogits:
    """Apply the input factor of a low-rank output layer: the logits are then an ordinary linear layer of narrower
    states. Other layers, and layers with hooks, are returned unchanged."""
    if hasattr(decoder, "project_input") and not (decoder._forward_hooks or decoder._forward_pre_hooks):
        return DeferredLogits(decoder.project_input(hidden_states), decoder.output_factor)  # type: ignore[operator, arg-type]
    return DeferredLogits(hidden_states, decoder)


class SampledPrediction(NamedTuple):
    """Result of one pass over the vocabulary.

    Attributes:
        loss: Summed cross-entropy in nats.
        samples: (rows,) a sample of each row's distribution, without a gradient.
        correct: Number of targets with the largest logit.
    """

    loss: Tensor
    samples: Tensor
    correct: Tensor


class MaskedLMHead(nn.Module):
    """The masked-LM head: linear layer, activation, LayerNorm, and a decoder of width `embedding_size`, possibly tied
    (Devlin et al. 2019, section 3.1, task 1)."""

    def __init__(
        self, hidden_size: int, embedding_size: int, vocab_size: int, *, activation: str, layer_norm_eps: float
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, embedding_size)
        self.activation = get_activation(activation)
        self.norm = nn.LayerNorm(embedding_size, eps=layer_norm_eps)
        self.output_layer_input = HookPoint()
        self.decoder = nn.Linear(embedding_size, vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., vocabulary) logits."""
        return linear(self.decoder, self._transform(hidden_states))

    def summed_loss(self, hidden_states: Tensor, targets: Tensor, row_weights: Tensor | None = None) -> Tensor:
        """Summed cross-entropy in nats of (targets,) ids, from (targets, hidden) states; `row_weights` as in
        `chunked_cross_entropy`."""
        return summed_cross_entropy(self.decoder, self._transform(hidden_states), targets, row_weights)

    def deferred_logits(self, hidden_states: Tensor) -> DeferredLogits:
        """The arguments of the decoder for (rows, hidden) states, without computing the logits."""
        return DeferredLogits(self._transform(hidden_states), self.decoder)

    def summed_loss_and_samples(
        self, hidden_states: Tensor, targets: Tensor, uniform_numbers: Tensor
    ) -> SampledPrediction:
        """`summed_loss`, and a sample of each prediction by (targets,) `uniform_numbers`, in one pass."""
        hidden_states, decoder = split_low_rank(self._transform(hidden_states), self.decoder)
        if is_compiled() and is_plain_linear(decoder):
            inputs = hidden_states, decoder.weight, decoder.bias, targets, uniform_numbers, None
            return SampledPrediction(*_CompiledCrossEntropy.apply(*inputs, *_compiled_options(*inputs[:3])))
        if torch.compiler.is_compiling() or not is_plain_linear(decoder):
            logits = decoder(hidden_states).float()
            with torch.no_grad():
                correct = (logits.amax(1) == logits.gather(1, targets[:, None])[:, 0]).sum()
                samples = sample_categorical(logits.softmax(1), uniform_numbers)
            return SampledPrediction(F.cross_entropy(logits, targets, reduction="sum"), samples, correct)
        weights = decoder.weight, decoder.bias
        return SampledPrediction(
            *_ChunkedCrossEntropy.apply(hidden_states, *weights, targets, uniform_numbers, torch.is_grad_enabled())
        )

    def _transform(self, hidden_states: Tensor) -> Tensor:
        return self.output_layer_input(self.norm(self.activation(linear(self.dense, hidden_states))))


class ProjectedHead(nn.Module):
    """Linear layer, activation, dropout, and a linear layer to `scores` outputs."""

    def __init__(self, hidden_size: int, scores: int, *, activation: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = get_activation(activation)
        self.dropout = Dropout(dropout)
        self.out_proj = nn.Linear(hidden_size, scores)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., scores)."""
        return self.out_proj(self.dropout(self.activation(linear(self.dense, hidden_states))))


def chunked_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of a linear decoder, summed over rows and computed a chunk of rows at a time.

    Equal to `F.cross_entropy(F.linear(hidden_states, weight, bias), targets, reduction="sum")`, but with the logits and
    their gradient for one chunk of rows only: the forward pass computes the gradients with the chunk's logits, without
    recomputation. torch's `linear_cross_entropy` with `LinearCrossEntropyOptions` does the same, but took 1.5 to 10
    times as long on a CPU (torch 2.13, `scripts/benchmark.py --suite vocabulary-loss`). So does liger-kernel's
    `liger_fused_linear_cross_entropy`, which reads the number of targets on the host in each step (version 0.8).

    Args:
        hidden_states: (rows, width).
        weight, bias: (vocabulary, width), and (vocabulary,) or None.
        targets: (rows,) ids, without ignored ones.
        row_weights: (rows,) float32 factor of each row's loss, without a gradient; None for 1.
    """
    if is_compiled():
        inputs = hidden_states, weight, bias, targets, None, row_weights
        total, _, _ = _CompiledCrossEntropy.apply(*inputs, *_compiled_options(hidden_states, weight, bias))
    elif torch.compiler.is_compiling():  # the number of chunks is data-dependent
        total = _weighted_cross_entropy(F.linear(hidden_states, weight, bias), targets, row_weights)
    else:
        total, _, _ = _ChunkedCrossEntropy.apply(
            hidden_states, weight, bias, targets, None, torch.is_grad_enabled(), row_weights
        )
    return total


def _weighted_cross_entropy(logits: Tensor, targets: Tensor, row_weights: Tensor | None) -> Tensor:
    """The sum over rows, from (rows, vocabulary) logits."""
    if row_weights is None:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    return (F.cross_entropy(logits.float(), targets, reduction="none") * row_weights).sum()


def summed_cross_entropy(
    decoder: nn.Module, hidden_states: Tensor, targets: Tensor, row_weights: Tensor | None = None
) -> Tensor:
    """`chunked_cross_entropy` of a linear layer; a replacement, such as an adapter, is called."""
    hidden_states, decoder = split_low_rank(hidden_states, decoder)
    if not is_plain_linear(decoder):
        return _weighted_cross_entropy(decoder(hidden_states), targets, row_weights)
    return chunked_cross_entropy(hidden_states, decoder.weight, decoder.bias, targets, row_weights)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy whose forward pass also computes the gradients, chunk by chunk, and samples, if requested.

    The first backward pass returns these gradients without a copy; a second one over a retained graph recomputes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        uniform_numbers: Tensor | None,
        is_grad_enabled: bool,  # an argument, since gradients are always disabled within the function
        row_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.dtype = autocast_dtype(hidden_states.device.type) or hidden_states.dtype
        ctx.save_for_backward(hidden_states, weight, bias, targets, row_weights)
        needs_grad = ctx.needs_input_grad[:3] if is_grad_enabled else (False, False, False)
        (total, samples, correct), ctx.gradients = _loss_and_gradients(
            hidden_states, weight, bias, targets, uniform_numbers, row_weights, ctx.dtype, needs_grad
        )
        if samples is not None:
            ctx.mark_non_differentiable(samples, correct)
        return total, samples, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden_states, weight, bias, targets, row_weights = ctx.saved_tensors
            gradients = _loss_and_gradients(
                hidden_states, weight, bias, targets, None, row_weights, ctx.dtype, ctx.needs_input_grad[:3]
            )[1]
        scaled = (None if gradient is None else gradient.mul_(grad.to(gradient.dtype)) for gradient in gradients)
        return (*scaled, None, None, None, None)


def _compiled_options(*tensors: Tensor | None) -> tuple[torch.dtype, list[bool]]:
    """The dtype of the products, and which tensors need a gradient."""
    device, dtype = tensors[0].device.type, tensors[0].dtype  # type: ignore[union-attr]
    dtype = autocast_dtype(device) or dtype
    is_grad_enabled = torch.is_grad_enabled()
    return dtype, [is_grad_enabled and tensor is not None and tensor.requires_grad for tensor in tensors]


class _CompiledCrossEntropy(torch.autograd.Function):
    """`_ChunkedCrossEntropy` in a compiled graph: one operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        total, samples, correct, *gradients = _cross_entropy_operator(*inputs)
        ctx.save_for_backward(*gradients)
        ctx.needs_grad = inputs[-1]
        ctx.mark_non_differentiable(samples, correct)
        return total, samples, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        scaled = [
            gradient * grad.to(gradient.dtype) if needs_grad else None
            for gradient, needs_grad in zip(ctx.saved_tensors, ctx.needs_grad, strict=True)
        ]
        return *scaled, *[None] * 5


def _run_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    uniform_numbers: Tensor | None,
    row_weights: Tensor | None,
    dtype: torch.dtype,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    (total, samples, correct), gradients = _loss_and_gradients(
        hidden_states, weight, bias, targets, uniform_numbers, row_weights, dtype, needs_grad
    )
    if samples is None or correct is None:  # an operator returns tensors
        samples, correct = torch.zeros_like(targets), targets.new_zeros(())
    empty = hidden_states.new_empty(0)
    return total, samples, correct, *(empty.clone() if tensor is None else tensor.contiguous() for tensor in gradients)


def _cross_entropy_shapes(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    tensors = zip((hidden_states, weight, bias), options[-1], strict=True)
    gradients = (
        hidden_states.new_empty(0) if tensor is None or not needs_grad else tensor.new_empty(tensor.shape)
        for tensor, needs_grad in tensors
    )
    scalars = targets.new_empty(targets.shape), targets.new_empty(())
    return hidden_states.new_empty((), dtype=torch.float32), *scalars, *gradients


_cross_entropy_operator = define_operator(
    "cross_entropy(Tensor hidden_states, Tensor weight, Tensor? bias, Tensor targets, Tensor? uniform_numbers, "
    "Tensor? row_weights, ScalarType dtype, bool[] needs_grad) -> (Tensor total, Tensor samples, Tensor correct, "
    "Tensor hidden_grad, Tensor weight_grad, Tensor bias_grad)",
    _run_cross_entropy,
    _cross_entropy_shapes,
)


def chunk_size(rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> int:
    """Number of rows of a chunk with logits of a data type: of equal chunks, since a short one uses the matrix units
    badly."""
    max_elements = CHUNK_ELEMENTS * 4 // dtype.itemsize if device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    num_chunks = max(1, math.ceil(rows * vocab_size / max_elements))
    return max(1, math.ceil(rows / num_chunks))


def _loss_and_gradients(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    uniform_numbers: Tensor | None,
    row_weights: Tensor | None,
    dtype: torch.dtype,
    needs_grad: Sequence[bool],
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, ...]]:
    """The fields of `SampledPrediction`, without samples if `uniform_numbers` is None; and the gradients of the loss
    with respect to the first three arguments if `needs_grad` is true.

    One buffer holds a chunk's logits and then their gradient, except with oneDNN: on a CPU the allocation would take as
    long as the arithmetic.
    """
    samples = None if uniform_numbers is None else torch.empty_like(targets)
    correct = None if uniform_numbers is None else targets.new_zeros(())
    hidden_needs_grad, weight_needs_grad, bias_needs_grad = needs_grad
    hidden_grad = torch.empty_like(hidden_states) if hidden_needs_grad else None
    bias_grad = torch.zeros_like(bias) if bias is not None and bias_needs_grad else None
    weight_grad = None
    total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
    size = chunk_size(targets.numel(), weight.shape[0], weight.device, dtype)
    with without_autocast(hidden_states.device.type):
        cast_weight = weight.to(dtype)
        cast_bias = weight.new_zeros(weight.shape[0], dtype=dtype) if bias is None else bias.to(dtype)
        buffer = None
        if not can_use_onednn(cast_weight):  # oneDNN allocates its output
            buffer = torch.empty(size, weight.shape[0], dtype=dtype, device=weight.device)
        for start in range(0, targets.numel(), size):
            chunk = slice(start, start + size)
            chunk_states, chunk_targets = hidden_states[chunk].to(dtype), targets[chunk, None]
            if buffer is None:
                values = fast_linear(chunk_states, cast_weight, cast_bias)
            else:
                out = buffer[: len(chunk_states)]
                values = torch.addmm(cast_bias, chunk_states, cast_weight.T, out=out).float()
            values = torch.log_softmax(values, -1, out=values)  # in the buffer if its dtype allows
            target_values = values.gather(1, chunk_targets)
            factors = None if row_weights is None else row_weights[chunk, None]
            total -= target_values.sum() if factors is None else (target_values * factors).sum()
            if correct is not None:
                correct += (values.amax(1, keepdim=True) == target_values).sum()
            if uniform_numbers is not None or any(needs_grad):
                values.exp_()
            if uniform_numbers is not None and samples is not None:
                samples[chunk] = sample_categorical(values, uniform_numbers[chunk])
            if any(needs_grad):  # the gradient of the logits
                values.scatter_add_(1, chunk_targets, values.new_full((1, 1), -1.0).expand_as(chunk_targets))
                if factors is not None:
                    values *= factors
            if bias_grad is not None:
                bias_grad += values.sum(0)
            values = values.to(dtype)
            if hidden_grad is not None:
                hidden_grad[chunk] = matmul_transposed(values, cast_weight.T)
            if weight_needs_grad:
                if weight_grad is None:
                    weight_grad = matmul_transposed(values.T, chunk_states.T).to(weight.dtype)
                elif weight_grad.dtype == values.dtype:
                    weight_grad.addmm_(values.T, chunk_states)
                else:
                    weight_grad.add_(values.T @ chunk_states)
            del values  # before the next chunk's allocation
        if weight_needs_grad and weight_grad is None:  # no targets
            weight_grad = torch.zeros_like(weight)
    return (total, samples, correct), (hidden_grad, weight_grad, bias_grad)
