"""Where the tokens of a batch lie, and attention over them: padded rows, or packed without padding.

An encoder asks its layout and never looks at masks itself: `pack` (batch, length, ...) tensors into the
rows it computes on, `attend` within sequences, and `unpack` the result. `PaddedLayout` computes on every position and
calls the transformers attention interface; `PackedLayout` holds the real tokens of all sequences end to end and
attends per sequence, as in Krell et al. 2021 (arXiv 2107.02027) and Zeng et al. 2022 (ByteTransformer).
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.dropped_attention import dropped_attention
from hf_ctxmodels.layers.attention.modules import SelfAttention, eager_attention_forward


@dataclass(frozen=True)
class PaddedLayout:
    """Every position of the batch is computed; attention follows `mask` through the attention interface.

    Attributes:
        mask: What `transformers.masking_utils` made for the implementation in use, or None.
        attention_kwargs: Keywords passed on to the attention function.
        first_columns: (batch,) column of each row's first token; None when it is column 0 everywhere.
        wanted: (batch, length) bool, the positions whose outputs are wanted; None for all.
    """

    mask: Tensor | None
    attention_kwargs: dict
    first_columns: Tensor | None = None
    output_mask: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> the same."""
        return tensor

    query_rows = pack

    def recorded(self, states: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Recorded hidden states, as they are."""
        return states

    def select(self, output_mask: Tensor, *, and_first: bool) -> "PaddedLayout":
        """The same layout with outputs wanted at some positions; all are computed, these are picked."""
        return replace(self, output_mask=output_mask)

    def first(self, hidden_states: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, hidden) of each row's first token."""
        if self.first_columns is None:
            return hidden_states[:, 0]
        return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), self.first_columns]

    def output(self, hidden_states: Tensor) -> Tensor:
        """What leaves the encoder: (batch, length, hidden), or (wanted, hidden)."""
        return hidden_states if self.output_mask is None else hidden_states[self.output_mask]

    def attend(self, module: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attention of (batch, length, heads, head_dim) tensors.

        Returns:
            The context in the shape of `query`, and the (batch, heads, length, length) probabilities where the
            implementation gives them (eager).
        """
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention_forward)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        rate = module.attention_dropout if module.training else 0.0
        return attention(
            module, query, key, value, self.mask, dropout=rate, scaling=module.scaling, **self.attention_kwargs
        )


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
        wanted: (rows,) bool, which of `query` leave the encoder.
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
        tokens = None
        if sequence_ids is not None:
            tokens = sequence_ids != 0
        if attention_mask is not None:
            tokens = attention_mask != 0 if tokens is None else tokens & (attention_mask != 0)
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
        return replace(layout, lengths=_run_lengths(layout.pack(sequence_ids), first_rows))

    @property
    def num_tokens(self) -> int:
        """Tokens the encoder computes on."""
        return sum(self.lengths)

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

    def recorded(self, states: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Recorded hidden states, each but the last (the encoder's output) unpacked."""
        return (*(None if state is None else self.unpack(state) for state in states[:-1]), states[-1])

    def select(self, output_mask: Tensor, *, and_first: bool) -> "PackedLayout":
        """The same layout for a last layer whose outputs are wanted at some positions only.

        Args:
            wanted: (batch, length) bool, False at padding.
            and_first: Compute each row's first token as well, for a pooler.
        """
        rows = self.pack(output_mask)
        computed = rows.index_fill(0, self.first_rows, True) if and_first else rows
        query = computed.nonzero().squeeze(1)
        if len(query) == len(rows):  # nothing to leave out: one product gives queries, keys and values as elsewhere
            return replace(self, output_mask=rows)
        ends = torch.tensor(self.lengths).cumsum(0)
        counts = torch.searchsorted(query.cpu(), ends).diff(prepend=ends.new_zeros(1))
        return replace(self, query=query, query_lengths=tuple(counts.tolist()), output_mask=rows[query])

    def first(self, packed: Tensor) -> Tensor:
        """(rows, hidden) -> (batch, hidden) of each row's first token."""
        rows = self.first_rows if self.query is None else torch.searchsorted(self.query, self.first_rows)
        return packed[rows]

    def output(self, packed: Tensor) -> Tensor:
        """What leaves the encoder: (batch, length, hidden) with zeros at padding, or (wanted, hidden)."""
        return self.unpack(packed) if self.output_mask is None else packed[self.output_mask]

    def query_rows(self, packed: Tensor) -> Tensor:
        """(tokens, ...) -> the rows whose outputs are wanted."""
        return packed if self.query is None else packed[self.query]

    def attend(self, module: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """Attention within each sequence.

        Args:
            query: (rows, heads, head_dim), the wanted rows.
            key, value: (tokens, heads, head_dim).

        Returns:
            (rows, heads, head_dim) and None: packed attention gives no probabilities.
        """
        if not query.shape[0]:  # no row is wanted: a batch without targets
            return query, None
        rate = module.attention_dropout if module.training else 0.0
        lengths = self.lengths if self.query is None else self.query_lengths
        if query.is_cuda and not rate and query.dtype in (torch.float16, torch.bfloat16):
            return _attend_varlen(module.scaling, query, key, value, lengths, self.lengths), None
        if lengths == self.lengths and len(set(lengths)) == 1:
            query, key, value = (tensor.unflatten(0, (len(lengths), -1)) for tensor in (query, key, value))
            return _attend_batch(module.scaling, rate, query, key, value, None).flatten(0, 1), None
        attend = _attend_padded if query.is_cuda else _attend_each
        return attend(module.scaling, rate, query, key, value, lengths, self.lengths), None


def check_row_lengths(row_lengths: Tensor) -> None:
    """Raise if a row of the batch has no token.

    Args:
        row_lengths: (batch,) tokens of each row.

    Raises:
        CtxError: Naming the first such row.
    """
    if not bool((row_lengths > 0).all()):
        row = int((row_lengths == 0).nonzero()[0])
        raise CtxError(f"Row {row} of attention_mask has no token at all; drop it or give it one token.")


def _run_lengths(ids: Tensor, row_starts: Tensor) -> tuple[int, ...]:
    """Lengths of the runs of equal ids; a run also ends where a row of the batch starts."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    starts[row_starts] = True
    bounds = starts.nonzero().squeeze(1).cpu()
    return tuple(bounds.diff(append=bounds.new_tensor([ids.numel()])).tolist())


def _attend_batch(
    scaling: float, rate: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """SDPA on (batch, length, heads, head_dim) tensors."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if 0 < rate < 1 and query.device.type == "cpu":  # no kernel drops out there: torch would write the formula out
        context = dropped_attention(query, key, value, mask, scaling=scaling, rate=rate)
    else:
        context = scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate, scale=scaling)
    return context.transpose(1, 2)


def _attend_each(
    scaling: float,
    rate: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
) -> Tensor:
    """One SDPA call per sequence: on CPU faster than padding to a common length, and than jagged nested tensors."""
    pieces = zip(query.split(query_lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
    return torch.cat(
        [_attend_batch(scaling, rate, q[None], k[None], v[None], None)[0] for q, k, v in pieces if q.shape[0]]
    )


def _attend_padded(
    scaling: float,
    rate: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
) -> Tensor:
    """Pads for the attention alone: on accelerators, where no variable-length kernel fits (fp32, dropout)."""
    query_grid, key_grid = (_grid(lengths, query.device) for lengths in (query_lengths, key_lengths))
    padded_query = query.new_zeros(*query_grid.shape, *query.shape[1:]).index_put((query_grid,), query)
    padded_key, padded_value = (
        tensor.new_zeros(*key_grid.shape, *tensor.shape[1:]).index_put((key_grid,), tensor) for tensor in (key, value)
    )
    context = _attend_batch(scaling, rate, padded_query, padded_key, padded_value, key_grid[:, None, None, :])
    return context[query_grid]


def _attend_varlen(
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
) -> Tensor:
    """The variable-length flash kernel of torch (half precision, no dropout)."""
    cu_query, cu_key = (_cumulative(lengths, query.device) for lengths in (query_lengths, key_lengths))
    longest = max(query_lengths), max(key_lengths)
    return cast(Tensor, varlen_attn(query, key, value, cu_query, cu_key, *longest, scale=scaling))


def _grid(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(sequences, longest) bool, true at tokens."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(sequences + 1,) int32 start of each sequence, and the end of the last."""
    return torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)


Layout = PaddedLayout | PackedLayout
