"""Character encoders of words: convolution, highway layers and a projection (Kim et al. 2016, arXiv 1508.06615).

Words repeat within a batch, and most are short: `CharacterEncoder` encodes each distinct word once, without common
padding. `CharacterEncoder.plain` is the naive reference implementation, which encodes all positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.host_copies import host_copy, to_device
from hf_ctxmodels.layers.common import get_activation
from hf_ctxmodels.layers.cpu.linear import linear

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd 64-bit number, as int64


class Highway(nn.Module):
    """Highway layers (Srivastava et al. 2015, arXiv 1505.00387).

    `gate * x + (1 - gate) * relu(W x + b)`, where the gate is the sigmoid of a linear layer of x.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as in the released code; a gate bias of 2 carries most of the input."""
        for layer in self.layers:
            init.normal_(layer.weight, std=layer.in_features**-0.5)
            if not getattr(layer.bias, "_is_hf_initialized", False):
                init.zeros_(layer.bias)
                init.constant_(layer.bias[layer.in_features :], 2.0)

    def forward(self, states: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        for layer in self.layers:
            transformed, gate = linear(layer, states).chunk(2, -1)
            transformed = transformed.relu()
            states = torch.lerp(transformed, states, gate.sigmoid())
        return states


class CharacterEncoder(nn.Module):
    """Encodes the characters of a word as a vector (Peters et al. 2018, section 3.4; Jozefowicz et al. 2016).

    Args:
        characters: Number of character ids; words of zeros are padding.
        filters: (width in characters, number of filters) pairs.
        padding_character: Padding after a word's end, an input of the filters.
        activation: Activation after the maximum over positions.
    """

    initializes_itself = True

    def __init__(
        self,
        characters: int,
        embedding_size: int,
        filters: Sequence[Sequence[int]],
        *,
        highway_layers: int,
        projection_size: int,
        padding_character: int,
        activation: str,
    ) -> None:
        super().__init__()
        self.padding_character = padding_character
        self.max_filter_width = max(width for width, _ in filters)
        self.embeddings = nn.Embedding(characters, embedding_size, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding_size, number, width) for width, number in filters)
        self.activation = get_activation(activation)
        width = sum(number for _, number in filters)
        self.highway = Highway(width, highway_layers)
        self.projection = nn.Linear(width, projection_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as in the released code; the embedding of padding is zero."""
        if not getattr(self.embeddings.weight, "_is_hf_initialized", False):
            init.uniform_(self.embeddings.weight, -1.0, 1.0)
            init.zeros_(self.embeddings.weight[0])
        for convolution in self.convolutions:
            init.uniform_(convolution.weight, -0.05, 0.05)
            init.zeros_(convolution.bias)
        self.highway.reset_parameters()
        init.normal_(self.projection.weight, std=self.projection.in_features**-0.5)
        init.zeros_(self.projection.bias)

    def forward(self, character_ids: Tensor) -> Tensor:
        """(words, characters) ids -> (words, projection)."""
        if torch.compiler.is_compiling() or character_ids.device.type == "meta":  # data-dependent shapes
            return self.plain(character_ids)
        words, indices = unique_rows(host_copy(character_ids))
        device = character_ids.device
        return self.plain(to_device(self.trim_padding(words), device))[to_device(indices, device)]

    def plain(self, character_ids: Tensor) -> Tensor:
        """Compute `forward` at all positions of all words."""
        characters = self.embeddings(character_ids).transpose(1, 2)
        features = torch.cat([convolution(characters).amax(-1) for convolution in self.convolutions], -1)
        return linear(self.projection, self.highway(self.activation(features)))

    def trim_padding(self, character_ids: Tensor) -> Tensor:
        """Remove the padding common to all words, except as many columns as the widest filter has."""
        columns = (character_ids != self.padding_character).any(0).nonzero()
        max_length = int(columns[-1]) + 1 if len(columns) else 0
        return character_ids[:, : max_length + self.max_filter_width]


def row_hashes(rows: Tensor) -> Tensor:
    """(n, width) integers -> (n,) int64 hash of each row; trailing zeros do not change it."""
    factors = torch.arange(1, rows.shape[1] + 1, device=rows.device) * _MULTIPLIER
    factors = (factors ^ (factors >> 31)) * _MULTIPLIER | 1
    mixed = rows.long() * factors
    return ((mixed ^ (mixed >> 29)) * factors).sum(1)


def unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows of (n, width) integers, and the (n,) index of each row among them: `rows = unique[indices]`."""
    # sorting one hash per row is much faster than sorting rows
    hashes, indices = row_hashes(rows).unique(return_inverse=True)
    examples = indices.new_zeros(len(hashes)).index_put_((indices,), torch.arange(len(rows), device=rows.device))
    unique = rows[examples]
    if not torch.equal(unique[indices], rows):
        unique, indices = rows.unique(dim=0, return_inverse=True)
    return unique, indices
