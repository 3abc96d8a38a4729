"""Layouts: padded batches, or the tokens of all sequences packed without padding.

A model converts (batch, length, ...) tensors with its layout (`pack`), attends over the result
(`hf_ctxmodels.layers.attention.backends`), and converts the result back (`unpack`), without reading masks itself.
`PaddedLayout` computes all positions; `PackedLayout` concatenates the tokens of all sequences, as in Krell et al. 2021
(arXiv 2107.02027) and Zeng et al. 2022 (ByteTransformer). In both, the position of a token is the number of tokens
before it in its sequence, so that masks and biases by position do not depend on the layout.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, PreTrainedConfig

from hf_ctxmodels.core.compiled_ops import data_dependent_size, define_operator, is_compiled
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, needs_static_sizes, on_host, select_true, to_device
from hf_ctxmodels.core.inputs import (
    check_no_empty_rows,
    nonzero_in_all,
    padding_mask_or_none,
    reject_unused_tensors,
    sequence_numbers,
    sequence_starts,
)


@dataclass(frozen=True, eq=False)
class PaddedLayout:
    """Layout that computes all positions of a (batch, length) batch.

    With a cache, the keys are the cached keys, which end with the keys of this batch.

    Attributes:
        token_mask: (batch, keys) bool, False at padding; None without padding.
        sequences: (batch, length) number of each token's sequence within its row, from 1; None for one sequence per
            row.
        custom_mask: A mask in the format of the attention implementation, which replaces `token_mask` and `sequences`.
        past_length: Number of tokens in the cache before this batch.
        cache_length: Number of keys that the cache returns; None without a cache.
        output_mask: (batch, length) bool, the positions whose outputs are returned; None for all.
    """

    batch_size: int
    length: int
    token_mask: Tensor | None = None
    sequences: Tensor | None = None
    custom_mask: Tensor | BlockMask | None = None
    implementation: str = "sdpa"
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    past_length: int | Tensor = 0
    cache_length: int | None = None
    output_mask: Tensor | None = None

    @property
    def num_keys(self) -> int:
        """Length of the keys."""
        return self.length if self.cache_length is None else self.cache_length

    @property
    def is_flash(self) -> bool:
        """Whether the implementation is a flash attention kernel of transformers."""
        return "flash" in self.implementation

    def key_positions(self, device: torch.device) -> Tensor:
        """(batch or 1, keys) number of tokens before each column in its sequence."""
        if self.token_mask is None:
            positions = to_device(torch.arange(self.num_keys)[None], device)
        else:
            positions = on_host(lambda mask: mask.cumsum(1) - mask.long(), self.token_mask)
        if self.sequences is None:
            return positions
        return on_host(
            lambda columns, sequences: columns - (columns * sequence_starts(sequences)).cummax(1).values,
            positions,
            self.sequences,
        )

    def select_query_columns(self, columns: Tensor) -> Tensor:
        """(..., keys) -> (..., length), the columns of this batch."""
        if self.cache_length is None:
            return columns
        queries = torch.arange(self.length, device=columns.device) + self.past_length
        return columns.index_select(-1, queries)

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the (batch, length, ...) tensor unchanged."""
        return tensor

    unpack = pack
    select_queries = pack

    def select(self, output_mask: Tensor, *, include_first_tokens: bool) -> "PaddedLayout":
        """The same layout with outputs at some positions; all positions are computed."""
        return replace(self, output_mask=output_mask)

    def share_source(self, targets_per_source: int) -> "PaddedLayout":
        """The layout of queries without a mask that combines `targets_per_source` consecutive rows into one."""
        if targets_per_source == 1:
            return self
        return PaddedLayout(
            self.batch_size // targets_per_source,
            self.length * targets_per_source,
            implementation=self.implementation,
            attention_kwargs=self.attention_kwargs,
        )

    def first_tokens(self, hidden_states: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, hidden) at each row's first token."""
        if self.token_mask is None:
            return hidden_states[:, 0]
        columns = self.token_mask.int().argmax(1)
        return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), columns]

    def select_outputs(self, hidden_states: Tensor) -> Tensor:
        """(batch, length, hidden) -> the same, or (targets, hidden) with an output mask."""
        return hidden_states if self.output_mask is None else select_true(hidden_states, self.output_mask)

    def padding_mask(self) -> Tensor | None:
        """(batch, length, 1) bool, True at padding; None without padding. Call it before the cache is extended."""
        return None if self.token_mask is None else ~self.select_query_columns(self.token_mask)[..., None]


@dataclass(frozen=True)
class PackedLayout:
    """The tokens of a batch without padding, concatenated in row-major order.

    Attributes:
        batch_size, length: Shape of the padded batch.
        indices: (tokens,) positions of the tokens in the flattened (batch * length) batch; None without padding, so
            that packing is a view.
        lengths: Number of tokens of each sequence; a row may hold several sequences (`sequence_ids`).
        first_indices: (batch,) packed index of each row's first token.
        query: (queries,) ascending packed indices of the tokens that the last layer computes; None for all.
        query_lengths: Number of computed tokens of each sequence; empty if `query` is None.
        output_indices: (outputs,) indices of the computed tokens whose outputs are returned; None for all.

    All tensors have host copies.
    """

    batch_size: int
    length: int
    indices: Tensor | None
    lengths: tuple[int, ...]
    first_indices: Tensor
    query: Tensor | None = None
    query_lengths: tuple[int, ...] = ()
    output_indices: Tensor | None = None

    @classmethod
    def build(
        cls,
        batch_size: int,
        length: int,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
        device: torch.device,
    ) -> "PackedLayout":
        """The layout of a batch; arguments as in `build_layout`. Raises CtxError if a row has no tokens."""
        token_mask = nonzero_in_all(attention_mask, sequence_ids)
        if token_mask is not None and bool((token_mask := host_copy(token_mask)).all()):
            token_mask = None
        if token_mask is None and sequence_ids is None:
            first_indices = to_device(torch.arange(batch_size) * length, device)
            return cls(batch_size, length, None, (length,) * batch_size, first_indices)
        indices, row_lengths = None, torch.full((batch_size,), length)
        if token_mask is not None:
            check_no_empty_rows(token_mask)
            indices, row_lengths = token_mask.flatten().nonzero().squeeze(1), token_mask.sum(1)
        first_indices = row_lengths.cumsum(0) - row_lengths
        lengths = row_lengths
        if sequence_ids is not None:
            numbers = sequence_numbers(host_copy(sequence_ids)).flatten()
            numbers = numbers if indices is None else numbers[indices]
            is_start = torch.ones_like(numbers, dtype=torch.bool)
            is_start[1:] = numbers[1:] != numbers[:-1]
            is_start[first_indices] = True
            starts = is_start.nonzero().squeeze(1)
            lengths = starts.diff(append=starts.new_tensor([numbers.numel()]))
        indices = None if indices is None else to_device(indices, device)
        return cls(batch_size, length, indices, tuple(lengths.tolist()), to_device(first_indices, device))

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)

    @cached_property
    def query_counts(self) -> tuple[int, ...]:
        """Number of computed tokens of each sequence."""
        return self.lengths if self.query is None else self.query_lengths

    @cached_property
    def positions(self) -> Tensor:
        """(tokens,) number of tokens before each token in its sequence, on the CPU."""
        return self._count_positions()

    def _count_positions(self) -> Tensor:
        lengths = torch.as_tensor(self.lengths)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=self.num_tokens)
        return torch.arange(self.num_tokens) - starts

    @cached_property
    def query_positions(self) -> Tensor:
        """(queries,) positions of the computed tokens, on the CPU."""
        return self.positions if self.query is None else self.positions[host_copy(self.query)]

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> (tokens, ...), on the device of the layout or on the CPU."""
        flat = tensor.flatten(0, 1)
        if self.indices is None:
            return flat
        return flat[self.indices if tensor.device == self.indices.device else host_copy(self.indices)]

    def unpack(self, packed: Tensor) -> Tensor:
        """(tokens, ...) -> (batch, length, ...), zeros at padding."""
        if self.indices is not None:
            flat = packed.new_zeros(self.batch_size * self.length, *packed.shape[1:])
            packed = flat.index_copy_(0, self.indices, packed)
        return packed.unflatten(0, (self.batch_size, self.length))

    def select(self, output_mask: Tensor, *, include_first_tokens: bool) -> "PackedLayout":
        """The same layout for a last layer that computes only the tokens of `output_mask` (batch, length), and with
        `include_first_tokens` each row's first token, for a pooler."""
        is_output = host_copy(output_mask).flatten()
        is_output = is_output if self.indices is None else is_output[host_copy(self.indices)]
        is_computed = is_output
        if include_first_tokens:
            is_computed = is_output.index_fill(0, host_copy(self.first_indices), True)
        query, device = is_computed.nonzero().squeeze(1), self.first_indices.device
        outputs = to_device(is_output[query].nonzero().squeeze(1), device)
        if len(query) == len(is_output):  # all tokens: one product for queries, keys and values, as in other layers
            return replace(self, output_indices=outputs)
        ends = torch.tensor(self.lengths).cumsum(0)
        counts = torch.searchsorted(query, ends).diff(prepend=ends.new_zeros(1))
        query_lengths = tuple(counts.tolist())
        return replace(self, query=to_device(query, device), query_lengths=query_lengths, output_indices=outputs)

    def first_tokens(self, packed: Tensor) -> Tensor:
        """(queries, hidden) -> (batch, hidden) at each row's first token."""
        if self.query is None:
            return packed[self.first_indices]
        return packed[torch.searchsorted(self.query, self.first_indices)]

    def select_outputs(self, packed: Tensor) -> Tensor:
        """(queries, hidden) -> (batch, length, hidden), or (targets, hidden) with an output mask."""
        return self.unpack(packed) if self.output_indices is None else packed[self.output_indices]

    def share_source(self, targets_per_source: int) -> "PackedLayout":
        """Return the layout unchanged: rows share a source only with a cache, in a padded layout."""
        return self

    def select_queries(self, packed: Tensor) -> Tensor:
        """(tokens, ...) -> (queries, ...), the computed tokens."""
        return packed if self.query is None else packed[self.query]

    def padding_mask(self) -> None:
        """None: padding is not computed."""


@dataclass(frozen=True, eq=False)
class TracedLayout(PackedLayout):
    """A packed layout in a compiled graph: the lengths are (sequences,) int64 tensors on the CPU."""

    lengths: Tensor  # type: ignore[assignment]
    query_lengths: Tensor | None = None  # type: ignore[assignment]

    @classmethod
    def build(
        cls,
        batch_size: int,
        length: int,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
        device: torch.device,
    ) -> "TracedLayout":
        """As in `PackedLayout`; the error for a row without tokens is raised when the graph runs."""
        token_mask = nonzero_in_all(attention_mask, sequence_ids)
        if token_mask is not None:
            return cls(batch_size, length, *_build_layout_operator(token_mask, sequence_ids))
        first_indices = torch.arange(batch_size, device=device) * length
        return cls(batch_size, length, None, torch.full((batch_size,), length), first_indices)

    @property
    def positions(self) -> Tensor:
        """As in `PackedLayout`; graphs do not support `cached_property`."""
        return self._count_positions()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, a symbolic size."""
        return self.batch_size * self.length if self.indices is None else self.indices.shape[0]

    def select(self, output_mask: Tensor, *, include_first_tokens: bool) -> "TracedLayout":
        """As in `PackedLayout`."""
        query, query_lengths, output_indices = _select_operator(
            output_mask, self.indices, self.lengths, self.first_indices, include_first_tokens
        )
        return replace(self, query=query, query_lengths=query_lengths, output_indices=output_indices)


def _build_layout(token_mask: Tensor, sequence_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    layout = PackedLayout.build(token_mask.shape[0], token_mask.shape[1], token_mask, sequence_ids, token_mask.device)
    indices = torch.arange(token_mask.numel(), device=token_mask.device) if layout.indices is None else layout.indices
    return indices, torch.tensor(layout.lengths), layout.first_indices


def _build_layout_fake(token_mask: Tensor, sequence_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    indices = token_mask.new_empty(data_dependent_size(), dtype=torch.int64)
    num_sequences = token_mask.shape[0] if sequence_ids is None else data_dependent_size()
    lengths = torch.empty(num_sequences, dtype=torch.int64, device="cpu")
    return indices, lengths, token_mask.new_empty(token_mask.shape[0], dtype=torch.int64)


_build_layout_operator = define_operator(
    "build_layout(Tensor token_mask, Tensor? sequence_ids) -> (Tensor indices, Tensor lengths, Tensor first_indices)",
    _build_layout,
    _build_layout_fake,
)


def _select_tokens(
    output_mask: Tensor, indices: Tensor | None, lengths: Tensor, first_indices: Tensor, include_first_tokens: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch_size, length = output_mask.shape
    layout = PackedLayout(batch_size, length, indices, tuple(lengths.tolist()), first_indices)
    layout = layout.select(output_mask, include_first_tokens=include_first_tokens)
    query, output_indices = layout.query, layout.output_indices
    if query is None:  # all tokens
        query = torch.arange(layout.num_tokens, device=output_mask.device)
    assert output_indices is not None
    return query, torch.tensor(layout.query_counts), output_indices


def _select_tokens_fake(
    output_mask: Tensor, indices: Tensor | None, lengths: Tensor, first_indices: Tensor, include_first_tokens: bool
) -> tuple[Tensor, Tensor, Tensor]:
    query, output_indices = (output_mask.new_empty(data_dependent_size(), dtype=torch.int64) for _ in range(2))
    return query, lengths.new_empty(lengths.shape), output_indices


_select_operator = define_operator(
    "select_tokens(Tensor output_mask, Tensor? indices, Tensor lengths, Tensor first_indices, "
    "bool include_first_tokens) -> (Tensor query, Tensor query_lengths, Tensor output_indices)",
    _select_tokens,
    _select_tokens_fake,
)


Layout = PaddedLayout | PackedLayout


def sequence_positions(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The position of each packed token in its sequence, the number of its sequence, and an upper limit of these
    numbers; of a layout without a cache. The numbers ascend in row-major order, in a padded layout with gaps."""
    if isinstance(layout, PackedLayout):
        lengths = torch.as_tensor(layout.lengths)
        sequences = torch.arange(len(lengths))
        sequence_numbers = torch.repeat_interleave(sequences, lengths, output_size=layout.num_tokens)
        return layout.positions, sequence_numbers, len(lengths)
    shape = (layout.batch_size, layout.length)
    positions = host_copy(layout.key_positions(device)).expand(shape)
    examples = torch.arange(layout.batch_size, device=positions.device)[:, None]
    if layout.sequences is None:
        return positions, examples.expand(shape), layout.batch_size
    numbers_per_example = layout.length + 1
    return (
        positions,
        examples * numbers_per_example + host_copy(layout.sequences),
        layout.batch_size * numbers_per_example,
    )


def prefix_lengths(layout: Layout, prefix_mask: Tensor) -> Tensor:
    """(sequences,) number of tokens at the start of each sequence, in row-major order, that are marked in a (batch,
    length) mask; raises CtxError if a marked token follows one that is not."""
    is_prefix = layout.pack(host_copy(prefix_mask)) != 0
    if isinstance(layout, PaddedLayout) and layout.token_mask is not None:
        is_prefix = is_prefix & host_copy(layout.token_mask)
    positions, numbers, num_sequences = sequence_positions(layout, prefix_mask.device)
    lengths = torch.zeros(num_sequences, dtype=torch.long, device=is_prefix.device)
    lengths = lengths.index_add(0, numbers.flatten(), is_prefix.flatten().long())
    if not is_traced(is_prefix) and bool((is_prefix & (positions >= lengths[numbers])).any()):
        raise CtxError(
            "prefix_mask: a token of the prefix follows a token that is not.",
            hint="mark the first tokens of each sequence, or none.",
        )
    if isinstance(layout, PaddedLayout) and layout.sequences is not None:  # without the gaps
        counts = host_copy(layout.sequences)[:, -1:]
        lengths = lengths.view(layout.batch_size, -1)[:, 1:][torch.arange(layout.length) < counts]
    return to_device(lengths, prefix_mask.device)


def build_layout(
    inputs: Tensor,
    attention_mask: Tensor | BlockMask | None,
    sequence_ids: Tensor | None,
    config: PreTrainedConfig,
    *,
    past_key_values: Cache | None = None,
    **attention_kwargs: Any,
) -> Layout:
    """Choose the layout of a batch: packed if the results are equal, otherwise padded.

    Padded layouts serve `config.unpad=False`, implementations other than sdpa, custom masks, caches, exported graphs,
    and `output_attentions`, with which sdpa is replaced by eager attention.

    Args:
        inputs: (batch, length) ids or (batch, length, hidden) embeddings.
        attention_mask: (batch, length), with a cache (batch, past + length); or a custom mask in the format of the
            attention implementation.
        sequence_ids: (batch, length), 0 at padding, one value per contiguous sequence of a row; None for one sequence
            per row.
        past_key_values: The cache that this forward pass extends.
        attention_kwargs: `output_attentions`, and keyword arguments of the attention function.

    Raises:
        CtxError: A row without tokens, incompatible arguments, or a tensor among the keyword arguments that the
            attention function does not use.
    """
    if attention_kwargs.get("is_causal") is not None:
        raise CtxError(
            "is_causal is not an argument: the model determines the direction of attention.",
            hint="set is_decoder in the configuration, or pass a 4-D attention_mask.",
        )
    batch_size, length = inputs.shape[:2]
    padding_mask = padding_mask_or_none(attention_mask)
    custom_mask = None if padding_mask is not None else attention_mask
    implementation = config._attn_implementation
    if implementation == "sdpa" and attention_kwargs.get("output_attentions"):
        implementation = "eager"
    if implementation in ("eager", "sdpa"):  # without keyword arguments
        reject_unused_tensors(**attention_kwargs)
    is_packable = custom_mask is None and implementation == "sdpa" and past_key_values is None
    if config.unpad and is_packable and not needs_static_sizes(inputs):
        layout_class = TracedLayout if is_compiled() else PackedLayout
        return layout_class.build(batch_size, length, padding_mask, sequence_ids, inputs.device)
    if sequence_ids is not None and (custom_mask is not None or past_key_values is not None):
        raise CtxError(
            "sequence_ids cannot be combined with past_key_values or a custom attention_mask.",
            hint="use one sequence per row, or mask the other sequences in the custom mask.",
        )
    layout = _build_padded((batch_size, length), padding_mask, sequence_ids, implementation, attention_kwargs)
    layout = replace(layout, custom_mask=custom_mask)
    return layout if past_key_values is None else _extend_by_cache(layout, past_key_values, inputs.device)


def pack_tokens(layout: Layout, tokens: Tensor, word_embeddings: nn.Module) -> Tensor:
    """`Layout.pack` of (batch, length) ids or (batch, length, hidden) embeddings.

    Ids are embedded afterwards, except for Trainer's `neftune_noise_alpha`, whose noise depends on the padded length.
    """
    has_noise = word_embeddings.training and hasattr(word_embeddings, "neftune_noise_alpha")
    return layout.pack(word_embeddings(tokens) if has_noise and not tokens.is_floating_point() else tokens)


def build_memory_layout(
    layout: Layout, memory: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None = None
) -> Layout:
    """The layout of the keys of cross-attention, an encoder's output (batch, length, ...), of the same type as the
    queries' layout. Arguments and errors as in `build_layout`; each sequence of `layout` attends to one of the memory.
    """
    shape = (memory.shape[0], memory.shape[1])
    if isinstance(layout, PackedLayout):
        return type(layout).build(*shape, attention_mask, sequence_ids, memory.device)
    return _build_padded(shape, attention_mask, sequence_ids, layout.implementation, layout.attention_kwargs)


def _build_padded(
    shape: tuple[int, int],
    padding_mask: Tensor | None,
    sequence_ids: Tensor | None,
    implementation: str,
    attention_kwargs: dict[str, Any],
) -> PaddedLayout:
    """The layout of a (batch, length) batch without a cache; raises CtxError for a row without tokens."""
    token_mask = nonzero_in_all(padding_mask, sequence_ids)
    if token_mask is not None and not is_traced(token_mask):
        check_no_empty_rows(token_mask)
    sequences = None
    if sequence_ids is not None:  # padding gets the number of the preceding token
        sequences = on_host(lambda ids: (sequence_starts(ids) & (ids != 0)).cumsum(1), sequence_ids)
    return PaddedLayout(*shape, token_mask, sequences, implementation=implementation, attention_kwargs=attention_kwargs)


def _extend_by_cache(layout: PaddedLayout, cache: Cache, device: torch.device) -> PaddedLayout:
    """The layout of a batch that extends a cache."""
    num_keys, past_length = cache.get_mask_sizes(layout.length, 0)[0], cache.get_seq_length()
    if isinstance(past_length, Tensor):  # a static cache increases this tensor when the first layer adds its keys
        past_length = past_length.clone()
    layout = replace(layout, past_length=past_length, cache_length=num_keys)
    token_mask, total_length = layout.token_mask, past_length + layout.length
    if token_mask is not None:
        if not is_traced(token_mask) and token_mask.shape[1] != int(total_length):
            raise CtxError(
                f"attention_mask is {tuple(token_mask.shape)}, expected ({layout.batch_size}, {int(total_length)}): "
                f"past_key_values has {int(past_length)} tokens, and the input {layout.length}."
            )
        num_free = num_keys - token_mask.shape[1]
        token_mask = on_host(lambda mask: F.pad(mask, (0, num_free)), token_mask) if num_free else token_mask
    elif not isinstance(total_length, int) or total_length < num_keys:  # a static cache with free columns at its end
        token_mask = (torch.arange(num_keys, device=device) < total_length).expand(layout.batch_size, -1)
    return replace(layout, token_mask=token_mask)
