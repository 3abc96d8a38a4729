"""`attend`: the one way from queries, keys and values to contexts, whatever the layout, mask and device.

Packed rows attend in groups of similar length on the CPU (`grouping`), by torch's variable-length flash kernel on CUDA
where that is exact, and padded for attention alone elsewhere. Padded rows go through the attention interface of
transformers: eager, sdpa, flex, flash, or what a user registered there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.attention.banded_attention import attend_to_band
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec, PositionBias, is_in_ranges
from hf_ctxmodels.layers.attention.reference import eager_attention_forward
from hf_ctxmodels.layers.cpu.dropout import padded_attention

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
            return attend_to_band(query, key, value, self.band, scale=scale, dropout=dropout)
        return padded_attention(query, key, value, self.mask, is_causal=self.is_causal, scale=scale, dropout=dropout)


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
            visible = self.spec.allows(queries[:, :, None], keys[:, None, :], prefix)[:, None]
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


@dataclass(frozen=True, eq=False)
class PaddedMask:
    """A spec made ready for padded rows.

    Attributes:
        spec: What it was made from.
        mask: As transformers makes it for the implementation in use, or None.
        bias: (batch, heads, queries, keys) added to the scores, or None.
        is_causal: Whether `mask` is None because the implementation's own causal mask is the right one.
    """

    spec: MaskSpec
    mask: Tensor | BlockMask | None
    bias: Tensor | None
    is_causal: bool


@dataclass(frozen=True, eq=False)
class PackedMask:
    """A spec made ready for packed rows.

    Attributes:
        spec: What it was made from.
        queries, keys: Where the rows lie.
        dtype, device: Of the rows.
    """

    spec: MaskSpec
    queries: PackedLayout
    keys: PackedLayout
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def grouping(self) -> Grouping:
        """The rows in groups: several on the CPU, one elsewhere."""
        single = self.device.type != "cpu"
        return group_sequences(self.spec, self.queries, self.keys, dtype=self.dtype, device=self.device, single=single)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """(sequences + 1,) int32 start of each sequence and the end of the last, of queries and of keys."""
        both = (torch.tensor((0, *lengths)).cumsum(0) for lengths in (self.queries.query_counts, self.keys.lengths))
        queries, keys = (bounds.to(self.device, torch.int32) for bounds in both)
        return queries, keys

    @property
    def window(self) -> tuple[int, int] | None:
        """How far back and ahead the variable-length kernel lets a query see, -1 for no limit; None: it cannot say."""
        if any(each is not None for each in (self.spec.bias, self.spec.prefix_lengths, self.spec.ranges)):
            return None
        if not self.spec.is_full and self.queries.query_counts != self.keys.lengths:  # it aligns the last query and key
            return None
        reach = -1 if self.spec.window is None else self.spec.window - 1
        return reach, 0 if self.spec.causal else reach


AttentionMask = MaskSpec | PaddedMask | PackedMask


def prepare_mask(
    spec: AttentionMask, layout: Layout, like: Tensor, key_layout: Layout | None = None
) -> PaddedMask | PackedMask:
    """Make a spec ready for a layout, once for all layers that attend alike.

    Args:
        spec: The spec, or what this function made of it.
        layout: Where the queries lie.
        like: A tensor of the rows' dtype and device.
        key_layout: Where the keys lie, for cross-attention; None for the layout of the queries.

    Raises:
        CtxError: Layouts of different kinds or numbers of sequences.
    """
    if not isinstance(spec, MaskSpec):
        return spec
    keys = layout if key_layout is None else key_layout
    if isinstance(layout, PaddedLayout) and isinstance(keys, PaddedLayout):
        return _prepare_padded(spec, layout, keys, like)
    if not (isinstance(layout, PackedLayout) and isinstance(keys, PackedLayout)):
        raise CtxError("One side of cross-attention is padded, the other packed; lay both out alike.")
    if len(layout.lengths) != len(keys.lengths):
        raise CtxError(
            f"Cross-attention from {len(layout.lengths)} sequences to {len(keys.lengths)}; there must be one for each."
        )
    mask = PackedMask(spec, layout, keys, like.dtype, like.device)
    if spec.bias is not None:  # now: its gradient must not depend on what a checkpointed layer recomputes
        _ = mask.grouping
    return mask


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    mask_spec: AttentionMask = BIDIRECTIONAL,
    *,
    scale: float,
    dropout: float = 0.0,
    key_layout: Layout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention within each sequence.

    Args:
        query: (..., heads, head_dim) at the computed rows of `layout`.
        key, value: (..., heads, head_dim) at all rows of `key_layout`, or of a cache.
        layout: Where the queries lie.
        mask_spec: Who sees whom; a prepared one (`prepare_mask`) spares the preparation.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities; 0 in evaluation.
        key_layout: Where the keys lie, for cross-attention; None for the layout of the queries.

    Returns:
        The context in the shape of `query`, and the (batch, heads, queries, keys) probabilities where the
        implementation gives them (eager).
    """
    mask = prepare_mask(mask_spec, layout, query, key_layout)
    if isinstance(mask, PackedMask):
        return _attend_packed(query, key, value, mask, scale, dropout), None
    assert isinstance(layout, PaddedLayout)
    return _attend_padded(query, key, value, layout, mask, scale, dropout)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scale: float, dropout: float) -> Tensor:
    if not query.shape[0]:  # no row is computed: a batch without targets
        return query
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half and not dropout and (window := mask.window) is not None:
        from torch.nn.attention.varlen import varlen_attn  # which registers operators: a sixth of this package's import

        longest = max(mask.queries.query_counts), max(mask.keys.lengths)
        return cast(Tensor, varlen_attn(query, key, value, *mask.bounds, *longest, scale=scale, window_size=window))
    return mask.grouping.attend(query, key, value, scale=scale, dropout=dropout)


@dataclass(frozen=True, eq=False)
class _Caller:
    """What the attention functions of transformers read of the module that calls them, and of its configuration."""

    training: bool
    is_causal: bool
    _attn_implementation: str
    dtype: torch.dtype
    _is_quantized: bool = True  # so that flash attention casts single precision to `dtype`, and looks for no weights

    @property
    def config(self) -> "_Caller":
        """Itself."""
        return self


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PaddedLayout,
    mask: PaddedMask,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(layout.implementation, eager_attention_forward)
    options = dict(layout.attention_kwargs)
    if mask.bias is not None:
        options["position_bias"] = mask.bias.to(query.dtype)
    if _is_flash(layout) and mask.spec.window is not None:
        options["sliding_window"] = mask.spec.window
    context, probabilities = attention(
        _Caller(dropout > 0, mask.is_causal, layout.implementation, query.dtype),
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        mask.mask,
        dropout=dropout,
        scaling=scale,
        is_causal=mask.is_causal,
        **options,
    )
    if torch.compiler.is_exporting():  # its order in memory is a kernel's, which ONNX replaces by another
        context = context.clone(memory_format=torch.contiguous_format)
    return context, probabilities


def _is_flash(layout: PaddedLayout) -> bool:
    return "flash" in layout.implementation


def _prepare_padded(spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout, like: Tensor) -> PaddedMask:
    bias = None if spec.bias is None else _padded_bias(spec.bias, layout, keys, like.device)
    if keys.custom_mask is not None:
        return _with_bias(PaddedMask(spec, _within_window(keys.custom_mask, spec, layout), bias, False), layout, like)
    if _is_flash(layout):
        return _prepare_flash(spec, layout, keys)
    if layout.implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        return PaddedMask(spec, None, bias, spec.causal)
    if _is_sdpa_causal(spec, layout, keys):
        return PaddedMask(spec, None, None, True)
    mask = ALL_MASK_ATTENTION_FUNCTIONS[layout.implementation](
        batch_size=layout.batch_size,
        q_length=layout.length,
        kv_length=keys.num_keys,
        mask_function=_mask_function(spec, layout, keys, like.device),
        attention_mask=keys.tokens,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=spec.is_full and keys.sequences is None,
        dtype=like.dtype,
        device=like.device,
    )
    return _with_bias(PaddedMask(spec, mask, bias, False), layout, like)


def _with_bias(mask: PaddedMask, layout: PaddedLayout, like: Tensor) -> PaddedMask:
    """For sdpa, mask and bias as one tensor, which the attention function of transformers would make in each layer."""
    if layout.implementation != "sdpa" or mask.bias is None or torch.is_autocast_enabled(like.device.type):
        return mask  # autocast would turn the least value of float32 into an infinity
    added = mask.bias.to(like.dtype)
    if isinstance(mask.mask, Tensor):
        seen = mask.mask.dtype == torch.bool
        added = torch.where(mask.mask, added, torch.finfo(like.dtype).min) if seen else added + mask.mask
    return replace(mask, mask=added.contiguous(), bias=None)


def _within_window(ready: Tensor | BlockMask, spec: MaskSpec, layout: PaddedLayout) -> Tensor | BlockMask:
    """A ready mask, which knows of no window, with that of the spec: distances are those of columns.

    Raises:
        CtxError: The mask cannot be changed.
    """
    if spec.window is None:
        return ready
    if isinstance(ready, BlockMask):
        raise CtxError(
            "A BlockMask is the same in all layers, but this model has layers with a window.",
            hint="give attention_mask (batch, length), from which each layer's mask is made.",
        )
    queries = torch.arange(layout.length, device=ready.device)[:, None] + layout.past_length
    keys = torch.arange(ready.shape[-1], device=ready.device)[None]
    outside = (queries - keys).abs() >= spec.window
    return ready & ~outside if ready.dtype == torch.bool else ready.masked_fill(outside, torch.finfo(ready.dtype).min)


def _is_sdpa_causal(spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout) -> bool:
    """Whether sdpa's own causal mask is right: it counts queries and keys from the first, and knows no padding."""
    plain = spec.is_plain_causal and spec.bias is None and keys.sequences is None and layout is keys
    if layout.implementation != "sdpa" or not plain or layout.length not in (1, keys.num_keys):
        return False
    return keys.tokens is None or (not is_traced(keys.tokens) and bool(keys.tokens.all()))


def _prepare_flash(spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout) -> PaddedMask:
    """The padding mask: the kernel itself makes causal and local masks, and knows nothing else.

    Raises:
        CtxError: A mask that it does not know.
    """
    known = spec.bias is None and spec.prefix_lengths is None and spec.ranges is None and keys.sequences is None
    if not known or (not spec.is_full and keys is not layout):
        raise CtxError(
            f"{layout.implementation} knows no bias, no prefix and no several sequences in a row.",
            hint='model.set_attn_implementation("sdpa") does, and uses a variable-length flash kernel on CUDA itself.',
        )
    return PaddedMask(spec, keys.tokens, None, spec.causal)


def _mask_function(
    spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, by (batch, head, query, key) indices, as transformers and flex attention take it."""
    query_positions = layout.select_query_columns(layout.key_positions(device)).expand(layout.batch_size, -1)
    key_positions = keys.key_positions(device).expand(layout.batch_size, -1)
    prefixes = None if spec.prefix_lengths is None else _prefixes(spec.prefix_lengths, keys)

    def mask_function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if spec.is_full:
            seen = key == key
        elif spec.ranges is not None:
            seen = is_in_ranges(spec.ranges[batch, query], key_positions[batch, key])
        else:
            prefix = None if prefixes is None else prefixes[batch, key]
            seen = spec.allows(query_positions[batch, query], key_positions[batch, key], prefix)
        if layout.sequences is None or keys.sequences is None:
            return seen
        return seen & (layout.sequences[batch, query] == keys.sequences[batch, key])

    return mask_function


def _prefixes(lengths: Tensor, keys: PaddedLayout) -> Tensor:
    """(sequences,) -> (batch, keys) length of the prefix of the sequence that each column belongs to."""
    if keys.sequences is None:
        return lengths[:, None].expand(-1, keys.num_keys)
    counts = keys.sequences[:, -1]
    return lengths[(counts.cumsum(0) - counts)[:, None] + keys.sequences.clamp(min=1) - 1]


def _padded_bias(bias: PositionBias, layout: PaddedLayout, keys: PaddedLayout, device: torch.device) -> Tensor:
    """(batch, heads, queries, keys); the rows share one where padding stands at their ends only."""
    query_positions, key_positions = _shared_positions(layout, device), _shared_positions(keys, device)
    added = bias(layout.select_query_columns(query_positions), key_positions)
    return added.expand(layout.batch_size, -1, -1, -1)


def _shared_positions(layout: PaddedLayout, device: torch.device) -> Tensor:
    """`key_positions`, as one row where that says the same of all tokens."""
    positions, tokens = layout.key_positions(device), layout.tokens
    if tokens is None or layout.sequences is not None or is_traced(tokens):
        return positions
    columns = torch.arange(layout.num_keys, device=device)[None]
    return columns if bool(((positions == columns) | ~tokens).all()) else positions
