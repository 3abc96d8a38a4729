"""Packed attention in few calls: sequences of similar length are padded to the longest of them and attend together.

One call for each sequence does the least arithmetic, but every call is a parallel region, at whose end all threads
wait for the slowest: on a machine whose cores have other work as well, these waits take longer than the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ctxmodels.layers.attention.banded_attention import attend_band
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.attention.masks import MaskSpec, is_in_ranges
from hf_ctxmodels.layers.attention.rows import attend_rows

# What a group may add by padding, measured with 4 and 12 heads and lengths up to 32, 128 and 512: query-key pairs that
# take as long as a call, and, where threads have to meet, a share of all pairs.
_CALL_PAIRS = 500
_WASTE = 1 / 32
_BANDED_FROM = 2  # windows that a sequence must be longer than for its band to be computed alone


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences that attend in one call, each padded at its end.

    Attributes:
        members: Their numbers.
        queries, keys: Rows of each, padding included.
        mask: Additive, broadcastable to (members, heads, queries, keys); None where all is seen.
        is_causal: Whether the mask is the plain causal one, for as many queries as keys.
        band: The width of the causal band that is computed alone, in place of a mask; or None.
    """

    members: tuple[int, ...]
    queries: int
    keys: int
    mask: Tensor | None
    is_causal: bool
    band: int | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
        """(members, length, heads, head_dim) each -> the context."""
        if self.band is not None:
            return attend_band(query, key, value, self.band, scale=scale, dropout=dropout)
        return attend_rows(query, key, value, self.mask, is_causal=self.is_causal, scale=scale, dropout=dropout)


@dataclass(frozen=True, eq=False)
class Grouping:
    """All groups of a batch.

    Attributes:
        groups: Those of the sequences that have a query.
        query_lengths, key_lengths: Rows of every sequence.
    """

    groups: tuple[Group, ...]
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
        """(rows, heads, head_dim) queries over (tokens, heads, head_dim) -> (rows, heads, head_dim)."""
        parts = query.split(self.query_lengths), key.split(self.key_lengths), value.split(self.key_lengths)
        filler = query.new_zeros(max(max(group.queries, group.keys) for group in self.groups), *query.shape[1:])
        contexts: dict[int, Tensor] = {}
        for group in self.groups:
            widths = (group.queries, group.keys, group.keys)
            whole = len(self.groups) == 1 and len(group.members) == len(self.key_lengths)
            queries, keys, values = (
                _padded(each, part, group.members, width, filler, whole)
                for each, part, width in zip((query, key, value), parts, widths, strict=True)
            )
            context = group.attend(queries, keys, values, scale=scale, dropout=dropout)
            if whole and len(context) * group.queries == len(query):
                return context.flatten(0, 1)
            contexts |= zip(group.members, _real(context, [self.query_lengths[each] for each in group.members]))
        return torch.cat([contexts[number] for number in sorted(contexts)])


def _padded(
    rows: Tensor, parts: Sequence[Tensor], members: Sequence[int], width: int, filler: Tensor, whole: bool
) -> Tensor:
    """(members, width, heads, head_dim), of all rows or of the parts of some sequences; without a copy if it can be."""
    if whole and len(rows) == len(members) * width:
        return rows.unflatten(0, (len(members), width))
    if len(members) == 1:
        return parts[members[0]][None]
    pieces = [piece for each in members for piece in (parts[each], filler[: width - len(parts[each])])]
    return torch.cat(pieces).unflatten(0, (len(members), width))


def _real(context: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """(members, queries, heads, head_dim) -> the rows of each sequence that are not padding."""
    if len(lengths) == 1:
        return [context[0]]
    queries = context.shape[1]
    return context.flatten(0, 1).split([part for each in lengths for part in (each, queries - each)])[::2]


def group_sequences(
    spec: MaskSpec, queries: PackedLayout, keys: PackedLayout, *, dtype: torch.dtype, device: torch.device, single: bool
) -> Grouping:
    """Form the groups of a batch and their masks.

    Args:
        spec: Who sees whom within a sequence.
        queries, keys: Where the rows lie; sequence i of the one attends to sequence i of the other.
        dtype, device: Of the masks.
        single: Make one group, for devices that compute padding faster than they start calls.
    """
    pairs = list(zip(queries.query_counts, keys.lengths, strict=True))
    allowed = float("inf")
    if not single:
        waste = _WASTE if torch.get_num_threads() > 1 else 0.0
        allowed = max(_CALL_PAIRS, waste * sum(rows * columns for rows, columns in pairs))
    # Padding comes after every query of its sequence: the plain causal mask hides it as well.
    square = spec.bias is None and queries.query is None and queries.lengths == keys.lengths
    is_causal = square and spec.is_plain_causal
    masks = _Masks(spec, queries, keys, dtype, device)
    groups = []
    for members in _members(pairs, allowed):
        height, width = (max(pairs[number][side] for number in members) for side in (0, 1))
        band = spec.window if square and spec.is_banded and width > _BANDED_FROM * (spec.window or 0) else None
        mask = None if is_causal or band is not None else masks.of_group(members, height, width)
        groups.append(Group(members, height, width, mask, is_causal, band))
    return Grouping(tuple(groups), queries.query_counts, keys.lengths)


def _members(pairs: Sequence[tuple[int, int]], allowed: float) -> list[tuple[int, ...]]:
    """The sequences of each group; the groups with the longest keys come first.

    Args:
        pairs: (queries, keys) of each sequence; those without a query belong to no group.
        allowed: Pairs that each group may add by padding.
    """
    members: list[list[int]] = []
    width = height = real = 0
    for number in sorted((n for n, pair in enumerate(pairs) if pair[0]), key=lambda n: pairs[n][::-1], reverse=True):
        queries, keys = pairs[number]
        size, height, real = len(members[-1]) + 1 if members else 0, max(height, queries), real + queries * keys
        if members and size * height * width - real <= allowed:
            members[-1].append(number)
        else:
            members.append([number])
            width, height, real = keys, queries, queries * keys
    return [tuple(sorted(group)) for group in members]


@dataclass(frozen=True, eq=False)
class _Masks:
    """What the masks of all groups are made of."""

    spec: MaskSpec
    query_layout: PackedLayout
    key_layout: PackedLayout
    dtype: torch.dtype
    device: torch.device

    def of_group(self, members: Sequence[int], height: int, width: int) -> Tensor | None:
        """The additive mask of (members, height) queries and (members, width) keys, or None."""
        queries, keys = self._query_positions(members, height), torch.arange(width)[None]
        lengths = torch.tensor([self.key_layout.lengths[number] for number in members])[:, None]
        seen = None if bool((lengths == width).all()) else (keys < lengths)[:, None, None, :]
        if self.spec.ranges is not None:
            visible = is_in_ranges(
                self.spec.ranges.cpu()[self._query_rows(members, height)][:, :, None], keys[:, None, :]
            )
            seen = visible[:, None] if seen is None else visible[:, None] & seen
        elif not self.spec.is_full:
            prefix = None
            if self.spec.prefix_lengths is not None:
                prefix = self.spec.prefix_lengths.cpu()[list(members)][:, None, None]
            visible = self.spec.sees(queries[:, :, None], keys[:, None, :], prefix)[:, None]
            seen = visible if seen is None else visible & seen
        hidden = None if seen is None or bool(seen.all()) else ~seen.to(self.device)
        if self.spec.bias is not None:
            bias = self.spec.bias(queries.to(self.device), keys.to(self.device)).to(self.dtype)
            return bias if hidden is None else bias.masked_fill(hidden, float("-inf"))
        if hidden is None:
            return None
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))

    def _query_positions(self, members: Sequence[int], height: int) -> Tensor:
        """(members or 1, height); padding repeats the last query, so that it sees something."""
        if self.query_layout.query is None:
            return torch.arange(height)[None]
        return self.query_layout.query_positions[self._computed_rows(members, height)]

    def _computed_rows(self, members: Sequence[int], height: int) -> Tensor:
        """(members, height) numbers of the computed rows; padding repeats the last one."""
        lengths = torch.tensor(self.query_layout.query_counts)
        starts = lengths.cumsum(0) - lengths
        chosen = list(members)
        return starts[chosen, None] + torch.minimum(torch.arange(height), lengths[chosen, None] - 1)

    def _query_rows(self, members: Sequence[int], height: int) -> Tensor:
        """(members, height) packed indices of the computed rows; padding repeats the last one."""
        rows = self._computed_rows(members, height)
        return rows if self.query_layout.query is None else self.query_layout.query.cpu()[rows]
