"""Words as their characters: convolution, highway layers and a projection (Kim et al. 2016, arXiv 1508.06615).

A batch repeats its words, and most words are short. So every different word is computed once, and what all of them have
behind their last character is left out; `CharacterEncoder.plain` computes the same on every position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.layers.feed_forward import make_activation
from hf_ctxmodels.layers.linear import Linear

_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number of 64 bits, as a signed one


class Highway(nn.Module):
    """Layers that carry a part of their input on (Srivastava et al. 2015, arXiv 1505.00387).

    `gate * x + (1 - gate) * relu(W x + b)`, where the gate is a sigmoid of a linear map of x.

    Args:
        width: of input and output.
        layers: their number.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Linear(width, 2 * width) for _ in range(layers))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in the released code; a bias of 2 lets most of the input through."""
        for layer in self.layers:
            init.normal_(layer.weight, std=layer.in_features**-0.5)
            if not getattr(layer.bias, "_is_hf_initialized", False):
                init.zeros_(layer.bias)
                init.constant_(layer.bias[layer.in_features :], 2.0)

    def forward(self, states: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        for layer in self.layers:
            transformed, gate = layer(states).chunk(2, -1)
            transformed = transformed.relu()
            states = torch.lerp(transformed, states, gate.sigmoid())
        return states


class CharacterEncoder(nn.Module):
    """A word's characters -> one vector (Peters et al. 2018, section 3.4; Jozefowicz et al. 2016, arXiv 1602.02410).

    Args:
        characters: Number of character ids; 0 is no character, and stands at every place of a word that is padding.
        embedding_size: Width of a character.
        filters: (characters a filter reads, number of such filters).
        highway_layers: Behind the convolution.
        projection_size: Width of the result.
        padding_character: What fills a word behind its end. It is a character like the others: filters read it.
        activation: Of the filters' largest values.
    """

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
        self.widest = max(width for width, _ in filters)
        self.embeddings = nn.Embedding(characters, embedding_size, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding_size, number, width) for width, number in filters)
        self.activation = make_activation(activation)
        width = sum(number for _, number in filters)
        self.highway = Highway(width, highway_layers)
        self.projection = Linear(width, projection_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in the released code; the characters of padding are zero."""
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
        if torch.compiler.is_compiling() or character_ids.device.type == "meta":  # what is unique depends on values
            return self.plain(character_ids)
        words, places = unique_rows(character_ids)
        return self.plain(self.trimmed(words))[places]

    def plain(self, character_ids: Tensor) -> Tensor:
        """What `forward` gives, computed at every place of every word."""
        characters = self.embeddings(character_ids).transpose(1, 2)
        found = torch.cat([convolution(characters).amax(-1) for convolution in self.convolutions], -1)
        return self.projection(self.highway(self.activation(found)))

    def trimmed(self, character_ids: Tensor) -> Tensor:
        """The words without what fills all of them behind their ends; exact.

        As much of it stays as the widest filter reads: further places give the filters nothing new, for their largest
        values.
        """
        filled = (character_ids != self.padding_character).any(0).nonzero()
        longest = int(filled[-1]) + 1 if len(filled) else 0
        return character_ids[:, : longest + self.widest]


def row_keys(rows: Tensor) -> Tensor:
    """(n, width) integers -> (n,) int64, one number for each row, which depends on all of it; zeros add nothing."""
    factors = torch.arange(1, rows.shape[1] + 1, device=rows.device) * _SPREAD
    factors = (factors ^ (factors >> 31)) * _SPREAD | 1
    mixed = rows.long() * factors
    return ((mixed ^ (mixed >> 29)) * factors).sum(1)


def unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows among (n, width) integers, and which of them each row is, (n,): `rows = different[which]`.

    Sorts one number for each row, which is far faster than sorting rows; should two rows share it, rows are sorted.
    """
    keys, which = row_keys(rows).unique(return_inverse=True)
    first = which.new_zeros(len(keys)).index_put_((which,), torch.arange(len(rows), device=rows.device))
    different = rows[first]
    if not torch.equal(different[which], rows):
        different, which = rows.unique(dim=0, return_inverse=True)
    return different, which
