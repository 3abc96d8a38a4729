"""Where the rows of XLNet's streams lie, which of them a layer computes, and which keys are visible to each.

The content stream has one row for each position of the batch, the query stream one for each target. All rows read the
keys of the content stream, so the query rows are appended to the content rows, and a layer makes one attention call
over all of them. States of earlier segments (the memory) are further keys before those of the batch.

`PaddedStreams` computes every position of a batch; `PackedStreams` holds the tokens of a single-stream batch end to
end, without padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.inputs import is_traced, sequence_numbers
from hf_ctxmodels.layers.attention.layouts import PackedLayout
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.cpu_attention import (
    SequenceRange,
    SequenceRanges,
    attend_per_sequence,
    hidden_scores,
    one_hot_types,
    runs_per_sequence,
)
from hf_ctxmodels.models.xlnet.encoder_inputs import EncoderInputs
from hf_ctxmodels.models.xlnet.relative_attention import (
    AttentionPattern,
    RelativeBiases,
    dense_attention,
    eager_attention,
)
from hf_ctxmodels.models.xlnet.visibility import visible_keys

Probabilities = Tensor | tuple[Tensor, Tensor] | None
"""(batch, heads, rows, keys) attention probabilities, of the content and the query stream where a layer computes both;
None where the implementation in use gives none."""


def build_streams(
    inputs: EncoderInputs, encodings: Tensor, config: CtxXLNetConfig, *, output_attentions: bool | None
) -> "Streams":
    """Choose how a batch is laid out: packed where that is exact, padded otherwise.

    Padded are: `config.unpad=False`, eager attention, asked-for attention probabilities, permutations and targets,
    memory, `attn_type="uni"`, `bi_data`, padding between the tokens of a sequence, and graphs being traced.

    Args:
        inputs: The batch.
        encodings: (groups, memory + 2 * length, hidden) of the distances memory + length, ..., 1 - length.
        config: The calling model's.
        output_attentions: Whether attention probabilities are asked for, which the plain formula gives.
    """
    if output_attentions or not _is_packable(inputs, config):
        return PaddedStreams.build(inputs, encodings, config, eager=bool(output_attentions))
    layout = PackedLayout.build(*inputs.shape, inputs.tokens, inputs.sequence_ids, inputs.words.device)
    types = None if inputs.token_types is None else layout.pack(inputs.token_types)
    padded = cache(partial(PaddedStreams.build, inputs, encodings, config))
    return PackedStreams(inputs, encodings, layout, types, padded)


def _is_packable(inputs: EncoderInputs, config: CtxXLNetConfig) -> bool:
    if not config.unpad or config._attn_implementation == "eager":
        return False
    if inputs.memory is not None or not inputs.permutation.is_empty:
        return False
    if config.attn_type != "bi" or config.bi_data or is_traced(inputs.words):
        return False
    return not inputs.has_inner_padding


@dataclass(frozen=True, eq=False)
class PaddedStreams:
    """Every position of the batch as content rows, (batch, length, ...), and the query rows appended to them, if any.

    Attributes:
        inputs: The batch.
        encodings: (groups, memory + 2 * length, hidden) of the distances memory + length, ..., 1 - length; two groups
            where the second half of the batch runs backwards.
        pattern: Positions and visible keys of the computed rows.
        eager: Whether attention is the plain formula, which gives the probabilities too.
        queries_only: Whether the query rows alone are computed, as in a last layer; the content rows are keys.
        output_mask: (batch, length) bool, the positions whose outputs leave the encoder; None for all.
    """

    inputs: EncoderInputs
    encodings: Tensor
    pattern: AttentionPattern
    eager: bool
    queries_only: bool = False
    output_mask: Tensor | None = None

    @classmethod
    def build(
        cls, inputs: EncoderInputs, encodings: Tensor, config: CtxXLNetConfig, *, eager: bool = False
    ) -> "PaddedStreams":
        """Lay out a batch; arguments as in `build_streams`, `eager` whatever the configuration says. The memory is of
        segment 0."""
        targets, types, memory_length = inputs.target_positions, inputs.token_types, inputs.memory_length
        visible = visible_keys(
            inputs.shape,
            encodings.device,
            tokens=inputs.tokens,
            same_sequence=None if inputs.sequence_ids is None else sequence_numbers(inputs.sequence_ids),
            order=inputs.permutation.order,
            hidden_pairs=inputs.permutation.hidden_pairs,
            target_positions=targets,
            memory_length=memory_length,
            memory_tokens=inputs.memory_tokens,
            causal=config.attn_type == "uni",
            same_length=config.same_length,
        )
        positions = torch.arange(inputs.length, device=encodings.device).expand(inputs.shape)
        row_types = types
        if targets is not None:
            columns = targets.clamp(min=0)
            positions = torch.cat([positions, columns], 1)
            row_types = None if types is None else torch.cat([types, types.gather(1, columns)], 1)
        key_types = None if types is None else F.pad(types, (memory_length, 0))
        pattern = AttentionPattern(inputs.length - positions[..., None], visible, row_types, key_types)
        return cls(inputs, encodings, pattern, eager=eager or config._attn_implementation == "eager")

    def for_last_layer(self, *, content: bool) -> "PaddedStreams":
        """The same streams for a last layer.

        Args:
            content: Whether the outputs of the content rows are needed besides those of the query rows.
        """
        if self.inputs.target_positions is None:
            return replace(self, output_mask=self.inputs.output_mask)
        if content:
            return self
        return replace(self, pattern=self.pattern.of_rows(slice(self.inputs.length, None)), queries_only=True)

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> the same."""
        return tensor

    def key_rows(self, rows: Tensor) -> Tensor:
        """(batch, rows, ...) -> (batch, length, ...), the content rows."""
        return rows if self.inputs.target_positions is None else rows[:, : self.inputs.length]

    def select_queries(self, rows: Tensor) -> Tensor:
        """(batch, rows, ...) -> those that the layer computes."""
        return rows[:, self.inputs.length :] if self.queries_only else rows

    def unpack(self, rows: Tensor) -> tuple[Tensor | None, ...]:
        """Computed rows -> the hidden states of each stream as they leave the encoder.

        Returns:
            For a single stream (batch, length, hidden), or (outputs, hidden) with an output mask. For two (batch,
            length, hidden), None where they are not computed, and (batch, targets, hidden).
        """
        if self.inputs.target_positions is None:
            return (rows if self.output_mask is None else rows[self.output_mask],)
        if self.queries_only:
            return None, rows
        return rows[:, : self.inputs.length], rows[:, self.inputs.length :]

    def repack(self, states: Sequence[Tensor]) -> Tensor:
        """What `unpack` made of all rows -> these rows."""
        return torch.cat(list(states), 1) if len(states) > 1 else states[0]

    def content(self, rows: Tensor) -> Tensor:
        """(batch, length, hidden) of the content stream, zeros at padding: what the memory keeps."""
        states = self.key_rows(rows)
        return states if self.inputs.tokens is None else states * self.inputs.tokens[..., None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, relative: Tensor, biases: RelativeBiases, **options: float
    ) -> tuple[Tensor, Probabilities]:
        """Attention of the computed rows over the keys.

        Args:
            query: (batch, rows, heads, head_dim).
            key, value: (batch, keys, heads, head_dim).
            relative: (groups, distances, heads, head_dim), the projected encodings.
            biases: Parameters of the score.
            options: `scaling`, a factor on the scores, and `dropout`, a rate on the probabilities.

        Returns:
            The context, in the shape of `query`, and the probabilities.
        """
        if not self.eager and runs_per_sequence(query):
            flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]
            context = attend_per_sequence(flat[0], flat[1], flat[2], relative, biases, self.pieces, **options)
            return context.unflatten(0, query.shape[:2]), None
        if relative.shape[0] > 1:
            relative = relative.repeat_interleave(query.shape[0] // relative.shape[0], 0)
        if not self.eager:
            return dense_attention(query, key, value, relative, biases, self.pattern, **options), None
        if self.inputs.target_positions is None or self.queries_only:
            return eager_attention(query, key, value, relative, biases, self.pattern, **options)
        length = self.inputs.length
        (content, of_content), (queries, of_queries) = (
            eager_attention(query[:, rows], key, value, relative, biases, self.pattern.of_rows(rows), **options)
            for rows in (slice(length), slice(length, None))
        )
        return torch.cat([content, queries], 1), (of_content, of_queries)

    @cached_property
    def pieces(self) -> SequenceRanges:
        """The rows of the batch for the attention of the CPU."""
        columns, visible = self.pattern.columns, self.pattern.visible
        batch_size, rows = columns.shape[:2]
        length, keys = self.inputs.length, self.inputs.memory_length + self.inputs.length
        content = 0 if self.queries_only else length
        query_columns = columns[:, content:] + torch.arange(keys) if rows > content else None
        hidden = blind = None
        if visible is not None:
            hidden = hidden_scores(visible)
            without_keys = ~visible.any(-1).flatten()
            blind = without_keys if bool(without_keys.any()) else None
        pieces = tuple(
            SequenceRange(
                rows=row * rows,
                stop=(row + 1) * rows,
                keys=row * keys,
                keys_stop=(row + 1) * keys,
                content=content,
                origin=length,
                columns=None if query_columns is None else query_columns[row],
                hidden=None if hidden is None else hidden[row],
                group=row * len(self.encodings) // batch_size,
            )
            for row in range(batch_size)
        )
        return SequenceRanges(pieces, *one_hot_types(self.pattern.row_types, self.pattern.key_types), blind)


@dataclass(frozen=True, eq=False)
class PackedStreams:
    """The tokens of a single-stream batch end to end, (tokens, ...), each sequence attending to itself.

    Attributes:
        inputs: The batch.
        encodings: (1, 2 * length, hidden) of the distances length, ..., 1 - length.
        layout: Where the tokens lie, and which rows a last layer computes.
        token_types: (tokens,) segments, or None for no segment term.
        padded: Makes the same batch padded, for devices and precisions whose attention does not run piece by piece.
    """

    inputs: EncoderInputs
    encodings: Tensor
    layout: PackedLayout
    token_types: Tensor | None
    padded: Callable[[], PaddedStreams]

    def for_last_layer(self, *, content: bool) -> "PackedStreams":
        """The same stream for a last layer, which computes the rows of the output mask alone."""
        mask = self.inputs.output_mask
        return self if mask is None else replace(self, layout=self.layout.select(mask, include_first_tokens=False))

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> (tokens, ...)."""
        return self.layout.pack(tensor)

    def key_rows(self, rows: Tensor) -> Tensor:
        """(tokens, ...) -> the same: every token is a key."""
        return rows

    def select_queries(self, rows: Tensor) -> Tensor:
        """(tokens, ...) -> those that the layer computes."""
        return self.layout.select_queries(rows)

    def unpack(self, rows: Tensor) -> tuple[Tensor]:
        """Computed rows -> (batch, length, hidden), zeros at padding; or (outputs, hidden) with an output mask."""
        return (self.layout.select_outputs(rows),)

    def repack(self, states: Sequence[Tensor]) -> Tensor:
        """What `unpack` made of all rows -> these rows."""
        return self.layout.pack(states[0])

    def content(self, rows: Tensor) -> Tensor:
        """(batch, length, hidden), zeros at padding: what the memory keeps."""
        return self.layout.unpack(rows)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, relative: Tensor, biases: RelativeBiases, **options: float
    ) -> tuple[Tensor, Probabilities]:
        """As `PaddedStreams.attend`, of (rows, heads, head_dim) queries over (tokens, heads, head_dim)."""
        if runs_per_sequence(query):
            return attend_per_sequence(query, key, value, relative, biases, self.pieces, **options), None
        rows = self.layout.query
        if rows is not None:
            query = torch.zeros_like(key).index_copy(0, rows, query)
        query, key, value = (self.layout.unpack(tensor) for tensor in (query, key, value))
        context, _ = self.padded().attend(query, key, value, relative, biases, **options)
        return self.select_queries(self.layout.pack(context)), None

    @cached_property
    def pieces(self) -> SequenceRanges:
        """The sequences for the attention of the CPU."""
        layout = self.layout
        pieces, row, key = [], 0, 0
        for length, count in zip(layout.lengths, layout.query_counts, strict=True):
            columns, content = None, length
            if layout.query is not None:
                positions = layout.query[row : row + count, None] - key
                columns, content = layout.length - positions + torch.arange(length), 0
            if count:
                pieces.append(SequenceRange(row, row + count, key, key + length, content, layout.length, columns))
            row, key = row + count, key + length
        types = self.token_types
        return SequenceRanges(
            tuple(pieces), *one_hot_types(None if types is None else self.select_queries(types), types)
        )


Streams = PaddedStreams | PackedStreams
