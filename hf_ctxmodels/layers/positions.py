"""Positions in rows of a padded batch, with padding on either side."""

import torch
from torch import Tensor


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
