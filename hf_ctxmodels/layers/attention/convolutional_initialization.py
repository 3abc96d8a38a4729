"""Initialization of self-attention as a convolution: each head attends to a neighboring token.

d'Ascoli et al. 2021 (ConViT, section 3) initialize attention heads as the positions of a convolution kernel (Cordonnier
et al. 2020), for relative positions of image patches. Here, the kernel has one dimension, and positions are absolute.
`model_cards/experiments/defaults.md` has measurements.
"""

import math

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import initialization as init

from hf_ctxmodels.layers.attention.modules import SelfAttention

NEIGHBOR_SCORE = 9.0  # average attention score of the neighbor, before softmax


@torch.no_grad()
def initialize_as_convolution(attention: SelfAttention, position_embeddings: nn.Embedding, std: float) -> None:
    """Initialize the position embeddings, and add to the weights of queries and keys, so that the heads attend to the
    tokens at the offsets -1, 1, -2, 2, ...

    The position embeddings are sines and cosines. For each head, some of their frequencies are drawn from (0, pi), so
    that different positions are nearly orthogonal. The keys of a head contain these dimensions, and the queries contain
    them rotated by the offset. Weights that were loaded from a checkpoint do not change.

    Args:
        attention: Attention of the first layer, whose inputs are the normalized sums of word, position and segment
            embeddings.
        std: Standard deviation of the position embeddings.
    """
    if not isinstance(attention.qkv_proj, nn.Linear):
        return  # compressed weights of a checkpoint
    weight = attention.qkv_proj.weight
    if all(getattr(tensor, "_is_hf_initialized", False) for tensor in (weight, position_embeddings.weight)):
        return
    num_positions, width = position_embeddings.weight.shape
    num_heads, head_dim, device = attention.num_heads, attention.head_dim, weight.device
    num_frequencies = head_dim // 2  # per head
    strata = torch.arange(num_frequencies, device=device) + torch.rand(
        num_heads, num_frequencies, dtype=torch.float32, device=device
    )
    frequencies = strata * math.pi / num_frequencies  # (heads, frequencies)

    phases = torch.arange(num_positions, device=device)[:, None, None] * frequencies
    waves = math.sqrt(2) * std * torch.stack([phases.sin(), phases.cos()], -1).flatten(1)
    init.copy_(position_embeddings.weight, pad(waves, (0, width - waves.shape[1])))

    # weights that select the sines and cosines, (heads, frequencies, 2, hidden)
    keys = torch.eye(waves.shape[1], width, dtype=torch.float32, device=device).unflatten(
        0, (num_heads, num_frequencies, 2)
    )
    heads = torch.arange(num_heads, device=device)
    angles = (heads // 2 + 1)[:, None] * torch.where(heads % 2 == 0, -1, 1)[:, None] * frequencies
    sines, cosines = angles.sin(), angles.cos()
    rotations = torch.stack([torch.stack([cosines, sines], -1), torch.stack([-sines, cosines], -1)], -2)

    gain = (3 * NEIGHBOR_SCORE * head_dim**0.5 / (2 * num_frequencies)) ** 0.5  # positions are a third of the variance
    initialized = weight.to(torch.float32, copy=True)
    queries_keys_values = initialized.view(3, num_heads, head_dim, -1)
    queries_keys_values[0, :, : 2 * num_frequencies] += gain * (rotations @ keys).flatten(1, 2)
    queries_keys_values[1, :, : 2 * num_frequencies] += gain * keys.flatten(1, 2)
    init.copy_(weight, initialized)
