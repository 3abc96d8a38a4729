"""Source, target and query tokens of a batch as rows of one stack: positions, segments, and who sees whom.

A query token stands for a token of the target that is to be predicted. It has the position of that token, sees the
source, the target before that position, and itself; nobody else sees it. All rows of a sequence attend in one call.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Rows:
    """Columns of a batch.

    Attributes:
        ids: (batch, columns); None for those of given embeddings.
        tokens: (batch, columns) bool, False at what is left out.
        positions: (batch, columns) for the position embeddings.
        types: (batch, columns) segments.
        ranges: (batch, columns, 3), see `MaskSpec`: numbers of the tokens of a sequence, in the order of the columns.
    """

    ids: Tensor | None
    tokens: Tensor
    positions: Tensor
    types: Tensor
    ranges: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.tokens.shape[1]

    def beside(self, other: Self) -> "Rows":
        """These columns and those of another part of the batch."""
        ids = None if self.ids is None or other.ids is None else torch.cat([self.ids, other.ids], 1)
        parts = [
            torch.cat(pair, 1)
            for pair in (
                (self.tokens, other.tokens),
                (self.positions, other.positions),
                (self.types, other.types),
                (self.ranges, other.ranges),
            )
        ]
        return Rows(ids, *parts)


def source_rows(ids: Tensor | None, tokens: Tensor, types: Tensor) -> Rows:
    """The source, all of which sees all of it.

    Args:
        ids: (batch, length), or None.
        tokens: (batch, length) bool, False at padding.
        types: (batch, length) segments.
    """
    places = (tokens.cumsum(1) - 1).clamp(min=0)
    lengths = tokens.sum(1, keepdim=True).expand_as(places)
    return Rows(ids, tokens, places, types, torch.stack([lengths, places, places + 1], -1))


def target_rows(ids: Tensor, kept: Tensor, before: Tensor, segment: int) -> Rows:
    """Tokens of the target, each of which sees the source and the target up to itself.

    Args:
        ids: (batch, steps).
        kept: (batch, steps) bool, False at trailing tokens that nothing depends on.
        before: (batch, 1) number of tokens of the source, and of the target before these.
        segment: Their segment.
    """
    places = before + torch.arange(ids.shape[1], device=ids.device)
    return Rows(ids, kept, places, torch.full_like(ids, segment), torch.stack([places + 1, places, places + 1], -1))


@dataclass(frozen=True)
class Queries:
    """Query tokens of a batch.

    Attributes:
        token: The id of all of them.
        segment: Their segment.
        steps: (batch, queries) number of the token of the target that each predicts.
        wanted: (batch, queries) bool, False at those that are left out.
        origin: (batch, 1) position of the first token of the target to be predicted.
        before: (batch, 1) number of tokens of the sequence before the first query.
    """

    token: int
    segment: int
    steps: Tensor
    wanted: Tensor
    origin: Tensor
    before: Tensor

    def one_by_one(self) -> Rows:
        """Each sees what is before its token, and itself."""
        positions = self.origin + self.steps
        own = self.before + (self.wanted.cumsum(1) - 1).clamp(min=0)
        return self._rows(positions, torch.stack([positions, own, own + 1], -1))

    def by_span(self, spans: Tensor) -> Rows:
        """Each sees what is before the span of its token, and all queries of the span.

        Args:
            spans: (batch, queries) numbers; a run of equal ones is a span.
        """
        starts = F.pad(spans[:, 1:] != spans[:, :-1], (1, 0), value=True)
        columns = torch.arange(spans.shape[1], device=spans.device).expand_as(spans)
        first = torch.where(starts, columns, 0).cummax(1).values
        ends = F.pad(starts[:, 1:], (0, 1), value=True)
        last = torch.where(ends, columns, spans.shape[1]).flip(1).cummin(1).values.flip(1)
        ranks = self.wanted.cumsum(1)
        start = self.before + (ranks - self.wanted.long()).gather(1, first)
        stop = self.before + ranks.gather(1, last)
        prefixes = self.origin + self.steps.gather(1, first)
        return self._rows(self.origin + self.steps, torch.stack([prefixes, start, stop], -1))

    def _rows(self, positions: Tensor, ranges: Tensor) -> Rows:
        ids, types = (torch.full_like(self.steps, value) for value in (self.token, self.segment))
        return Rows(ids, self.wanted, positions, types, ranges)


def kept_before(wanted: Tensor, width: int, offset: int) -> Tensor:
    """(batch, width) bool: the tokens of the target that a wanted step depends on.

    Args:
        wanted: (batch, steps) bool.
        width: Number of tokens.
        offset: Tokens that the first step depends on.
    """
    columns = torch.arange(wanted.shape[1], device=wanted.device)
    last = torch.where(wanted, columns + offset, 0).amax(1, keepdim=True)
    return torch.arange(width, device=wanted.device) < last
