"""Attention masks: which keys each query attends to, and the additive bias of the scores.

A `MaskSpec` describes the pattern within a sequence by token positions, so that it holds in any layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.errors import CtxError

PositionBias = Callable[[Tensor, Tensor], Tensor]
"""(batch, queries) and (batch, keys) positions -> (batch, heads, queries, keys) addend of the scores."""


def gather_position_bias(bias_by_distance: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The result of a `PositionBias` from the (2 * limit + 1, heads) bias of the distances from -limit to limit, which
    larger distances share."""
    limit = len(bias_by_distance) // 2
    distances = (keys[:, None, :] - queries[:, :, None]).clamp(-limit, limit)
    return F.embedding(distances + limit, bias_by_distance).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class FlexPositionBias:
    """A position bias that FlexAttention reads by distance in its kernel, without a tensor of queries times keys.

    transformers' `flex_attention_forward` indexes it in its `score_mod` as it would the dense tensor.

    Attributes:
        by_distance: (heads, 2 * keys - 1) bias of the distances from 1 - keys to keys - 1. Distances with the same bias
            have separate elements, since the kernel accumulates their gradient by atomic additions.
        query_positions, key_positions: (batch, queries) and (batch, keys).
    """

    by_distance: Tensor
    query_positions: Tensor
    key_positions: Tensor

    @classmethod
    def build(cls, bias: PositionBias, query_positions: Tensor, key_positions: Tensor) -> "FlexPositionBias":
        """The values of a bias that depends only on the distance, at (batch, queries) and (batch, keys) positions."""
        num_keys = key_positions.shape[1]
        distances = torch.arange(1 - num_keys, num_keys, device=key_positions.device)
        by_distance = bias(distances.new_zeros(1, 1), distances[None])[0, :, 0]
        return cls(by_distance.contiguous(), query_positions, key_positions)

    def __getitem__(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """The bias at (batch, head, query, key)."""
        batch, head, query, key = index
        distance = self.key_positions[batch, key] - self.query_positions[batch, query]
        return self.by_distance[head, distance + self.key_positions.shape[1] - 1]


@dataclass(frozen=True, eq=False)
class BiasOfHeads:
    """A `PositionBias` of some of the heads, with (heads,) factors `gates` or None."""

    bias: Any
    heads: Sequence[int]
    gates: Tensor | None = None

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias at (batch, queries) and (batch, keys) positions."""
        bias = self.bias(queries, keys)[:, list(self.heads)]
        return bias if self.gates is None else bias * self.gates.to(bias)[:, None, None]

    def by_distance(self, device: torch.device) -> Tensor:
        """(2 * limit + 1, heads), see `BucketedPositionBias`."""
        bias = self.bias.by_distance(device)[:, list(self.heads)]
        return bias if self.gates is None else bias * self.gates.to(bias)


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Attention pattern within a sequence; padding and other sequences are masked by the layout.

    Positions count the tokens of a sequence, so that a spec is valid for any subset of queries, unlike `is_causal`.

    Attributes:
        causal: Attend to the position of the query and to earlier positions; otherwise to all positions.
        prefix_lengths: (sequences,) in row-major order: number of tokens at the start of each sequence that all its
            queries attend to, in a causal mask (Dong et al. 2019, section 2.3, "sequence-to-sequence LM"; Raffel et al.
            2020, section 3.2.1, "prefix LM").
        window: Attend to keys less than this many positions away: causal, the local band of Child et al. 2019 (arXiv
            1904.10509); not causal, on both sides. None for no limit.
        bias: Addend of the scaled scores, see `PositionBias`; it may have parameters.
        ranges: (..., 3) for each token as packed by the layout, instead of the other patterns, for masks that differ
            between the tokens of a batch. A token with (first, start, stop) attends to the positions [0, first) and
            [start, stop) of its sequence, at least one position in total.

    Raises:
        CtxError: The values are inconsistent.
    """

    causal: bool = False
    prefix_lengths: Tensor | None = None
    window: int | None = None
    bias: PositionBias | None = None
    ranges: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ranges is not None and (self.causal or self.window is not None):
            raise CtxError("ranges cannot be combined with causal or window.", hint="pass only ranges.")
        if self.prefix_lengths is not None and not self.causal:
            raise CtxError("prefix_lengths requires causal=True.", hint="set causal=True, or remove prefix_lengths.")
        if self.window is not None and self.window < 1:
            raise CtxError(
                f"window={self.window}, expected at least 1.", hint="set window to 1 or more, or to None for no limit."
            )

    @property
    def is_full(self) -> bool:
        """Whether every query attends to every key of its sequence."""
        return not self.causal and self.window is None and self.ranges is None

    @property
    def is_plain_causal(self) -> bool:
        """Whether it is the causal mask without prefix and window."""
        return self.causal and self.prefix_lengths is None and self.window is None

    @property
    def is_banded(self) -> bool:
        """Whether it is the causal mask with a window."""
        return self.causal and self.prefix_lengths is None and self.window is not None

    @property
    def fits_flash(self) -> bool:
        """Whether flash attention kernels support it: without prefix, bias and ranges."""
        return self.prefix_lengths is None and self.bias is None and self.ranges is None

    def allows(
        self, queries: Tensor, keys: Tensor, prefix: Tensor | None = None, ranges: Tensor | None = None
    ) -> Tensor:
        """Whether queries attend to keys of the same sequence, at broadcastable positions; with lengths of the
        prefix and (..., 3) ranges of the queries, if the spec has them."""
        if ranges is not None:
            first, start, stop = ranges.unbind(-1)
            return (keys < first) | ((keys >= start) & (keys < stop))
        allowed = keys <= queries if self.causal else keys == keys
        if prefix is not None:
            allowed = allowed | (keys < prefix)
        if self.window is not None:
            allowed = allowed & ((queries - keys).abs() < self.window)
        return allowed


BIDIRECTIONAL = MaskSpec()
CAUSAL = MaskSpec(causal=True)
