"""Bidirectional recurrent layers over padded batches."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.recurrent.packing import PackedSequences


def concat_directions(states: Tensor) -> Tensor:
    """(2, ..., width) forward and backward states -> (..., 2 * width)."""
    return torch.cat([states[0], states[1]], -1)


def run_layer(layer: nn.Module, states: Tensor, rows: PackedSequences) -> Tensor:
    """One bidirectional layer: (batch, length, width) -> (batch, length, 2 * output), zero at padding positions."""
    return concat_directions(rows.unpack(layer(rows.pack(states), rows)[0]))


def run_bidirectional(
    layers: Iterable[nn.Module], embeddings: Tensor, rows: PackedSequences, dropout: nn.Module
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """A stack of bidirectional layers.

    Args:
        layers: Bidirectional `LSTM` or `GRU` layers.
        embeddings: (batch, length, width) the input of the first layer.
        rows: The batch's tokens.
        dropout: Applied to the input of every layer but the first.

    Returns:
        `embeddings` and each layer's output (batch, length, 2 * width), zero at padding positions; and each layer's
        state after a row's last token, tensors (batch, 2, width).
    """
    states, final = [embeddings], []
    for depth, layer in enumerate(layers):
        packed, state = layer(rows.pack(dropout(states[-1]) if depth else embeddings), rows)
        states.append(concat_directions(rows.unpack(packed)))
        final.append(rows.unpack_state(state))
    return states, final
