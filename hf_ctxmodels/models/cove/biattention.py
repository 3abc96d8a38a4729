"""The biattentive classification network (McCann et al. 2017, section 5)."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.inputs import sequence_numbers
from hf_ctxmodels.layers.common import SafeBatchNorm1d
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_layer
from hf_ctxmodels.layers.recurrent.rnn import LSTM


class Biattention(nn.Module):
    """Attention between two texts of an example, and pooling of each. A single text attends to itself.

    A ReLU layer and a bidirectional LSTM encode both texts, X and Y. The softmax of the affinities A = X Y^T gives each
    word a summary C of the other text. A bidirectional LSTM for each text integrates [X; X - C; X * C]. Each text is
    pooled by maximum, mean, minimum and self-attention.

    Args:
        input_size: Width of the input.
        width: Width per direction of the LSTMs.
        dropout: Dropout rate of the input and of the input of each LSTM.
    """

    def __init__(self, input_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(input_size, width)
        self.encoder = LSTM(width, width)
        self.integrators = nn.ModuleList(LSTM(6 * width, width) for _ in range(2))
        # without the paper's bias d, which does not change a softmax
        self.selectors = nn.ModuleList(nn.Linear(2 * width, 1, bias=False) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, states: Tensor, tokens: Tensor, is_second_text: Tensor, unpad: bool) -> Tensor:
        """Pool both texts.

        Args:
            states: (batch, length, input).
            tokens: (batch, length) bool, False at padding positions.
            is_second_text: (batch, length) bool, True at words of the second text and at padding within it.
            unpad: Skip padding positions in the LSTMs; False is equal, but slower.

        Returns:
            (batch, 16 * width): maximum, mean, minimum and self-attentive sum of 2 * width features of each text.
        """
        texts = [tokens & ~is_second_text, tokens & is_second_text]
        texts = [text | (tokens & ~text.any(1, keepdim=True)) for text in texts]  # a single text is used twice
        build = PackedSequences.build if unpad else PackedSequences.with_padding
        inputs = linear(self.project, self.dropout(states)).relu()
        encoded = run_layer(self.encoder, self.dropout(inputs), build(tokens, sequence_numbers(is_second_text)))
        affinities = (encoded @ encoded.transpose(1, 2)).float()
        pooled = []
        for text, other_text, integrator, selector in zip(
            texts, reversed(texts), self.integrators, self.selectors, strict=True
        ):
            weights = affinities.masked_fill(~other_text[:, None], float("-inf")).softmax(-1).to(encoded.dtype)
            summary = weights @ encoded
            features = torch.cat([encoded, encoded - summary, encoded * summary], -1)
            integrated = run_layer(integrator, self.dropout(features), build(text))
            pooled.append(self._pool(integrated, text, selector))
        return torch.cat(pooled, -1)

    def _pool(self, states: Tensor, tokens: Tensor, selector: nn.Module) -> Tensor:
        tokens = tokens[..., None]
        largest = torch.finfo(states.dtype).max
        scores = selector(states).float().masked_fill(~tokens, float("-inf"))
        mean = (states.float() * tokens).sum(1) / tokens.sum(1)
        return torch.cat(
            [
                states.masked_fill(~tokens, -largest).amax(1),
                mean.to(states.dtype),
                states.masked_fill(~tokens, largest).amin(1),
                (scores.softmax(1).to(states.dtype) * states).sum(1),
            ],
            -1,
        )


class Maxout(nn.Module):
    """Elementwise maximum of several linear layers (Goodfellow et al. 2013).

    Args:
        input_size, output_size: Widths.
        pieces: Number of linear layers.
    """

    def __init__(self, input_size: int, output_size: int, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.maps = nn.Linear(input_size, output_size * pieces)

    def forward(self, states: Tensor) -> Tensor:
        """(batch, input) -> (batch, output)."""
        return linear(self.maps, states).unflatten(-1, (-1, self.pieces)).amax(-1)


class MaxoutClassifier(nn.Sequential):
    """Three maxout layers, each after batch normalisation and dropout.

    Args:
        input_size: Width of the input.
        width: Width of the second layer; the first is twice as wide.
        classes: Width of the output.
        pieces, dropout: Parameters of each layer.
    """

    def __init__(self, input_size: int, width: int, classes: int, *, pieces: int, dropout: float) -> None:
        sizes = [input_size, 2 * width, width, classes]
        layers: list[nn.Module] = []
        # dropout follows the normalisation, whose statistics it would change
        for layer_input, layer_output in pairwise(sizes):
            layers += [SafeBatchNorm1d(layer_input), Dropout(dropout), Maxout(layer_input, layer_output, pieces)]
        super().__init__(*layers)
