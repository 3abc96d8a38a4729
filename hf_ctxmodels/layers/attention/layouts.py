"""Where the tokens of a batch lie: padded rows, or packed without padding.

A model asks its layout and never looks at masks itself: it packs (batch, length, ...) tensors into the rows it computes
on, attends over them (`hf_ctxmodels.layers.attention.backends`), and unpacks the result. `PaddedLayout` computes on
every position; `PackedLayout` holds the real tokens of all sequences end to end, as in Krell et al. 2021 (arXiv
2107.02027) and Zeng et al. 2022 (ByteTransformer). Both count a token's position by the tokens before it in its
sequence, so that masks and biases which depend on positions do not depend on the layout.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, PreTrainedConfig

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import (
    check_row_lengths,
    is_traced,
    reject_unused_tensors,
    sequence_numbers,
    sequence_starts,
)

_READS_NO_KEYWORDS = ("eager", "sdpa")


@dataclass(frozen=True, eq=False)
class PaddedLayout:
    """Every position of the batch is computed.

    With a cache the keys are those of the cache, of which the last ones written are of this batch.

    Attributes:
        batch_size: Rows of the batch.
        length: Columns of the batch.
        tokens: (batch, keys) bool, False at padding; None when every position is a token.
        sequences: (batch, length) numbers of the sequences within each row, counted from 1; None when each row is one.
        custom_mask: What the caller made for the implementation in use, in place of all of the above; or None.
        implementation: Which attention function of transformers is used: "eager", "sdpa", "flex_attention", ...
        attention_kwargs: Keywords passed on to that function.
        past_length: Tokens that the cache held before this batch.
        cache_length: Keys that the cache returns; None without a cache.
        output_mask: (batch, length) bool, the positions whose outputs leave the encoder; None for all.
    """

    batch_size: int
    length: int
    tokens: Tensor | None = None
    sequences: Tensor | None = None
    custom_mask: Tensor | BlockMask | None = None
    implementation: str = "sdpa"
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    past_length: int | Tensor = 0
    cache_length: int | None = None
    output_mask: Tensor | None = None

    @property
    def num_keys(self) -> int:
        """Columns of the keys."""
        return self.length if self.cache_length is None else self.cache_length

    def key_positions(self, device: torch.device) -> Tensor:
        """(batch or 1, keys) number of tokens before each column in its sequence."""
        order = torch.arange(self.num_keys, device=device)[None]
        if self.tokens is not None:
            order = self.tokens.cumsum(1) - self.tokens.long()
        if self.sequences is not None:
            order = order - (order * sequence_starts(self.sequences)).cummax(1).values
        return order

    def select_query_columns(self, columns: Tensor) -> Tensor:
        """(..., keys) -> (..., length), the columns of this batch."""
        if self.cache_length is None:
            return columns
        own = torch.arange(self.length, device=columns.device) + self.past_length
        return columns.index_select(-1, own)

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> the same."""
        return tensor

    unpack = pack
    select_queries = pack

    def select(self, output_mask: Tensor, *, include_first_tokens: bool) -> "PaddedLayout":
        """The same layout with outputs at some positions; all are computed, these are picked."""
        return replace(self, output_mask=output_mask)

    def share_source(self, targets_per_source: int) -> "PaddedLayout":
        """The layout of queries that see all of a source: those of `targets_per_source` consecutive rows in one row."""
        if targets_per_source == 1:
            return self
        options: Any = {"implementation": self.implementation, "attention_kwargs": self.attention_kwargs}
        return PaddedLayout(self.batch_size // targets_per_source, self.length * targets_per_source, **options)

    def first_tokens(self, hidden_states: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, hidden) of each row's first token."""
        if self.tokens is None:
            return hidden_states[:, 0]
        columns = self.tokens.int().argmax(1)
        return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), columns]

    def select_outputs(self, hidden_states: Tensor) -> Tensor:
        """What leaves the encoder: (batch, length, hidden), or (targets, hidden)."""
        return hidden_states if self.output_mask is None else hidden_states[self.output_mask]

    def padding_mask(self) -> Tensor | None:
        """(batch, length, 1) bool, True at padding; None where there is none. Before a cache is extended."""
        return None if self.tokens is None else ~self.select_query_columns(self.tokens)[..., None]


@dataclass(frozen=True)
class PackedLayout:
    """The real tokens of a batch, end to end, in row-major order.

    Attributes:
        batch_size: Rows of the padded batch.
        length: Columns of the padded batch.
        indices: (tokens,) positions of the tokens in the flattened (batch * length) batch; None when there is no
            padding, so that packing is a view.
        lengths: Tokens of each sequence; a row may hold several sequences (`sequence_ids`).
        first_rows: (batch,) packed index of each row's first token.
        query: (rows,) packed indices whose outputs are computed in the last layer, ascending; None for all of them.
        query_lengths: How many of them each sequence has.
        output_mask: (rows,) bool, which of `query` leave the encoder.
    """

    batch_size: int
    length: int
    indices: Tensor | None
    lengths: tuple[int, ...]
    first_rows: Tensor
    query: Tensor | None = None
    query_lengths: tuple[int, ...] = ()
    output_mask: Tensor | None = None

    @classmethod
    def build(
        cls,
        batch_size: int,
        length: int,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
        device: torch.device,
    ) -> "PackedLayout":
        """Lay out a (batch, length) batch.

        Args:
            batch_size, length: Its shape.
            attention_mask: (batch, length), non-zero at tokens; None when every position is a token.
            sequence_ids: (batch, length), 0 at padding, one value per contiguous sequence of a row; None when each row
                is one sequence.
            device: Where the batch lies.

        Raises:
            CtxError: A row without any token.
        """
        tokens = _tokens(attention_mask, sequence_ids)
        if tokens is None or bool(tokens.all()):
            indices = None
            row_lengths = torch.full((batch_size,), length)
        else:
            indices = tokens.flatten().nonzero().squeeze(1)
            row_lengths = tokens.sum(1).cpu()
            check_row_lengths(row_lengths)
        first_rows = (row_lengths.cumsum(0) - row_lengths).to(device)
        layout = cls(batch_size, length, indices, tuple(row_lengths.tolist()), first_rows)
        if sequence_ids is None:
            return layout
        return replace(layout, lengths=_run_lengths(layout.pack(sequence_numbers(sequence_ids)), first_rows))

    @property
    def num_tokens(self) -> int:
        """Tokens the encoder computes on."""
        return sum(self.lengths)

    @cached_property
    def query_counts(self) -> tuple[int, ...]:
        """Computed rows of each sequence."""
        return self.lengths if self.query is None else self.query_lengths

    @cached_property
    def positions(self) -> Tensor:
        """(tokens,) number of tokens before each in its sequence, on the CPU."""
        lengths = torch.tensor(self.lengths)
        return torch.arange(self.num_tokens) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)

    @cached_property
    def query_positions(self) -> Tensor:
        """(rows,) those of the computed rows."""
        return self.positions if self.query is None else self.positions[self.query.cpu()]

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> (tokens, ...)."""
        flat = tensor.flatten(0, 1)
        return flat if self.indices is None else flat[self.indices]

    def unpack(self, packed: Tensor) -> Tensor:
        """(tokens, ...) -> (batch, length, ...), zeros at padding."""
        if self.indices is not None:
            flat = packed.new_zeros(self.batch_size * self.length, *packed.shape[1:])
            packed = flat.index_copy(0, self.indices, packed)
        return packed.unflatten(0, (self.batch_size, self.length))

    def select(self, output_mask: Tensor, *, include_first_tokens: bool) -> "PackedLayout":
        """The same layout for a last layer that is computed at some positions only.

        Args:
            output_mask: (batch, length) bool, False at padding.
            include_first_tokens: Compute each row's first token as well, for a pooler.
        """
        rows = self.pack(output_mask)
        computed = rows.index_fill(0, self.first_rows, True) if include_first_tokens else rows
        query = computed.nonzero().squeeze(1)
        if len(query) == len(rows):  # nothing to leave out: one product gives queries, keys and values as elsewhere
            return replace(self, output_mask=rows)
        ends = torch.tensor(self.lengths).cumsum(0)
        counts = torch.searchsorted(query.cpu(), ends).diff(prepend=ends.new_zeros(1))
        return replace(self, query=query, query_lengths=tuple(counts.tolist()), output_mask=rows[query])

    def first_tokens(self, packed: Tensor) -> Tensor:
        """(rows, hidden) -> (batch, hidden) of each row's first token."""
        rows = self.first_rows if self.query is None else torch.searchsorted(self.query, self.first_rows)
        return packed[rows]

    def select_outputs(self, packed: Tensor) -> Tensor:
        """What leaves the encoder: (batch, length, hidden) with zeros at padding, or (targets, hidden)."""
        return self.unpack(packed) if self.output_mask is None else packed[self.output_mask]

    def share_source(self, targets_per_source: int) -> "PackedLayout":
        """Itself: only with a cache, for which batches are padded, do rows share a source."""
        return self

    def select_queries(self, packed: Tensor) -> Tensor:
        """(tokens, ...) -> the computed rows."""
        return packed if self.query is None else packed[self.query]

    def padding_mask(self) -> None:
        """None: no padding is computed."""


Layout = PaddedLayout | PackedLayout


def build_layout(
    given: Tensor,
    attention_mask: Tensor | BlockMask | None,
    sequence_ids: Tensor | None,
    config: PreTrainedConfig,
    *,
    past_key_values: Cache | None = None,
    **attention_kwargs: Any,
) -> Layout:
    """Choose how a model lays out its tokens: packed where that is exact, padded otherwise.

    Padded are: `config.unpad=False`, implementations other than sdpa, masks that are not (batch, keys), asked-for
    attention weights, caches, and graphs being traced, where packed lengths would be data-dependent shapes. Attention
    weights, which sdpa cannot give, are those of eager attention.

    Args:
        given: (batch, length) ids or (batch, length, hidden) embeddings.
        attention_mask: (batch, length), with a cache (batch, past + length); or a ready mask of the implementation in
            use.
        sequence_ids: (batch, length), 0 at padding, or None.
        config: The calling model's: how it attends.
        past_key_values: The cache that this forward reads and extends, or None.
        attention_kwargs: `output_attentions`, and what is passed on to the attention function.

    Raises:
        CtxError: A row without any token, arguments that do not go together, or a tensor among the keywords that the
            attention function does not read.
    """
    batch_size, length = given.shape[:2]
    padding = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
    ready = None if padding is not None else attention_mask
    implementation = config._attn_implementation
    if implementation == "sdpa" and attention_kwargs.get("output_attentions"):
        implementation = "eager"
    if implementation in _READS_NO_KEYWORDS:
        reject_unused_tensors(**attention_kwargs)
    exact = ready is None and implementation == "sdpa"
    if config.unpad and exact and past_key_values is None and not is_traced(given):
        return PackedLayout.build(batch_size, length, padding, sequence_ids, given.device)
    if sequence_ids is not None and (ready is not None or past_key_values is not None):
        raise CtxError(
            "sequence_ids cannot go with past_key_values or a ready attention_mask: a cache belongs to one sequence, "
            "and a ready mask says already who sees whom.",
            hint="give one sequence in each row, or mask the sequences from each other yourself.",
        )
    layout = _padded((batch_size, length), padding, sequence_ids, implementation, attention_kwargs)
    layout = replace(layout, custom_mask=ready)
    return layout if past_key_values is None else _with_cache(layout, past_key_values, given.device)


def build_memory_layout(
    layout: Layout, memory: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None = None
) -> Layout:
    """Lay out what another layout's rows attend to (an encoder's output) as that one is laid out.

    Args:
        layout: That of the rows that attend.
        memory: (batch, length, ...).
        attention_mask: (batch, length), 0 where it is not seen: at padding, for example.
        sequence_ids: (batch, length), as in `build_layout`: each sequence is attended to by one of `layout`.

    Raises:
        CtxError: A row of which nothing is seen.
    """
    shape = (memory.shape[0], memory.shape[1])
    if isinstance(layout, PackedLayout):
        return PackedLayout.build(*shape, attention_mask, sequence_ids, memory.device)
    return _padded(shape, attention_mask, sequence_ids, layout.implementation, layout.attention_kwargs)


def _padded(
    shape: tuple[int, int],
    padding: Tensor | None,
    sequence_ids: Tensor | None,
    implementation: str,
    attention_kwargs: dict[str, Any],
) -> PaddedLayout:
    """The layout of a (batch, length) batch without a cache; raises CtxError for a row without any token."""
    tokens = _tokens(padding, sequence_ids)
    if tokens is not None and not is_traced(tokens):
        check_row_lengths(tokens.sum(1))
    return PaddedLayout(
        *shape,
        tokens,
        sequences=None if sequence_ids is None else _token_runs(sequence_ids),
        implementation=implementation,
        attention_kwargs=attention_kwargs,
    )


def _with_cache(layout: PaddedLayout, cache: Cache, device: torch.device) -> PaddedLayout:
    """The layout of a batch that extends a cache.

    Raises:
        CtxError: An attention mask that is not as wide as what the cache will hold.
    """
    num_keys, past = cache.get_mask_sizes(layout.length, 0)[0], cache.get_seq_length()
    layout = replace(layout, past_length=past, cache_length=num_keys)
    tokens, written = layout.tokens, past + layout.length
    if tokens is not None:
        if not is_traced(tokens) and tokens.shape[1] != int(written):
            raise CtxError(
                f"attention_mask is {tuple(tokens.shape)}, but past_key_values holds {int(past)} tokens and the input "
                f"{layout.length}; it must be ({layout.batch_size}, {int(written)})."
            )
        tokens = F.pad(tokens, (0, num_keys - tokens.shape[1]))
    elif not isinstance(written, int) or written < num_keys:  # a cache of fixed length: the rest holds nothing yet
        tokens = (torch.arange(num_keys, device=device) < written).expand(layout.batch_size, -1)
    return replace(layout, tokens=tokens)


def _tokens(attention_mask: Tensor | None, sequence_ids: Tensor | None) -> Tensor | None:
    """(batch, keys) bool, False at padding; None when neither is given."""
    tokens = None if sequence_ids is None else sequence_ids != 0
    if attention_mask is None:
        return tokens
    return attention_mask != 0 if tokens is None else tokens & (attention_mask != 0)


def _token_runs(sequence_ids: Tensor) -> Tensor:
    """(batch, length) ids -> the runs of tokens numbered from 1 within each row; padding goes with the run before."""
    return (sequence_starts(sequence_ids) & (sequence_ids != 0)).cumsum(1)


def _run_lengths(numbers: Tensor, row_starts: Tensor) -> tuple[int, ...]:
    """Lengths of the runs of equal numbers; a run also ends where a row of the batch starts."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[1:] = numbers[1:] != numbers[:-1]
    starts[row_starts] = True
    bounds = starts.nonzero().squeeze(1).cpu()
    return tuple(bounds.diff(append=bounds.new_tensor([numbers.numel()])).tolist())
