"""Vocabulary prediction at the positions that are asked for, without ever holding all their logits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

# Logits held at a time; larger chunks were no faster, smaller ones waste the matrix units.
_CHUNK_ELEMENTS = 1 << 23


class MaskedPredictionHead(nn.Module):
    """The masked-LM head: transform, normalise, decode (Devlin et al. 2019, section 3.1, task 1).

    Args:
        hidden_size: Width of the encoder.
        embedding_size: Width of the (possibly tied) decoder.
        vocab_size: Number of tokens.
        activation: Activation of the transform.
        layer_norm_eps: Epsilon of its LayerNorm.
    """

    def __init__(
        self, hidden_size: int, embedding_size: int, vocab_size: int, *, activation: str, layer_norm_eps: float
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, embedding_size)
        self.activation = ACT2FN[activation]
        self.norm = nn.LayerNorm(embedding_size, eps=layer_norm_eps)
        self.decoder = nn.Linear(embedding_size, vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., vocabulary) logits."""
        return self.decoder(self._transform(hidden_states))

    def summed_loss(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats.

        Args:
            hidden_states: (targets, hidden), the encoder's output at the positions to predict.
            targets: (targets,) token ids.
        """
        return chunked_cross_entropy(
            self._transform(hidden_states), self.decoder.weight, self.decoder.bias, targets, reduction="sum"
        )

    def _transform(self, hidden_states: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_states)))


def chunked_cross_entropy(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of a linear decoder, computed a chunk of rows at a time.

    Equal to `F.cross_entropy(F.linear(hidden_states, weight, bias), targets)`, but the logits and their gradient exist
    only for one chunk of rows: the gradients are formed while the chunk's logits are at hand, so nothing is recomputed.

    Args:
        hidden_states: (rows, width).
        weight: (vocabulary, width).
        bias: (vocabulary,) or None.
        targets: (rows,) ids; every one counts (select rows before the call).
        reduction: "mean" or "sum". The mean of no rows is 0.
    """
    if torch.compiler.is_compiling():  # the number of rows is data: a loop over chunks would not trace
        total = F.cross_entropy(F.linear(hidden_states, weight, bias).float(), targets, reduction="sum")
    else:
        total = _ChunkedCrossEntropy.apply(hidden_states, weight, bias, targets)
    return total / max(targets.numel(), 1) if reduction == "mean" else total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy whose forward also makes the gradients, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        hidden_grad = torch.empty_like(hidden_states) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        with torch.autocast(device, enabled=False):
            cast_weight = weight.to(dtype)
            cast_bias = None if bias is None else bias.to(dtype)
            chunk = max(1, _CHUNK_ELEMENTS // weight.shape[0])
            for start in range(0, targets.numel(), chunk):
                rows = hidden_states[start : start + chunk].to(dtype)
                wanted = targets[start : start + chunk, None]
                logits = F.linear(rows, cast_weight, cast_bias).float()
                log_normaliser = logits.logsumexp(-1, keepdim=True)
                total += (log_normaliser - logits.gather(1, wanted)).sum()
                if hidden_grad is None and weight_grad is None and bias_grad is None:
                    continue
                logits_grad = logits.sub_(log_normaliser).exp_()  # softmax, in place
                logits_grad.scatter_add_(1, wanted, logits_grad.new_full((1, 1), -1.0).expand_as(wanted))
                if bias_grad is not None:
                    bias_grad += logits_grad.sum(0)
                logits_grad = logits_grad.to(dtype)
                if hidden_grad is not None:
                    hidden_grad[start : start + chunk] = logits_grad @ cast_weight
                if weight_grad is not None and weight_grad.dtype == dtype:
                    weight_grad.addmm_(logits_grad.T, rows)
                elif weight_grad is not None:
                    weight_grad += logits_grad.T @ rows
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*scaled, None)
