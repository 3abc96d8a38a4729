"""The biattentive classification network (McCann et al. 2017, section 5)."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.inputs import sequence_numbers
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.norm import SafeBatchNorm1d
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_layer


class Biattention(nn.Module):
    """Attention between the two texts of a row, and pooling of each. A single text attends to itself.

    A ReLU layer and a bidirectional LSTM encode both texts, X and Y. A softmax of the affinities A = X Y^T gives each
    word a summary C of the other text. A bidirectional LSTM for each text integrates [X; X - C; X * C]. Each text is
    pooled by maximum, mean, minimum and self-attention.

    Args:
        input_size: Width of the input.
        width: Width of each direction of the LSTMs.
        dropout: Rate on the input and on the input of each LSTM.
    """

    def __init__(self, input_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(input_size, width)
        self.encoder = LSTM(width, width)
        self.integrators = nn.ModuleList(LSTM(6 * width, width) for _ in range(2))
        # without the paper's bias d, which does not change a softmax
        self.selectors = nn.ModuleList(nn.Linear(2 * width, 1, bias=False) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, states: Tensor, tokens: Tensor, second: Tensor, unpad: bool) -> Tensor:
        """Pool both texts.

        Args:
            states: (rows, length, input).
            tokens: (rows, length) bool, False at padding positions.
            second: (rows, length) bool, True at words of the second text and at padding positions within it.
            unpad: Compute the LSTMs without padding positions; False is equal, but slower.

        Returns:
            (rows, 16 * width): maximum, mean, minimum and self-attentive sum of 2 * width features of each text.
        """
        parts = [tokens & ~second, tokens & second]
        parts = [part | (tokens & ~part.any(1, keepdim=True)) for part in parts]  # a single text is used twice
        build = PackedSequences.build if unpad else PackedSequences.with_padding
        inputs = linear(self.project, self.dropout(states)).relu()
        encoded = run_layer(self.encoder, self.dropout(inputs), build(tokens, sequence_numbers(second)))
        affinities = (encoded @ encoded.transpose(1, 2)).float()
        pooled = []
        for number, (own, other) in enumerate((parts, parts[::-1])):
            weights = affinities.masked_fill(~other[:, None], float("-inf")).softmax(-1).to(encoded.dtype)
            summary = weights @ encoded
            joined = torch.cat([encoded, encoded - summary, encoded * summary], -1)
            integrated = run_layer(self.integrators[number], self.dropout(joined), build(own))
            pooled.append(self._pool(integrated, own, self.selectors[number]))
        return torch.cat(pooled, -1)

    def _pool(self, states: Tensor, tokens: Tensor, selector: nn.Module) -> Tensor:
        tokens = tokens[..., None]
        extreme = torch.finfo(states.dtype).max
        scores = selector(states).float().masked_fill(~tokens, float("-inf"))
        mean = (states.float() * tokens).sum(1) / tokens.sum(1)
        return torch.cat(
            [
                states.masked_fill(~tokens, -extreme).amax(1),
                mean.to(states.dtype),
                states.masked_fill(~tokens, extreme).amin(1),
                (scores.softmax(1).to(states.dtype) * states).sum(1),
            ],
            -1,
        )


class Maxout(nn.Module):
    """The maximum of several linear maps, feature by feature (Goodfellow et al. 2013).

    Args:
        input_size, output_size: Widths.
        pieces: Number of linear maps.
    """

    def __init__(self, input_size: int, output_size: int, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.maps = nn.Linear(input_size, output_size * pieces)

    def forward(self, states: Tensor) -> Tensor:
        """(rows, input) -> (rows, output)."""
        return linear(self.maps, states).unflatten(-1, (-1, self.pieces)).amax(-1)


class MaxoutClassifier(nn.Sequential):
    """Three maxout layers, each after batch normalisation and dropout.

    Args:
        input_size: Width of the input.
        width: Width of the second layer; the first has twice as much.
        classes: Width of the output.
        pieces, dropout: Parameters of every layer.
    """

    def __init__(self, input_size: int, width: int, classes: int, *, pieces: int, dropout: float) -> None:
        sizes = [input_size, 2 * width, width, classes]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):  # dropout before a normalisation would change its statistics
            layers += [SafeBatchNorm1d(before), Dropout(dropout), Maxout(before, after, pieces)]
        super().__init__(*layers)
