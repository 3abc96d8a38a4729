"""Attention masks prepared for a layout, once per forward pass.

`prepare_mask` converts a `MaskSpec`: for padded batches to a mask of transformers' attention functions, for packed ones
to groups of sequences of similar length, and in compiled graphs to the arguments of operators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_ctxmodels.core.compiled_ops import data_dependent_size, define_differentiable_operator
from hf_ctxmodels.core.devices import autocast_dtype
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, to_device
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout, TracedLayout
from hf_ctxmodels.layers.attention.masks import FlexPositionBias, MaskSpec, gather_position_bias

# Limits of the padding in a group, measured with 4 and 12 heads and lengths up to 32, 128 and 512: the number of
# query-key pairs that take as long as a call, and, with several threads, a fraction of all pairs.
_CALL_PAIRS = 500
_MAX_PADDING = 1 / 32
_MIN_BAND_RATIO = 2  # a band is computed alone in sequences longer than this many windows

# Arguments of an operator that describe a mask, see `mask_arguments`.
MASK_TENSORS = (
    "Tensor lengths, Tensor? computed, Tensor? query_lengths, Tensor? key_lengths, Tensor? prefix_lengths, "
    "Tensor? ranges"
)
MASK_OPTIONS = "bool causal, int? window"


@dataclass(frozen=True, eq=False)
class PaddedMask:
    """A mask prepared for a padded layout.

    Attributes:
        mask: The mask in transformers' format for the attention implementation, or None.
        bias: (batch, heads, queries, keys) addend of the scores, dense or for FlexAttention; or None.
        is_causal: Whether `mask` is None because the implementation applies its own causal mask.
    """

    spec: MaskSpec
    mask: Tensor | BlockMask | None
    bias: Tensor | FlexPositionBias | None
    is_causal: bool


@dataclass(frozen=True, eq=False)
class PackedMask:
    """A mask prepared for packed layouts of queries and keys, and for the dtype and device of the states.

    Attributes:
        masks_with_bias: The `concatenated_masks` of an equal mask with a bias, instead of a bias in `spec`; or None.
    """

    spec: MaskSpec
    queries: PackedLayout
    keys: PackedLayout
    dtype: torch.dtype
    device: torch.device
    is_single: bool
    masks_with_bias: Tensor | None = None

    @property
    def has_bias(self) -> bool:
        """Whether scores have an additive bias."""
        return self.spec.bias is not None or self.masks_with_bias is not None

    @property
    def has_all_queries(self) -> bool:
        """Whether the queries are all tokens, and the keys are the same tokens."""
        return self.queries.query is None and self.queries.lengths == self.keys.lengths

    @cached_property
    def groups(self) -> "tuple[SequenceGroup, ...]":
        """The sequences that have a query, in groups on the CPU; elsewhere one group of all sequences (`is_single`),
        since padding costs less than further kernel launches."""
        spec, queries, keys = self.spec, self.queries, self.keys
        lengths = list(zip(queries.query_counts, keys.lengths, strict=True))
        if self.is_single:
            indices_by_group = [tuple(range(len(lengths)))]
        else:
            fraction = _MAX_PADDING if torch.get_num_threads() > 1 else 0.0
            max_padding = max(_CALL_PAIRS, fraction * sum(num_queries * num_keys for num_queries, num_keys in lengths))
            indices_by_group = _group_by_length(lengths, max_padding)
        has_all_queries = self.has_all_queries
        is_square = not self.has_bias and has_all_queries
        is_causal = is_square and spec.is_plain_causal  # padding follows all queries: this mask hides it as well
        groups = []
        for indices in indices_by_group:
            num_queries = max(lengths[index][0] for index in indices)
            num_keys = max(lengths[index][1] for index in indices)
            is_banded = is_square and spec.is_banded and num_keys > _MIN_BAND_RATIO * (spec.window or 0)
            is_padded = any(lengths[index][1] < num_keys for index in indices)
            needs_mask = not is_causal and not is_banded and (is_padded or not spec.is_full or self.has_bias)
            if needs_mask and self.is_single:
                num_keys = round_up(num_keys)
                num_queries = num_keys if has_all_queries else num_queries
            computes_mask = needs_mask and self.masks_with_bias is None
            mask = self._group_mask(indices, num_queries, num_keys) if computes_mask else None
            window = spec.window if is_banded else None
            groups.append(SequenceGroup(indices, num_queries, num_keys, mask, is_causal, window))
        return tuple(groups) if self.masks_with_bias is None else self._add_masks(groups, self.masks_with_bias)

    def concatenated_masks(self) -> Tensor:
        """(elements,) the masks of all groups, of a spec with a bias."""
        masks = [torch.empty(0, dtype=self.dtype, device=self.device)]  # there may be no group
        for group in self.groups:
            assert group.mask is not None
            masks.append(group.mask.expand(self._num_masks(group), -1, -1, -1).flatten())
        return torch.cat(masks)

    def _add_masks(self, groups: "Sequence[SequenceGroup]", masks: Tensor) -> "tuple[SequenceGroup, ...]":
        """Groups with the (elements,) `concatenated_masks`."""
        sizes = [self._num_masks(group) * group.num_queries * group.num_keys for group in groups]
        heads = len(masks) // sum(sizes)
        return tuple(
            replace(group, mask=mask.view(-1, heads, group.num_queries, group.num_keys))
            for group, mask in zip(groups, masks.split([heads * size for size in sizes]), strict=True)
        )

    def _num_masks(self, group: "SequenceGroup") -> int:
        """Number of masks of a group: one for each sequence, or one if all have the same."""
        spec, lengths = self.spec, [self.keys.lengths[index] for index in group.sequence_indices]
        is_padded = min(lengths) < group.num_keys and not self._hides_padding
        is_shared = self.queries.query is None and spec.prefix_lengths is None and spec.ranges is None and not is_padded
        return 1 if is_shared else len(lengths)

    @property
    def _hides_padding(self) -> bool:
        """Whether the mask hides padding, which follows all keys, from all queries but padding; it is then shared by
        all sequences."""
        return self.is_single and self.has_all_queries and self.spec.causal and self.spec.prefix_lengths is None

    def _group_mask(self, indices: Sequence[int], num_queries: int, num_keys: int) -> Tensor | None:
        """The additive mask of a group, broadcastable to (sequences, heads, queries, keys), or None."""
        spec, computed = self.spec, self.queries.query
        queries, tokens = torch.arange(num_queries, device=self.device)[None], None
        counts = [self.queries.query_counts[index] for index in indices]
        if computed is not None or spec.ranges is not None:
            # Indices among all computed queries; padding repeats a sequence's last query, so that it attends to a key.
            ends = torch.tensor(self.queries.query_counts).cumsum(0)[list(indices), None]
            starts = ends - torch.tensor(counts)[:, None]
            last = torch.maximum(ends - 1, starts).clamp(max=sum(self.queries.query_counts) - 1)
            tokens = torch.minimum(to_device(starts, self.device) + queries, to_device(last, self.device))
            if computed is not None:
                queries, tokens = to_device(self.queries.query_positions, self.device)[tokens], computed[tokens]
        keys = torch.arange(num_keys, device=self.device)[None]
        key_lengths = [self.keys.lengths[index] for index in indices]
        allowed = None
        if min(key_lengths) < num_keys and not self._hides_padding:
            allowed = (keys < to_device(torch.tensor(key_lengths), self.device)[:, None])[:, None, None, :]
        if not spec.is_full:
            ranges = None if spec.ranges is None else spec.ranges[tokens][:, :, None]
            prefix = spec.prefix_lengths
            if prefix is not None:
                prefix = prefix[to_device(torch.tensor(indices), self.device)][:, None, None]
            visible = spec.allows(queries[:, :, None], keys[:, None, :], prefix, ranges)
            allowed = visible[:, None] if allowed is None else visible[:, None] & allowed
            if self.is_single:  # padding may have no visible key, whose softmax would be undefined
                allowed = allowed | ~allowed.any(-1, keepdim=True)
        if not self.is_single and allowed is not None and bool(allowed.all()):
            allowed = None
        if spec.bias is not None:
            bias = spec.bias(queries, keys).to(self.dtype)
            bias = bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))
            return bias.contiguous() if self.is_single else bias
        if allowed is None:
            return None
        return torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(~allowed, float("-inf"))

    @cached_property
    def padded_indices(self) -> tuple[Tensor | None, Tensor | None]:
        """(queries,) and (keys,) indices in the padded batch of the single group; None without padding."""
        (group,) = self.groups
        query_indices = self._padded_indices(self.queries.query_counts, group.num_queries)
        if self.queries.query_counts == self.keys.lengths and group.num_queries == group.num_keys:
            return query_indices, query_indices
        return query_indices, self._padded_indices(self.keys.lengths, group.num_keys)

    def _padded_indices(self, lengths: Sequence[int], padded_length: int) -> Tensor | None:
        if min(lengths) == padded_length:
            return None
        counts = torch.tensor(lengths)
        padding_before = torch.arange(len(counts)) * padded_length - (counts.cumsum(0) - counts)
        return to_device(torch.arange(sum(lengths)) + padding_before.repeat_interleave(counts), self.device)

    @cached_property
    def cumulative_lengths(self) -> tuple[Tensor, Tensor]:
        """(sequences + 1,) int32 cumulative sequence lengths, starting with 0, of queries and of keys."""
        queries, keys = (
            to_device(torch.tensor((0, *lengths)).cumsum(0).to(torch.int32), self.device)
            for lengths in (self.queries.query_counts, self.keys.lengths)
        )
        return queries, keys

    @property
    def varlen_window(self) -> tuple[int, int] | None:
        """Windows before and after a query in the variable-length kernel, -1 for no limit; None if it does not support
        the mask."""
        # the kernel aligns the last query with the last key
        is_aligned = self.spec.is_full or self.queries.query_counts == self.keys.lengths
        if not (self.spec.fits_flash and is_aligned):
            return None
        distance = -1 if self.spec.window is None else self.spec.window - 1
        return distance, 0 if self.spec.causal else distance


@dataclass(frozen=True, eq=False)
class TracedMask:
    """A mask prepared for a traced layout.

    Attributes:
        masks_with_bias: (elements,) `PackedMask.concatenated_masks` if the spec has a bias, otherwise None.
    """

    spec: MaskSpec
    masks_with_bias: Tensor | None


AttentionMask = MaskSpec | PaddedMask | PackedMask | TracedMask


def prepare_mask(
    mask: AttentionMask, layout: Layout, like: Tensor, key_layout: Layout | None = None
) -> PaddedMask | PackedMask | TracedMask:
    """Convert a mask for a layout, once for all layers with the same mask.

    Args:
        mask: The spec; a prepared mask is returned unchanged.
        like: A tensor with the dtype and device of the states.
        key_layout: The layout of the keys in cross-attention.

    Raises:
        CtxError: The layouts have different types or numbers of sequences.
    """
    if not isinstance(mask, MaskSpec):
        return mask
    keys = layout if key_layout is None else key_layout
    if isinstance(layout, TracedLayout):
        if mask.bias is None:
            return TracedMask(mask, None)
        bias: Any = mask.bias
        arguments = mask_arguments(mask, layout, cast(TracedLayout | None, key_layout))
        masks = _masks_with_bias(bias.by_distance(like.device), *arguments)
        return TracedMask(mask, masks.to(attention_dtype(like)))
    if isinstance(layout, PaddedLayout) and isinstance(keys, PaddedLayout):
        return _prepare_padded(mask, layout, keys, like)
    if not (isinstance(layout, PackedLayout) and isinstance(keys, PackedLayout)):
        raise CtxError("Cross-attention between a padded and a packed layout.", hint="use the same layout for both.")
    if len(layout.lengths) != len(keys.lengths):
        raise CtxError(
            f"Cross-attention from {len(layout.lengths)} sequences to {len(keys.lengths)}, expected equal numbers."
        )
    dtype, is_single = attention_dtype(like), like.device.type != "cpu"
    prepared = PackedMask(mask, layout, keys, dtype, like.device, is_single=is_single)
    if mask.bias is not None:  # outside of checkpointed layers, whose recomputation must not change its gradient
        _ = prepared.groups
    return prepared


def round_up(length: int) -> int:
    """The next multiple of 8: the attention kernels of GPUs copy masks with strides that are not multiples of 8."""
    return length + -length % 8


def attention_dtype(like: Tensor) -> torch.dtype:
    """The dtype in which attention is computed, so that a mask or bias is cast once, and not in each layer."""
    device = like.device.type
    return like.dtype if device == "cpu" else autocast_dtype(device) or like.dtype


def _prepare_padded(spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout, like: Tensor) -> PaddedMask:
    if layout.is_flash and keys.custom_mask is None:
        if not spec.fits_flash or keys.sequences is not None or (not spec.is_full and keys is not layout):
            raise CtxError(
                f"{layout.implementation} supports no position bias, no prefix and no packed sequences (sequence_ids).",
                hint='use model.set_attn_implementation("sdpa"), which has a varlen flash kernel on CUDA itself.',
            )
        return PaddedMask(spec, keys.token_mask, None, spec.causal)  # the kernel applies causal and window masks
    bias, dtype = _padded_bias(spec, layout, keys, like), attention_dtype(like)
    if keys.custom_mask is not None:
        mask = _add_window(keys.custom_mask, spec, layout)
        return _merge_sdpa_bias(PaddedMask(spec, mask, bias, False), layout, like)
    if layout.implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        return PaddedMask(spec, None, bias, spec.causal)
    token_mask = keys.token_mask  # transformers would read whether there is padding from the device
    if token_mask is not None and not is_traced(token_mask) and bool(host_copy(token_mask).all()):
        token_mask = None
    if token_mask is None and _is_sdpa_causal(spec, layout, keys):
        return PaddedMask(spec, None, None, True)
    can_skip_mask = spec.is_full and keys.sequences is None and token_mask is None
    mask = ALL_MASK_ATTENTION_FUNCTIONS[layout.implementation](
        batch_size=layout.batch_size,
        q_length=layout.length,
        kv_length=keys.num_keys,
        mask_function=_mask_function(spec, layout, keys, like.device),
        attention_mask=token_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=can_skip_mask,
        dtype=dtype,
        device=like.device,
    )
    return _merge_sdpa_bias(PaddedMask(spec, mask, bias, False), layout, like)


def _padded_bias(
    spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout, like: Tensor
) -> Tensor | FlexPositionBias | None:
    """`PaddedMask.bias`."""
    if spec.bias is None:
        return None
    if layout.implementation == "flex_attention":
        return FlexPositionBias.build(spec.bias, *_positions(layout, keys, like.device))
    # shared by all examples if padding is only at their ends
    query_positions = layout.select_query_columns(_shared_positions(layout, like.device))
    bias = spec.bias(query_positions, _shared_positions(keys, like.device)).expand(layout.batch_size, -1, -1, -1)
    return bias.to(attention_dtype(like)) if like.device.type != "cpu" else bias


def _merge_sdpa_bias(mask: PaddedMask, layout: PaddedLayout, like: Tensor) -> PaddedMask:
    """Merge mask and bias into one tensor for sdpa, which would do so in each layer; on a GPU additive and aligned."""
    is_gpu = like.is_cuda
    if layout.implementation != "sdpa" or (mask.bias is None and not (is_gpu and isinstance(mask.mask, Tensor))):
        return mask
    if not is_gpu and autocast_dtype(like.device.type) is not None:
        return mask  # autocast would turn the smallest float32 value into -inf
    assert not isinstance(mask.bias, FlexPositionBias)
    dtype = attention_dtype(like)
    bias = like.new_zeros((), dtype=dtype) if mask.bias is None else mask.bias.to(dtype)
    if isinstance(mask.mask, Tensor):
        if mask.mask.dtype == torch.bool:
            bias = torch.where(mask.mask, bias, float("-inf") if mask.bias is None else torch.finfo(dtype).min)
        else:
            bias = bias + mask.mask.to(dtype)
    if is_gpu:
        num_keys = bias.shape[-1]
        bias = F.pad(bias.contiguous(), (0, round_up(num_keys) - num_keys))[..., :num_keys]
        return replace(mask, mask=bias, bias=None)
    return replace(mask, mask=bias.contiguous(), bias=None)


def _add_window(mask: Tensor | BlockMask, spec: MaskSpec, layout: PaddedLayout) -> Tensor | BlockMask:
    """A custom mask restricted to the window of the spec, with distances in columns."""
    if spec.window is None:
        return mask
    if isinstance(mask, BlockMask):
        raise CtxError(
            "A BlockMask is the same in all layers, but this model has layers with a window.",
            hint="pass attention_mask (batch, length), from which the mask of each layer is built.",
        )
    queries = torch.arange(layout.length, device=mask.device)[:, None] + layout.past_length
    keys = torch.arange(mask.shape[-1], device=mask.device)[None]
    outside = (queries - keys).abs() >= spec.window
    return mask & ~outside if mask.dtype == torch.bool else mask.masked_fill(outside, torch.finfo(mask.dtype).min)


def _is_sdpa_causal(spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout) -> bool:
    """Whether sdpa's causal mask, which aligns the first query and key, is valid without padding."""
    is_single_causal = spec.is_plain_causal and spec.bias is None and keys.sequences is None and layout is keys
    return layout.implementation == "sdpa" and is_single_causal and layout.length in (1, keys.num_keys)


def _mask_function(
    spec: MaskSpec, layout: PaddedLayout, keys: PaddedLayout, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask function of transformers and flex attention: (batch, head, query, key) indices -> bool."""
    query_positions, key_positions = _positions(layout, keys, device)
    prefixes = spec.prefix_lengths
    if prefixes is not None and keys.sequences is not None:  # (batch, keys), of the sequence of each column
        counts = keys.sequences[:, -1]
        prefixes = prefixes[(counts.cumsum(0) - counts)[:, None] + keys.sequences.clamp(min=1) - 1]
    elif prefixes is not None:
        prefixes = prefixes[:, None].expand(-1, keys.num_keys)

    def mask_function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = key == key
        if not spec.is_full:
            prefix = None if prefixes is None else prefixes[batch, key]
            ranges = None if spec.ranges is None else spec.ranges[batch, query]
            allowed = spec.allows(query_positions[batch, query], key_positions[batch, key], prefix, ranges)
        if layout.sequences is None or keys.sequences is None:
            return allowed
        return allowed & (layout.sequences[batch, query] == keys.sequences[batch, key])

    return mask_function


def _positions(layout: PaddedLayout, keys: PaddedLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """(batch, queries) and (batch, keys) positions."""
    query_positions = layout.select_query_columns(layout.key_positions(device))
    return query_positions.expand(layout.batch_size, -1), keys.key_positions(device).expand(layout.batch_size, -1)


def _shared_positions(layout: PaddedLayout, device: torch.device) -> Tensor:
    """`key_positions`, as a single row if it is valid for all tokens."""
    if layout.token_mask is None or layout.sequences is not None or is_traced(layout.token_mask):
        return layout.key_positions(device)
    positions, columns = layout.key_positions(device), torch.arange(layout.num_keys)[None]
    is_shared = bool(((host_copy(positions) == columns) | ~host_copy(layout.token_mask)).all())
    return to_device(columns, device) if is_shared else positions


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Sequences that are padded to the longest of them and attend in one call, since threads wait at the end of each.

    Attributes:
        sequence_indices: Indices of the sequences.
        num_queries, num_keys: Length of each sequence with padding, which follows its tokens.
        mask: Additive, broadcastable to (sequences, heads, queries, keys); None for no mask.
        is_causal: Whether the mask is the plain causal one, for equal numbers of queries and keys.
        window: Width of a causal band that is computed by `banded_attention`, without a mask; or None.
    """

    sequence_indices: tuple[int, ...]
    num_queries: int
    num_keys: int
    mask: Tensor | None
    is_causal: bool
    window: int | None = None


def _group_by_length(lengths: Sequence[tuple[int, int]], max_padding: float) -> list[tuple[int, ...]]:
    """The indices of each group, with the longest keys first, from the (queries, keys) lengths of all sequences.

    `max_padding` is the number of query-key pairs that a group may add; sequences without a query are in no group.
    """
    groups: list[list[int]] = []
    num_queries = num_keys = num_pairs = 0
    with_queries = [index for index, (queries, _) in enumerate(lengths) if queries]
    for index in sorted(with_queries, key=lambda index: lengths[index][::-1], reverse=True):
        queries, keys = lengths[index]
        num_queries, num_pairs = max(num_queries, queries), num_pairs + queries * keys
        if groups and (len(groups[-1]) + 1) * num_queries * num_keys - num_pairs <= max_padding:
            groups[-1].append(index)
        else:
            groups.append([index])
            num_queries, num_keys, num_pairs = queries, keys, queries * keys
    return [tuple(sorted(group)) for group in groups]


def mask_arguments(spec: MaskSpec, layout: TracedLayout, key_layout: TracedLayout | None) -> tuple:
    """Arguments `MASK_TENSORS` and `MASK_OPTIONS` of an operator."""
    key_lengths = None if key_layout is None else key_layout.lengths
    tensors = layout.lengths, layout.query, layout.query_lengths, key_lengths, spec.prefix_lengths, spec.ranges
    return *tensors, spec.causal, spec.window


def _concatenate_masks(bias_by_distance: Tensor, *mask_arguments: Any) -> Tensor:
    return prepare_mask_of_lengths(bias_by_distance, bias_by_distance, *mask_arguments).concatenated_masks()


def prepare_mask_of_lengths(
    like: Tensor,
    bias_by_distance: Tensor | None,
    lengths: Tensor,
    computed: Tensor | None,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    prefix_lengths: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    window: int | None,
) -> PackedMask:
    """The prepared mask of the `mask_arguments`, in the implementation of an operator, with the bias if it is given."""
    layout = _packed_layout(lengths, computed, query_lengths)
    key_layout = layout if key_lengths is None else _packed_layout(key_lengths)
    if all(tensor is None for tensor in (bias_by_distance, computed, prefix_lengths, ranges)):
        options = causal, window, like.dtype, like.device, torch.get_num_threads(), torch.is_inference_mode_enabled()
        return _cached_mask(layout.lengths, key_layout.lengths, *options)
    bias = None if bias_by_distance is None else partial(gather_position_bias, bias_by_distance)
    mask: Any = prepare_mask(MaskSpec(causal, prefix_lengths, window, bias, ranges), layout, like, key_layout)
    return mask


@lru_cache(maxsize=4)
def _cached_mask(
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    is_inference: bool,
) -> PackedMask:
    """The prepared mask, which all layers share; the groups depend on `num_threads`, and masks of inference mode
    (`is_inference`) cannot be used with gradients."""
    queries, keys = (
        PackedLayout(len(lengths), 0, None, lengths, torch.tensor(lengths)) for lengths in (query_lengths, key_lengths)
    )
    like = torch.empty(0, dtype=dtype, device=device)
    mask: Any = prepare_mask(MaskSpec(causal, window=window), queries, like, keys)
    return mask


def _packed_layout(
    lengths: Tensor, computed: Tensor | None = None, query_lengths: Tensor | None = None
) -> PackedLayout:
    """The layout for `attend`, which reads the lengths only."""
    counts = () if query_lengths is None else tuple(query_lengths.tolist())
    return PackedLayout(len(lengths), 0, None, tuple(lengths.tolist()), lengths, computed, counts)


_masks_with_bias = define_differentiable_operator(
    "masks_with_bias",
    f"Tensor bias_by_distance, {MASK_TENSORS}, {MASK_OPTIONS}",
    _concatenate_masks,
    lambda bias_by_distance, *inputs: bias_by_distance.new_empty(data_dependent_size()),
    num_differentiable=1,
)
