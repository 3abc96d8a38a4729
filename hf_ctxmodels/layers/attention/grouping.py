"""Packed attention in few calls: sequences of similar length are padded to the longest of them and attend together.

One call for each sequence does the least arithmetic, but every call is a parallel region, at whose end all threads
wait for the slowest: on a machine whose cores have other work as well, these waits take longer than the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_ctxmodels.layers.attention.dropped_attention import dropped_attention
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.attention.masks import Bias, MaskSpec

# Share of all query-key pairs that a group may add by padding. Measured with 4 and 12 heads, lengths up to 128 and 512,
# on one thread, two, and two beside a busy process: 32 sequences make 7 groups, which costs at most an eighth of the
# attention on a quiet machine and saves three quarters of the regions.
_WASTE = 1 / 32


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences that attend in one call.

    Attributes:
        size: Number of sequences.
        num_queries, num_keys: Rows of each, padding included.
        query_start, key_start: Where they begin among the gathered rows.
        mask: Additive, broadcastable to (size, heads, num_queries, num_keys); None where all is seen.
        is_causal: Whether the mask is the plain causal one, for as many queries as keys.
    """

    size: int
    num_queries: int
    num_keys: int
    query_start: int
    key_start: int
    mask: Tensor | None = None
    is_causal: bool = False

    def queries(self, rows: Tensor) -> Tensor:
        """(gathered rows, ...) -> (size, num_queries, ...)."""
        return rows.narrow(0, self.query_start, self.size * self.num_queries).unflatten(0, (self.size, -1))

    def keys(self, rows: Tensor) -> Tensor:
        """(gathered rows, ...) -> (size, num_keys, ...)."""
        return rows.narrow(0, self.key_start, self.size * self.num_keys).unflatten(0, (self.size, -1))


@dataclass(frozen=True, eq=False)
class Gathering:
    """Packed rows in the groups' order, each sequence padded to its group's length by repeating its last row.

    Attributes:
        rows: (gathered rows,) the packed row that each is; None where they are the packed rows themselves.
        places: (packed rows,) where each stands among the gathered; None likewise.
        real: (gathered rows,) bool, False at repeated rows; None likewise.
        sequences: (gathered rows,) number of the sequence.
    """

    rows: Tensor | None
    places: Tensor | None
    real: Tensor | None
    sequences: Tensor

    @classmethod
    def build(cls, lengths: Sequence[int], order: Sequence[int], widths: Sequence[int]) -> "Gathering":
        """Gather sequences.

        Args:
            lengths: Packed rows of every sequence.
            order: Sequences in the order of the groups; those without a row may be left out.
            widths: Rows that each of them is padded to.
        """
        chosen, width = torch.tensor(order), torch.tensor(widths)
        length = torch.tensor(lengths)
        sequences = torch.repeat_interleave(chosen, width)
        exact = [lengths[number] for number in order] == [*widths] and len(sequences) == sum(lengths)
        if exact and sorted(order) == [*order]:
            return cls(None, None, None, sequences)
        offsets = torch.arange(len(sequences)) - torch.repeat_interleave(width.cumsum(0) - width, width)
        real = offsets < length[sequences]
        rows = (length.cumsum(0) - length)[sequences] + torch.minimum(offsets, length[sequences] - 1)
        places = torch.zeros(sum(lengths), dtype=torch.long)
        places[rows[real]] = real.nonzero().squeeze(1)
        return cls(rows, places, real, sequences)

    def to(self, device: torch.device) -> "Gathering":
        """With the indices that attention needs on a device."""
        if self.rows is None or self.places is None:
            return self
        return replace(self, rows=self.rows.to(device), places=self.places.to(device))

    def gather(self, packed: Tensor) -> Tensor:
        """(packed rows, ...) -> (gathered rows, ...)."""
        return packed if self.rows is None else packed.index_select(0, self.rows)

    def scatter(self, gathered: Tensor) -> Tensor:
        """(gathered rows, ...) -> (packed rows, ...)."""
        return gathered if self.places is None else gathered.index_select(0, self.places)


@dataclass(frozen=True, eq=False)
class Grouping:
    """All groups of a batch."""

    groups: tuple[Group, ...]
    queries: Gathering
    keys: Gathering

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float) -> Tensor:
        """(rows, heads, head_dim) queries over (tokens, heads, head_dim) -> (rows, heads, head_dim)."""
        query, key, value = self.queries.gather(query), self.keys.gather(key), self.keys.gather(value)
        contexts = [
            attend_group(
                group.queries(query).transpose(1, 2),
                group.keys(key).transpose(1, 2),
                group.keys(value).transpose(1, 2),
                group.mask,
                is_causal=group.is_causal,
                scale=scale,
                dropout=dropout,
            )
            for group in self.groups
        ]
        rows = [context.transpose(1, 2).flatten(0, 1) for context in contexts]
        return self.queries.scatter(rows[0] if len(rows) == 1 else torch.cat(rows))


def attend_group(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, dropout: float
) -> Tensor:
    """One call on (size, heads, length, head_dim) tensors; the mask as in `Group`."""
    if mask is not None:
        mask = mask.to(query.dtype)
    if 0 < dropout < 1 and query.device.type == "cpu":  # no kernel drops out there: torch would write the formula out
        if is_causal:
            mask = query.new_full(query.shape[2:3] * 2, float("-inf")).triu(1)
        return dropped_attention(query, key, value, mask, scaling=scale, rate=dropout)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
    )


def group_sequences(
    spec: MaskSpec, queries: PackedLayout, keys: PackedLayout, *, dtype: torch.dtype, device: torch.device, single: bool
) -> Grouping:
    """Form the groups of a batch and their masks.

    Args:
        spec: Who sees whom within a sequence.
        queries, keys: Where the rows lie; sequence i of the one attends to sequence i of the other.
        dtype: Of the masks.
        device: Where the rows are.
        single: Make one group, for devices that compute padding faster than they start calls.
    """
    pairs = list(zip(queries.row_counts, keys.lengths, strict=True))
    members = _members(pairs, float("inf") if single else _WASTE)
    order = [number for group in members for number in group]
    shapes = [tuple(max(pairs[number][side] for number in group) for group in members) for side in (0, 1)]
    gathered = [
        Gathering.build(
            [pair[side] for pair in pairs], order, [w for w, group in zip(shapes[side], members) for _ in group]
        )
        for side in (0, 1)
    ]
    rows = [[0, *accumulate(width * len(group) for width, group in zip(shape, members))] for shape in shapes]
    groups = tuple(
        Group(len(group), shapes[0][number], shapes[1][number], rows[0][number], rows[1][number])
        for number, group in enumerate(members)
    )
    square = queries.query is None and queries.lengths == keys.lengths
    if spec.is_triangle and spec.bias is None and square:  # keys repeated at a sequence's end come after every query
        groups = tuple(replace(group, is_causal=True) for group in groups)
    else:
        masks = _Masks(spec, queries, keys, gathered[0], gathered[1])
        groups = tuple(replace(group, mask=masks.of_group(group, dtype, device)) for group in groups)
    return Grouping(groups, gathered[0].to(device), gathered[1].to(device))


def _members(pairs: Sequence[tuple[int, int]], waste: float) -> list[list[int]]:
    """The sequences of each group; the groups with the longest keys come first.

    Args:
        pairs: (queries, keys) of each sequence; those without a query belong to no group.
        waste: Share of all pairs that each group may add by padding.
    """
    allowed = waste * sum(queries * keys for queries, keys in pairs)
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
    return [sorted(group) for group in members]


@dataclass(frozen=True, eq=False)
class _Masks:
    """What the masks of all groups are made of."""

    spec: MaskSpec
    query_layout: PackedLayout
    key_layout: PackedLayout
    queries: Gathering
    keys: Gathering

    def of_group(self, group: Group, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The additive mask of one group, or None."""
        seen = None if self.keys.real is None else group.keys(self.keys.real)[:, None, None, :]
        if seen is not None and bool(seen.all()):
            seen = None
        if not self.spec.is_full:
            visible = self._visible(group)
            seen = visible if seen is None else visible & seen
        hidden = None if seen is None else ~seen.to(device)
        if self.spec.bias is not None:
            bias = self._bias(self.spec.bias, group, device).to(dtype)
            return bias if hidden is None else bias.masked_fill(hidden, float("-inf"))
        if hidden is None:
            return None
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))

    def _visible(self, group: Group) -> Tensor:
        """(size, 1, queries, keys) bool."""
        queries = group.queries(self.queries.gather(self.query_layout.query_positions))
        keys = group.keys(self.keys.gather(self.key_layout.positions))
        prefix = None
        if self.spec.prefix_lengths is not None:
            sequences = group.queries(self.queries.sequences)[:, :1]
            prefix = self.spec.prefix_lengths.cpu()[sequences][:, :, None]
        return self.spec.sees(queries[:, :, None], keys[:, None, :], prefix)[:, None]

    def _bias(self, bias: Bias, group: Group, device: torch.device) -> Tensor:
        """(size or 1, heads, queries, keys)."""
        queries = torch.arange(group.num_queries)[None]
        if self.query_layout.query is not None:
            queries = group.queries(self.queries.gather(self.query_layout.query_positions))
        return bias(queries.to(device), torch.arange(group.num_keys, device=device)[None])
