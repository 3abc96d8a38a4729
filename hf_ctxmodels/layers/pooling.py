"""Pooling of the states of a row's tokens."""

from typing import Literal

import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.positions import first_token_columns, last_token_columns, states_at

Pooling = Literal["first", "last", "ends", "mean", "max", "mean+max", "last+max+mean", "first+max+mean"]


def token_mask(given: Tensor, *masks: Tensor | None) -> Tensor:
    """(batch, length) bool: False at padding.

    Args:
        given: (batch, length, ...) ids or states.
        masks: (batch, length), 0 at padding: `attention_mask`, `sequence_ids`, or None.
    """
    tokens = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
    for mask in masks:
        if mask is not None:
            tokens = tokens & (mask != 0)
    return tokens


class PoolingLayer(nn.Module):
    """`pool_tokens` as a module."""

    def __init__(self, kind: Pooling) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, length, hidden) states and (batch, length) bool -> (batch, hidden), 2 or 3 * hidden."""
        return pool_tokens(states, tokens, self.kind)


def pool_tokens(states: Tensor, tokens: Tensor, kind: Pooling) -> Tensor:
    """Pool the states of each row's tokens.

    Args:
        states: (batch, length, hidden).
        tokens: (batch, length) bool, False at padding.
        kind: "first" or "last" token's state; "ends", the final states of both directions of bidirectional states;
            "mean"; "max" (Conneau et al. 2017, section 3.2); "mean+max" (SWEM-concat, Shen et al. 2018, arXiv
            1805.09843); "last+max+mean" (Howard & Ruder 2018, section 3.3), and "first+max+mean" for backward models.

    Returns:
        (batch, hidden), 2 or 3 * hidden.
    """
    there = tokens[..., None]
    parts = {
        "first": lambda: states_at(states, first_token_columns(states, tokens)),
        "last": lambda: states_at(states, last_token_columns(states, tokens)),
        "ends": lambda: _ends(states, tokens),
        "mean": lambda: ((states.float() * there).sum(1) / there.sum(1)).to(states.dtype),
        "max": lambda: states.masked_fill(~there, torch.finfo(states.dtype).min).amax(1),
    }
    return torch.cat([parts[part]() for part in kind.split("+")], -1)


def pair_features(first: Tensor, second: Tensor) -> Tensor:
    """(rows, width) vectors u and v -> (rows, 4 * width): u, v, |u - v| and u * v."""
    return torch.cat([first, second, (first - second).abs(), first * second], -1)


def _ends(states: Tensor, tokens: Tensor) -> Tensor:
    forward, backward = states.chunk(2, -1)
    parts = (
        states_at(forward, last_token_columns(states, tokens)),
        states_at(backward, first_token_columns(states, tokens)),
    )
    return torch.cat(parts, -1)
