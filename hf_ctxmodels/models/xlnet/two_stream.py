"""Two-stream relative attention with segment recurrence (Yang et al. 2019, sections 2.3 to 2.5).

The content stream holds the tokens themselves, the query stream holds one row for each token to predict: it knows the
token's place but not the token. Both share all weights, and both read the keys and values of the content stream, so the
query rows stand below the content rows and every layer makes one attention call over all of them. States of earlier
segments (the memory) are further keys in front. Without query rows this is the encoder used for fine-tuning.

`PaddedStreams` computes every position of a batch; `PackedStreams` holds the tokens of a single-stream batch end to
end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.layers.linear import Linear, linear
from hf_ctxmodels.models.xlnet.relative_attention import (
    Biases,
    Places,
    dense_attention,
    eager_attention,
)
from hf_ctxmodels.models.xlnet.relative_pieces import Piece, Pieces, attend_pieces, hidden_scores


class RelativeAttention(nn.Module):
    """Multi-head attention by content, distance and segment, for one stream or two.

    Args:
        hidden_size: Width of the input and output.
        num_heads: Number of heads; must divide `hidden_size`.
        dropout: Dropout on the attention probabilities.
        config: Its `_attn_implementation` says whether to compute the plain formula ("eager") or a fast path.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, dropout: float, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.scaling = (hidden_size // num_heads) ** -0.5
        self.attention_dropout = dropout
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size, bias=False)
        self.position_proj = Linear(hidden_size, hidden_size, bias=False)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.segment_bias = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.segment_embeddings = nn.Parameter(torch.zeros(2, num_heads, hidden_size // num_heads))

    @property
    def biases(self) -> Biases:
        """The parameters of the score besides the projections."""
        return Biases(self.content_bias, self.position_bias, self.segment_bias, self.segment_embeddings)

    def forward(
        self, hidden_states: Tensor, streams: "Streams", memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor] | None]:
        """Attend as `streams` says.

        Args:
            hidden_states: (..., hidden), the rows of `streams`.
            streams: Says which rows are keys, which are computed, and which sees which.
            memory: (batch, memory, hidden) states of earlier segments.

        Returns:
            (..., hidden) at the computed rows, and the probabilities where the implementation gives them.
        """
        width = hidden_states.shape[-1]
        queries, keys = streams.query_rows(hidden_states), streams.content_rows(hidden_states)
        if memory is not None:
            keys = torch.cat([memory, keys], 1)
        if queries is keys:
            query, key, value = self._split_heads(self.qkv_proj(keys), 3)
        else:
            (query,) = self._split_heads(linear(queries, self.qkv_proj.weight[:width]), 1)
            key, value = self._split_heads(linear(keys, self.qkv_proj.weight[width:]), 2)
        (relative,) = self._split_heads(self.position_proj(streams.encodings), 1)
        context, probabilities = streams.attend(self, query, key, value, relative)
        return self.out_proj(context.flatten(-2)), probabilities

    def _split_heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(..., parts * hidden) -> `parts` tensors (..., heads, head_dim)."""
        return projected.unflatten(-1, (parts, self.num_heads, -1)).unbind(-3)

    @property
    def dropout_now(self) -> float:
        """The rate in effect."""
        return self.attention_dropout if self.training else 0.0


@dataclass(frozen=True)
class PaddedStreams:
    """Every position of a batch as content rows, and below them the query rows, if any.

    Attributes:
        encodings: (groups, distances, hidden) of the distances memory + length, ..., 1 - length; two groups where the
            second half of the batch runs backwards.
        places: Where the computed rows stand and what they see.
        length: Content rows.
        memory_length: Keys before the content rows.
        target_positions: (batch, queries) column of each query row, -1 where there is none; None for a single stream.
        tokens: (batch, length) bool, False at padding; None when there is none.
        queries_only: Whether the content rows are keys alone, as in a last layer.
        wanted: (batch, length) bool, the positions whose outputs are wanted; None for all.
    """

    encodings: Tensor
    places: Places
    length: int
    memory_length: int
    target_positions: Tensor | None = None
    tokens: Tensor | None = None
    queries_only: bool = False
    output_mask: Tensor | None = None

    @classmethod
    def build(
        cls,
        encodings: Tensor,
        shape: tuple[int, int],
        *,
        visible: Tensor | None,
        tokens: Tensor | None = None,
        token_types: Tensor | None = None,
        target_positions: Tensor | None = None,
        memory_length: int = 0,
    ) -> "PaddedStreams":
        """Lay out a batch.

        Args:
            encodings: As the attribute.
            shape: (batch, length).
            visible: (batch, length + queries, memory + length) bool from `visible_keys`, or None.
            tokens: (batch, length) bool.
            token_types: (batch, length) segments; those of the memory are 0. None leaves the segment term out.
            target_positions: (batch, queries).
            memory_length: Keys before the content rows.
        """
        batch_size, length = shape
        positions = torch.arange(length, device=encodings.device).expand(batch_size, length)
        row_types = key_types = token_types
        if target_positions is not None:
            present = target_positions.clamp(min=0)
            positions = torch.cat([positions, present], 1)
            if token_types is not None:
                row_types = torch.cat([token_types, token_types.gather(1, present)], 1)
        if token_types is not None:
            key_types = F.pad(token_types, (memory_length, 0))
        places = Places(length - positions[..., None], visible, row_types, key_types)
        return cls(encodings, places, length, memory_length, target_positions, tokens)

    def last(self, output_mask: Tensor | None, *, content: bool) -> "PaddedStreams":
        """The same streams for a last layer.

        Args:
            wanted: (batch, length) bool for a single stream, or None; all are computed, these are picked.
            content: Whether the outputs of the content rows are needed besides those of the query rows.
        """
        if self.target_positions is None or content:
            return replace(self, output_mask=output_mask)
        return replace(self, places=self.places.of_rows(slice(self.length, None)), queries_only=True)

    def content_rows(self, rows: Tensor) -> Tensor:
        """(batch, rows, ...) -> (batch, length, ...)."""
        return rows if self.target_positions is None else rows[:, : self.length]

    def query_rows(self, rows: Tensor) -> Tensor:
        """(batch, rows, ...) -> those computed."""
        return rows[:, self.length :] if self.queries_only else rows

    def output(self, rows: Tensor) -> Tensor:
        """What leaves the encoder: the query rows if there are any, else the content rows, or (wanted, hidden)."""
        if self.target_positions is not None:
            return rows if self.queries_only else rows[:, self.length :]
        return rows if self.output_mask is None else rows[self.output_mask]

    def padded_content(self, rows: Tensor) -> Tensor:
        """(batch, length, hidden) of the content rows, zeros at padding: what the memory keeps."""
        content = self.content_rows(rows)
        return content if self.tokens is None else content * self.tokens[..., None]

    def attend(
        self, module: RelativeAttention, query: Tensor, key: Tensor, value: Tensor, relative: Tensor
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor] | None]:
        """Attention of (batch, rows, heads, head_dim) queries over (batch, keys, heads, head_dim).

        Returns:
            The context in the shape of `query`; with eager attention also the (batch, heads, rows, keys)
            probabilities, of each stream for itself where there are two.
        """
        options = {"scaling": module.scaling, "dropout": module.dropout_now}
        if module.config._attn_implementation == "eager":
            return self._attend_eagerly(module, query, key, value, self._per_row(relative, len(query)), options)
        if fits_pieces(query):
            flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]
            context = attend_pieces(flat[0], flat[1], flat[2], relative, module.biases, self.pieces, **options)
            return context.unflatten(0, query.shape[:2]), None
        relative = self._per_row(relative, len(query))
        return dense_attention(query, key, value, relative, module.biases, self.places, **options), None

    def _attend_eagerly(
        self,
        module: RelativeAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        options: dict[str, float],
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """Each stream by itself."""
        if self.target_positions is None or self.queries_only:
            return eager_attention(query, key, value, relative, module.biases, self.places, **options)
        contexts, probabilities = [], []
        for rows in (slice(self.length), slice(self.length, None)):
            places = self.places.of_rows(rows)
            context, weights = eager_attention(query[:, rows], key, value, relative, module.biases, places, **options)
            contexts.append(context)
            probabilities.append(weights)
        return torch.cat(contexts, 1), (probabilities[0], probabilities[1])

    @staticmethod
    def _per_row(relative: Tensor, batch_size: int) -> Tensor:
        return relative if len(relative) == 1 else relative.repeat_interleave(batch_size // len(relative), 0)

    @cached_property
    def pieces(self) -> Pieces:
        """The rows of the batch for the attention of the CPU."""
        columns, visible = self.places.columns, self.places.visible
        batch_size, rows = columns.shape[:2]
        keys = self.memory_length + self.length
        content = 0 if self.queries_only else self.length
        further = None
        if rows > content:
            further = columns[:, content:] + torch.arange(keys)
        hidden = blind = None
        if visible is not None:
            hidden = hidden_scores(visible)
            sees_nothing = ~visible.any(-1).flatten()
            blind = sees_nothing if bool(sees_nothing.any()) else None
        pieces = tuple(
            Piece(
                rows=row * rows,
                stop=(row + 1) * rows,
                keys=row * keys,
                keys_stop=(row + 1) * keys,
                content=content,
                origin=self.length,
                columns=None if further is None else further[row],
                hidden=None if hidden is None else hidden[row],
                group=row * len(self.encodings) // batch_size,
            )
            for row in range(batch_size)
        )
        return Pieces(pieces, *_one_hot_types(self.places.row_types, self.places.key_types), blind)


@dataclass(frozen=True)
class PackedStreams:
    """The tokens of a single-stream batch end to end, each sequence attending to itself.

    Attributes:
        encodings: (1, distances, hidden) of the distances length, ..., 1 - length.
        layout: Where the tokens lie, and which rows a last layer computes.
        length: Columns of the padded batch, which `encodings` serve.
        token_types: (tokens,) segments, or None for no segment term.
        padded: Makes the same batch padded, for devices and precisions whose attention does not run piece by piece.
    """

    encodings: Tensor
    layout: PackedLayout
    length: int
    token_types: Tensor | None
    padded: Callable[[], PaddedStreams]

    def last(self, output_mask: Tensor | None, *, content: bool) -> "PackedStreams":
        """The same for a last layer whose outputs are wanted at some positions (batch, length) only."""
        return self if output_mask is None else replace(self, layout=self.layout.select(output_mask, and_first=False))

    def content_rows(self, rows: Tensor) -> Tensor:
        """(tokens, ...) -> the same: every token is a key."""
        return rows

    def query_rows(self, rows: Tensor) -> Tensor:
        """(tokens, ...) -> the rows whose outputs are wanted."""
        return self.layout.query_rows(rows)

    def output(self, rows: Tensor) -> Tensor:
        """What leaves the encoder: (batch, length, hidden) with zeros at padding, or (wanted, hidden)."""
        return self.layout.output(rows)

    def padded_content(self, rows: Tensor) -> Tensor:
        """(batch, length, hidden), zeros at padding: what the memory keeps."""
        return self.layout.unpack(rows)

    def attend(
        self, module: RelativeAttention, query: Tensor, key: Tensor, value: Tensor, relative: Tensor
    ) -> tuple[Tensor, None]:
        """Attention of (rows, heads, head_dim) queries over (tokens, heads, head_dim) within each sequence."""
        if fits_pieces(query):
            options = {"scaling": module.scaling, "dropout": module.dropout_now}
            return attend_pieces(query, key, value, relative, module.biases, self.pieces, **options), None
        rows = self.layout.query
        if rows is not None:
            query = torch.zeros_like(key).index_copy(0, rows, query)
        query, key, value = (self.layout.unpack(tensor) for tensor in (query, key, value))
        context, _ = self.padded().attend(module, query, key, value, relative)
        return self.query_rows(self.layout.pack(context)), None

    @cached_property
    def pieces(self) -> Pieces:
        """The sequences for the attention of the CPU."""
        layout = self.layout
        counts = layout.lengths if layout.query is None else layout.query_lengths
        pieces, row, key = [], 0, 0
        for length, count in zip(layout.lengths, counts, strict=True):
            columns = None
            if layout.query is not None:
                positions = layout.query[row : row + count, None] - key
                columns = self.length - positions + torch.arange(length)
            content = length if layout.query is None else 0
            if count:
                pieces.append(Piece(row, row + count, key, key + length, content, self.length, columns))
            row, key = row + count, key + length
        types = self.token_types
        return Pieces(tuple(pieces), *_one_hot_types(None if types is None else self.query_rows(types), types))


Streams = PaddedStreams | PackedStreams


@dataclass(frozen=True)
class RecordedStreams:
    """Turns recorded rows into what leaves the encoder.

    Attributes:
        streams: What the rows are of.
        last_rows: The last layer's.
    """

    streams: Streams
    last_rows: Tensor

    def recorded(self, states: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Inputs of all layers and the last output -> (batch, length, hidden) each; two streams take turns."""
        if isinstance(self.streams, PackedStreams):
            return self.streams.layout.recorded(states)
        if self.streams.target_positions is None:
            return states
        length = self.streams.length
        both = (*states[:-1], None if states[-1] is None else self.last_rows)
        return tuple(part for rows in both for part in (_split(rows, length)))


def updated_memory(states: Tensor, memory: Tensor | None, mem_len: int | None, reuse_len: int | None) -> Tensor:
    """What the next segment remembers of one layer's input (section 2.5), without gradient.

    Args:
        states: (batch, length, hidden) of this segment.
        memory: (batch, memory, hidden) of earlier ones.
        mem_len: How many positions are kept, the latest; None or 0 keeps all.
        reuse_len: Only the first positions of the segment are remembered; None or 0 remembers all.
    """
    if reuse_len:
        states = states[:, :reuse_len]
    if memory is not None:
        states = torch.cat([memory, states], 1)
    return (states[:, -mem_len:] if mem_len else states).detach()


def fits_pieces(tensor: Tensor) -> bool:
    """Whether attention runs sequence by sequence: on a CPU in single precision, outside of graphs being compiled."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32 and not torch.compiler.is_compiling()


def _one_hot_types(row_types: Tensor | None, key_types: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(rows,) and (keys,) segments of any numbering -> (rows, types), (keys, types)."""
    if row_types is None or key_types is None:
        return None, None
    rows, keys = row_types.flatten(), key_types.flatten()
    kinds, numbers = torch.cat([rows, keys]).unique(return_inverse=True)
    one_hot = F.one_hot(numbers, len(kinds)).float()
    return one_hot[: len(rows)], one_hot[len(rows) :]


def _split(rows: Tensor | None, length: int) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rows is None else (rows[:, :length], rows[:, length:])
