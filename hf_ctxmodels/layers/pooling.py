"""Pooling of token states, and positions of tokens in padded batches."""

from typing import Literal

import torch
from torch import Tensor, nn


def first_token_columns(states: Tensor, tokens: Tensor | None) -> Tensor:
    """(batch,) column of each row's first token.

    Args:
        states: (batch, length, hidden).
        tokens: (batch, length) bool, False at padding; None for no padding.
    """
    if tokens is None:
        return torch.zeros(states.shape[0], dtype=torch.long, device=states.device)
    return tokens.int().argmax(1)


def last_token_columns(states: Tensor, tokens: Tensor | None) -> Tensor:
    """(batch,) column of each row's last token; arguments as in `first_token_columns`."""
    return states.shape[1] - 1 - first_token_columns(states, None if tokens is None else tokens.flip(1))


def states_at(states: Tensor, columns: Tensor) -> Tensor:
    """(batch, length, hidden) at (batch,) columns -> (batch, hidden)."""
    return states[torch.arange(states.shape[0], device=states.device), columns]


def forward_fill_padding(values: Tensor, tokens: Tensor) -> Tensor:
    """(batch, length), with padding positions having the value of the token before them, so that no run of equal values
    is cut by what is not read.

    Args:
        values: (batch, length).
        tokens: (batch, length) bool, False at padding, also between tokens.
    """
    columns = torch.arange(values.shape[1], device=values.device)
    return values.gather(1, (columns * tokens).cummax(1).values)


def mask_until_last_target(target_mask: Tensor) -> Tensor:
    """(batch, length) bool -> long, 1 up to the last True column of a row; the first column is always 1."""
    numbers = torch.arange(target_mask.shape[1], device=target_mask.device)
    lengths = ((numbers + 1) * target_mask).amax(1).clamp(min=1)
    return (numbers < lengths[:, None]).long()


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
