"""Initialization of self-attention as a convolution: each head attends to a neighboring token.

d'Ascoli et al. 2021 (ConViT, section 3) initialize attention heads as the positions of a convolution kernel (Cordonnier
et al. 2020). Here, the kernel is one-dimensional, and positions are absolute. `model_cards/experiments/defaults.md` has
measurements.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.attention.modules import SelfAttention

QUERY_KEY_GAIN = 1.3


@torch.no_grad()
def initialize_as_convolution(attention: SelfAttention, position_embeddings: nn.Embedding, std: float) -> None:
    """Initialize the position embeddings and add to the weights of queries and keys so that the heads attend to the
    tokens at the offsets -1, 1, -2, 2, ...

    The position embeddings of a head's dimensions are sines and cosines with frequencies spread over (0, pi), which are
    nearly orthogonal for different positions. The keys of a head contain these dimensions, and the queries contain them
    rotated by the offset. The random values of the weights remain, as do values and output projection. Weights that
    were loaded from a checkpoint remain as they are.

    Args:
        attention: Attention of the first layer, with the width of the embeddings and an even width of the heads.
        std: Standard deviation of the position embeddings.
    """
    width, num_heads = attention.inner_size, attention.num_heads
    device = attention.qkv_proj.weight.device
    num_frequencies = attention.head_dim // 2
    strata = torch.arange(num_frequencies, device=device) + torch.rand(num_heads, num_frequencies, device=device)
    frequencies = math.pi * strata / num_frequencies  # (heads, frequencies); random, so no distance aliases another
    phases = torch.arange(position_embeddings.num_embeddings, device=device)[:, None, None] * frequencies
    init.copy_(position_embeddings.weight, math.sqrt(2) * std * _interleave(phases.sin(), phases.cos()).flatten(1))

    heads = torch.arange(num_heads, device=device)
    offsets = (heads // 2 + 1) * torch.where(heads % 2 == 0, -1, 1)
    angles = (offsets[:, None] * frequencies).flatten()
    rotation = torch.stack(
        [torch.stack([angles.cos(), angles.sin()], -1), torch.stack([-angles.sin(), angles.cos()], -1)], -2
    )
    weight = attention.qkv_proj.weight.clone()
    weight[:width] += QUERY_KEY_GAIN * torch.block_diag(*rotation)
    weight[width : 2 * width] += QUERY_KEY_GAIN * torch.eye(width, device=device)
    init.copy_(attention.qkv_proj.weight, weight)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """Two tensors (..., n) -> (..., 2 n) with alternating elements."""
    return torch.stack([first, second], -1).flatten(-2)
