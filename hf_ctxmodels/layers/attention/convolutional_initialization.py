"""Initialization of self-attention as a convolution: each head attends to a neighboring token.

Each head attends to one position of a convolution kernel, by the construction of Cordonnier et al. 2020 as in the
initialization of d'Ascoli et al. 2021 (ConViT, section 2, equation 5). Here, the kernel has one dimension and no
center, positions are absolute, there is no gate between content and position, and only the first layer is changed.
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
    """Initialize the position embeddings, and add to the query and key projections, so that the heads attend to the
    tokens at the offsets -1, 1, -2, 2, ...

    The position embeddings are sines and cosines of `head_dim // 2` frequencies per head, which are sampled
    (stratified) from [0, pi), so that different positions are nearly orthogonal. The key projection of a head selects
    its sines and cosines. The query projection rotates them by the offset, so that query i and key j match at j = i +
    offset. The function does nothing if any of these weights was loaded from a checkpoint.

    Args:
        attention: Attention of the first layer, whose inputs are the normalized sums of word, position and segment
            embeddings.
        position_embeddings: Learned position embeddings (positions, hidden).
        std: Standard deviation of the position embeddings.
    """
    if not isinstance(attention.qkv_proj, nn.Linear):
        return  # compressed weights of a checkpoint
    weight = attention.qkv_proj.weight
    if any(getattr(tensor, "_is_hf_initialized", False) for tensor in (weight, position_embeddings.weight)):
        return
    num_positions, width = position_embeddings.weight.shape
    num_heads, device = attention.num_heads, weight.device
    num_frequencies = attention.head_dim // 2  # per head
    samples = torch.rand(num_heads, num_frequencies, dtype=torch.float32, device=device)
    frequencies = (torch.arange(num_frequencies, device=device) + samples) * math.pi / num_frequencies
    phases = torch.arange(num_positions, device=device)[:, None, None] * frequencies
    waves = math.sqrt(2) * std * torch.stack([phases.sin(), phases.cos()], -1).flatten(1)
    init.copy_(position_embeddings.weight, pad(waves, (0, width - waves.shape[1])))

    # rows of the projections, (heads, frequencies, hidden)
    selection = torch.eye(waves.shape[1], width, dtype=torch.float32, device=device)
    sines, cosines = selection.unflatten(0, (num_heads, num_frequencies, 2)).unbind(2)
    offsets = torch.tensor([(head // 2 + 1) * (1 if head % 2 else -1) for head in range(num_heads)], device=device)
    angles = (offsets[:, None] * frequencies)[..., None]
    rotated_sines = angles.cos() * sines + angles.sin() * cosines
    rotated_cosines = angles.cos() * cosines - angles.sin() * sines

    # with embeddings of equal variance, positions have a third of the variance of the inputs
    gain = (3 * NEIGHBOR_SCORE / (2 * num_frequencies * attention.scale)) ** 0.5
    initialized = weight.to(torch.float32, copy=True)
    projections = initialized.view(3, num_heads, attention.head_dim, width)[:, :, : 2 * num_frequencies]
    projections[0] += gain * torch.stack([rotated_sines, rotated_cosines], 2).flatten(1, 2)
    projections[1] += gain * torch.stack([sines, cosines], 2).flatten(1, 2)
    init.copy_(weight, initialized)
