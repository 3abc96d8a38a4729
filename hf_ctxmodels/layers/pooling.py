"""Pooling of token states, and positions of tokens in padded batches."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host, to_device
from hf_ctxmodels.core.inputs import nonzero_in_all

Pooling = Literal["first", "last", "ends", "mean", "max", "mean+max", "last+max+mean", "first+max+mean"]


class PoolingLayer(nn.Module):
    """`pool_tokens` as a module."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, states: Tensor, token_mask: Tensor) -> Tensor:
        """(batch, length, hidden) states and (batch, length) bool -> (batch, n * hidden) for n pooled states."""
        return pool_tokens(states, token_mask, self.pooling)


def pool_tokens(states: Tensor, token_mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool the token states of each row.

    Args:
        states: (batch, length, hidden).
        token_mask: (batch, length) bool, False at padding.
        pooling: "first" or "last" token's state; "ends", the final states of both directions of bidirectional states;
            "mean"; "max" (Conneau et al. 2017, section 3.2); "mean+max" (SWEM-concat, Shen et al. 2018, arXiv
            1805.09843); "last+max+mean" (Howard & Ruder 2018, section 3.3), and "first+max+mean" for backward models.

    Returns:
        (batch, n * hidden), n the number of pooled states.

    Raises:
        CtxError: The pooling is unknown.
    """
    return torch.cat([_pool(states, token_mask, name) for name in pooling.split("+")], -1)


def _pool(states: Tensor, token_mask: Tensor, name: str) -> Tensor:
    if name == "first":
        return states_at(states, first_token_columns(states, token_mask))
    if name == "last":
        return states_at(states, last_token_columns(states, token_mask))
    if name == "ends":
        forward, backward = states.chunk(2, -1)
        last_forward = states_at(forward, last_token_columns(states, token_mask))
        return torch.cat([last_forward, states_at(backward, first_token_columns(states, token_mask))], -1)
    mask = token_mask[..., None]
    if name == "mean":
        return ((states.float() * mask).sum(1) / mask.sum(1)).to(states.dtype)
    if name == "max":
        return states.masked_fill(~mask, torch.finfo(states.dtype).min).amax(1)
    raise CtxError(f"pooling={name!r} is unknown.", hint=f"use one of: {', '.join(get_args(Pooling))}.")


def attention_pooling(scores: Tensor, states: Tensor, mask: Tensor) -> Tensor:
    """(batch, queries, words) scores -> (batch, queries, width) means of the (batch, words, width) states in the bool
    mask, weighted by the softmax of the scores; a query with an empty mask gets the mean of all states."""
    lowest = torch.finfo(torch.float32).min
    return scores.float().masked_fill(~mask, lowest).softmax(-1).to(states.dtype) @ states


def pair_features(first: Tensor, second: Tensor) -> Tensor:
    """(rows, width) vectors u and v -> (rows, 4 * width): u, v, |u - v| and u * v."""
    return torch.cat([first, second, (first - second).abs(), first * second], -1)


def build_token_mask(inputs: Tensor, *masks: Tensor | None) -> Tensor:
    """(batch, length) bool, False where one of the (batch, length) masks (`attention_mask`, `sequence_ids`) is 0."""
    token_mask = nonzero_in_all(*masks)
    if token_mask is None:
        return to_device(torch.ones(inputs.shape[:2], dtype=torch.bool), inputs.device)
    return token_mask


def text_masks(token_mask: Tensor, is_second_text: Tensor) -> Tensor:
    """(2 * batch, length) bool, the tokens of all first texts, then of all second texts; a single text is both.

    `token_mask` (batch, length) is False at padding.
    """

    def masks(mask: Tensor, is_second: Tensor) -> Tensor:
        first, second = mask & ~is_second, mask & is_second
        return torch.cat([text | (mask & ~text.any(1, keepdim=True)) for text in (first, second)])

    return on_host(masks, token_mask, is_second_text)


def first_token_columns(states: Tensor, token_mask: Tensor | None) -> Tensor:
    """(batch,) column of each row's first token, given (batch, length) bool `token_mask`, or None for no padding."""
    if token_mask is None:
        return torch.zeros(states.shape[0], dtype=torch.long, device=states.device)
    return token_mask.int().argmax(1)


def last_token_columns(states: Tensor, token_mask: Tensor | None) -> Tensor:
    """(batch,) column of each row's last token."""
    return states.shape[1] - 1 - first_token_columns(states, None if token_mask is None else token_mask.flip(1))


def states_at(states: Tensor, columns: Tensor) -> Tensor:
    """(batch, length, hidden) at (batch,) columns -> (batch, hidden)."""
    return states[torch.arange(states.shape[0], device=states.device), columns]


def forward_fill_padding(values: Tensor, token_mask: Tensor) -> Tensor:
    """(batch, length) values, with the preceding token's value where `token_mask` is False."""
    columns = torch.arange(values.shape[1], device=values.device)
    return values.gather(1, (columns * token_mask).cummax(1).values)


def mask_until_last_target(target_mask: Tensor) -> Tensor:
    """(batch, length) bool -> long, 1 up to the last True column of a row; the first column is always 1."""

    def mask(targets: Tensor) -> Tensor:
        columns = torch.arange(targets.shape[1], device=targets.device)
        lengths = ((columns + 1) * targets).amax(1).clamp(min=1)
        return (columns < lengths[:, None]).long()

    return on_host(mask, target_mask)
