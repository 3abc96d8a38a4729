"""Biattention of two texts, and maxout layers: the biattentive classification network of McCann et al. 2017 (arXiv
1708.00107, section 5)."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.host_copies import on_host
from hf_ctxmodels.core.inputs import sequence_numbers
from hf_ctxmodels.layers.common import SafeBatchNorm1d
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.pooling import pool_tokens, text_masks
from hf_ctxmodels.layers.recurrent.packing import PackedSequences, run_layer
from hf_ctxmodels.layers.recurrent.rnn import LSTM


class Biattention(nn.Module):
    """Attention between two texts of an example, and pooling of each. A single text attends to itself.

    A ReLU layer and a bidirectional LSTM encode both texts, X and Y. The softmax of the affinities A = X Y^T gives each
    word a summary C of the other text. A bidirectional LSTM for each text integrates [X; X - C; X * C]. Each text is
    pooled by maximum, mean, minimum and self-attention. `width` is the width per direction of the LSTMs.
    """

    def __init__(self, input_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(input_size, width)
        self.encoder = LSTM(width, width)
        self.integrators = nn.ModuleList(LSTM(6 * width, width) for _ in range(2))
        # without the paper's bias d, which does not change a softmax
        self.selectors = nn.ModuleList(nn.Linear(2 * width, 1, bias=False) for _ in range(2))
        self.dropout = Dropout(dropout)

    def forward(self, states: Tensor, token_mask: Tensor, is_second_text: Tensor, unpad: bool) -> Tensor:
        """(batch, length, input) states -> (batch, 16 * width) pooled texts.

        The (batch, length) bool masks are False at padding, and True at words of the second text and padding within it.
        """
        masks = text_masks(token_mask, is_second_text)
        # not `chunk`, whose sizes in ONNX depend on the batch
        texts = [on_host(lambda mask, half=half: mask.unflatten(0, (2, -1))[half], masks) for half in range(2)]
        sequences = on_host(sequence_numbers, is_second_text)
        inputs = linear(self.project, self.dropout(states)).relu()
        packing = PackedSequences.build(token_mask, sequences, unpad=unpad)
        encoded = run_layer(self.encoder, self.dropout(inputs), packing)
        affinities = (encoded @ encoded.transpose(1, 2)).float()
        pooled = []
        for text, other_text, integrator, selector in zip(
            texts, reversed(texts), self.integrators, self.selectors, strict=True
        ):
            weights = affinities.masked_fill(~other_text[:, None], float("-inf")).softmax(-1).to(encoded.dtype)
            summary = weights @ encoded
            features = torch.cat([encoded, encoded - summary, encoded * summary], -1)
            integrated = run_layer(integrator, self.dropout(features), PackedSequences.build(text, unpad=unpad))
            scores = selector(integrated).float().masked_fill(~text[..., None], float("-inf"))
            pooled += [
                pool_tokens(integrated, text, "max"),
                pool_tokens(integrated, text, "mean"),
                -pool_tokens(-integrated, text, "max"),
                (scores.softmax(1).to(integrated.dtype) * integrated).sum(1),
            ]
        return torch.cat(pooled, -1)


class Maxout(nn.Module):
    """Elementwise maximum of several linear layers, the `pieces` (Goodfellow et al. 2013)."""

    def __init__(self, input_size: int, output_size: int, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.maps = nn.Linear(input_size, output_size * pieces)

    def forward(self, states: Tensor) -> Tensor:
        """(batch, input) -> (batch, output)."""
        return linear(self.maps, states).unflatten(-1, (-1, self.pieces)).amax(-1)


def maxout_classifier(width: int, num_labels: int, pieces: int, dropout: float) -> nn.Sequential:
    """Three maxout layers on the (batch, 16 * width) output of `Biattention`, each after batch normalization and
    dropout; the output is (batch, num_labels)."""
    layers: list[nn.Module] = []
    for input_size, output_size in pairwise([16 * width, 4 * width, 2 * width, num_labels]):
        layers += [SafeBatchNorm1d(input_size), Dropout(dropout), Maxout(input_size, output_size, pieces)]
    return nn.Sequential(*layers)
