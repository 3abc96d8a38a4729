"""Which key each query sees, and what is added to their score: by positions, so that it holds under any layout."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hf_ctxmodels.core.errors import CtxError

PositionBias = Callable[[Tensor, Tensor], Tensor]
"""(batch, queries) and (batch, keys) positions -> (batch, heads, queries, keys) what is added to the scores."""


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Who sees whom within a sequence. Nobody sees padding or another sequence: that is the layout's part.

    Positions count the tokens of a sequence, so that a spec is right for any subset of queries (the output rows of a
    last layer, the new tokens of a cached step), where a flag `is_causal` is not.

    Attributes:
        causal: A query sees its own position and those before it; else it sees all.
        prefix_lengths: (sequences,) tokens at the start of each sequence that all its queries see, in a causal mask
            (Dong et al. 2019, section 2.3, "sequence-to-sequence LM"; Raffel et al. 2020, section 3.2.1, "prefix LM").
            Sequences count in row-major order.
        window: Only keys less than this many positions away are seen, the query's own position included: causal, the
            local band of Child et al. 2019 (arXiv 1904.10509); not causal, on both sides. None for no limit.
        bias: What is added to the scaled scores, see `PositionBias`; it may have parameters.
        ranges: (..., 3), a row for each token as packed by the layout, in place of all but `bias`: for masks that
            differ from row to row of a batch. Of its sequence a token (first, start, stop) sees the positions below
            `first`, and those from `start` to below `stop`. It must see one at least.

    Raises:
        CtxError: Values that describe no mask.
    """

    causal: bool = False
    prefix_lengths: Tensor | None = None
    window: int | None = None
    bias: PositionBias | None = None
    ranges: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ranges is not None and (self.causal or self.window is not None):
            raise CtxError("ranges say who sees whom; leave causal, prefix_lengths and window out.")
        if self.prefix_lengths is not None and not self.causal:
            raise CtxError("prefix_lengths without causal=True: everything is seen already. Leave it out.")
        if self.window is not None and self.window < 1:
            raise CtxError(f"window={self.window}; a query sees at least itself, so it must be 1 or more, or None.")

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key of its sequence."""
        return not self.causal and self.window is None and self.ranges is None

    @property
    def is_plain_causal(self) -> bool:
        """Whether it is the plain causal mask."""
        return self.causal and self.prefix_lengths is None and self.window is None

    @property
    def is_banded(self) -> bool:
        """Whether it is a causal mask with a window."""
        return self.causal and self.prefix_lengths is None and self.window is not None

    def allows(self, queries: Tensor, keys: Tensor, prefix: Tensor | None) -> Tensor:
        """Whether a query sees a key of its sequence.

        Args:
            queries, keys: Positions, broadcastable to each other.
            prefix: Length of the sequence's prefix, likewise; None where `prefix_lengths` is.
        """
        seen = keys <= queries if self.causal else keys == keys
        if prefix is not None:
            seen = seen | (keys < prefix)
        if self.window is not None:
            seen = seen & ((queries - keys).abs() < self.window)
        return seen


def is_in_ranges(ranges: Tensor, keys: Tensor) -> Tensor:
    """Whether tokens see keys of their sequence, see `MaskSpec.ranges`.

    Args:
        ranges: (..., 3) those of the queries.
        keys: (...) positions, broadcastable to them without the last axis.
    """
    first, start, stop = ranges.unbind(-1)
    return (keys < first) | ((keys >= start) & (keys < stop))


BIDIRECTIONAL = MaskSpec()
CAUSAL = MaskSpec(causal=True)
