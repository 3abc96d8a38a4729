"""Layouts of XLNet's two streams: which states a layer computes, and which keys they attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout
from hf_ctxmodels.layers.cpu.relative_attention import (
    RelativeBiases,
    SequenceRange,
    SequenceRanges,
    attend_per_sequence,
    runs_per_sequence,
)
from hf_ctxmodels.models.xlnet.encoder_inputs import EncoderInputs
from hf_ctxmodels.models.xlnet.relative_attention import AttentionPattern, dense_attention, eager_attention

Probabilities = Tensor | tuple[Tensor, Tensor] | None
"""(batch, heads, queries, keys) attention probabilities, a pair (content stream, query stream) where a layer computes
both streams; None if the attention implementation does not return them."""

_MASKED_SCORE = -1e30  # a probability of 0; finite, so that a query without a visible key does not become NaN


@dataclass(frozen=True, eq=False)
class Streams:
    """The content states, followed by the query states, if any.

    Both attend to the keys of the content stream, so that a layer makes one attention call. The states of a single
    stream may be packed, that is, the tokens of all sequences concatenated without padding.

    Attributes:
        inputs: The batch.
        encodings: (groups, memory + 2 * length, hidden) encodings of the distances memory + length, ..., 1 - length;
            two groups if the second half of the batch holds reversed text (`bi_data`).
        layout: The layout of the content states, and the positions whose outputs are returned.
        pattern: The attention pattern of the computed states in the padded batch; None if it is not needed.
        uses_eager: Whether to compute attention by the reference implementation, which returns the probabilities.
        is_query_only: Whether only the query states are computed, as in a last layer; the content states are keys.
    """

    inputs: EncoderInputs
    encodings: Tensor
    layout: Layout
    pattern: AttentionPattern | None
    uses_eager: bool
    is_query_only: bool = False

    @classmethod
    def build(cls, inputs: EncoderInputs, encodings: Tensor, *, output_attentions: bool | None) -> "Streams":
        """Choose the layout of a batch: packed where the result is the same, padded otherwise.

        The padded layout is used for `config.unpad=False`, eager attention, `output_attentions`, permutations and
        targets, memory, `attn_type="uni"`, `bi_data`, padding between the tokens of a sequence, and traced graphs.
        """
        config = inputs.config
        uses_eager = bool(output_attentions) or config._attn_implementation == "eager"
        needs_padding = any(
            tensor is not None for tensor in (inputs.memory, inputs.order, inputs.hidden_pairs, inputs.target_positions)
        )
        is_packable = config.unpad and config.attn_type == "bi" and not config.bi_data
        if is_packable and not (uses_eager or needs_padding or is_traced(inputs.words) or inputs.has_inner_padding):
            shape, device = (inputs.batch_size, inputs.length), inputs.words.device
            packed_layout = PackedLayout.build(*shape, inputs.tokens, inputs.sequence_ids, device)
            pattern = None if runs_per_sequence(encodings) else inputs.build_pattern()
            return cls(inputs, encodings, packed_layout, pattern, uses_eager)
        layout = PaddedLayout(inputs.batch_size, inputs.length)
        return cls(inputs, encodings, layout, inputs.build_pattern(), uses_eager)

    @property
    def has_queries(self) -> bool:
        """Whether there is a query stream."""
        return self.inputs.target_positions is not None

    def for_last_layer(self, *, returns_content: bool) -> "Streams":
        """The layout for the last layer, which computes only the returned states.

        Args:
            returns_content: Whether the content states are returned in addition to the query states.
        """
        if self.has_queries and self.pattern is not None:
            query_pattern = self.pattern.select_queries(slice(self.inputs.length, None))
            return self if returns_content else replace(self, pattern=query_pattern, is_query_only=True)
        mask = self.inputs.output_mask
        return self if mask is None else replace(self, layout=self.layout.select(mask, include_first_tokens=False))

    def select_keys(self, states: Tensor) -> Tensor:
        """(..., hidden) states -> the content states."""
        return states[:, : self.inputs.length] if self.has_queries else states

    def select_queries(self, states: Tensor) -> Tensor:
        """(..., hidden) states -> the states that the layer computes."""
        return states[:, self.inputs.length :] if self.is_query_only else self.layout.select_queries(states)

    def unpack(self, states: Tensor) -> tuple[Tensor | None, ...]:
        """Computed states -> the hidden states of each stream.

        Returns:
            For a single stream, (batch, length, hidden), or (outputs, hidden) with an output mask. For two streams,
            (batch, length, hidden), None if not computed, and (batch, targets, hidden).
        """
        if not self.has_queries:
            return (self.layout.select_outputs(states),)
        if self.is_query_only:
            return None, states
        return states[:, : self.inputs.length], states[:, self.inputs.length :]

    def repack(self, streams: Sequence[Tensor]) -> Tensor:
        """Inverse of `unpack` for a layer that computes all states."""
        return torch.cat(list(streams), 1) if self.has_queries else self.layout.pack(streams[0])

    def content_states(self, states: Tensor) -> Tensor:
        """(batch, length, hidden) of the content stream, zeros at padding; the memory stores them."""
        states, tokens = self.layout.unpack(self.select_keys(states)), self.inputs.tokens
        return states if tokens is None or isinstance(self.layout, PackedLayout) else states * tokens[..., None]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        biases: RelativeBiases,
        *,
        scaling: float,
        dropout: float,
    ) -> tuple[Tensor, Probabilities]:
        """Attention of the computed states; arguments as in `eager_attention`.

        Args:
            query: (batch, queries, heads, head_dim), or (queries, heads, head_dim) if packed.
            key, value: (batch, keys, heads, head_dim), or (keys, heads, head_dim) if packed.
            relative: (groups, distances, heads, head_dim).

        Returns:
            The context, in the shape of `query`, and the probabilities.
        """
        if not self.uses_eager and runs_per_sequence(query):
            queries, keys, values = (tensor.flatten(0, -3) for tensor in (query, key, value))
            context = attend_per_sequence(
                queries, keys, values, relative, biases, self.ranges, scaling=scaling, dropout=dropout
            )
            return context.unflatten(0, query.shape[:-2]), None
        if relative.shape[0] > 1:
            relative = relative.repeat_interleave(query.shape[0] // relative.shape[0], 0)
        layout = self.layout
        if isinstance(layout, PackedLayout):
            if layout.query is not None:
                query = torch.zeros_like(key).index_copy(0, layout.query, query)
            query, key, value = (layout.unpack(tensor) for tensor in (query, key, value))
        pattern = self.pattern or self.inputs.build_pattern()  # None in autocast of a packed batch
        arguments = (query, key, value, relative, biases, pattern)
        if not self.uses_eager:
            context = dense_attention(*arguments, scaling=scaling, dropout=dropout)
            return layout.select_queries(layout.pack(context)), None  # both are the identity in a padded layout
        context, probabilities = eager_attention(*arguments, scaling=scaling, dropout=dropout)
        if self.has_queries and not self.is_query_only:
            length = self.inputs.length
            return context, (probabilities[:, :, :length], probabilities[:, :, length:])
        return context, probabilities

    @cached_property
    def ranges(self) -> SequenceRanges:
        """The ranges of each sequence for `attend_per_sequence`."""
        inputs, layout = self.inputs, self.layout
        visible = None
        if isinstance(layout, PackedLayout):
            query_counts, key_counts = layout.query_counts, layout.lengths
            offsets = inputs.length - layout.query_positions[:, None]
            num_content = inputs.length if layout.query is None else 0
            key_segments = None if inputs.token_types is None else layout.pack(inputs.token_types)
            query_segments = None if key_segments is None else layout.select_queries(key_segments)
        else:
            pattern = self.pattern or self.inputs.build_pattern()
            offsets, visible = pattern.distance_offsets.flatten(0, 1), pattern.visible
            query_counts = (len(offsets) // inputs.batch_size,) * inputs.batch_size
            key_counts = (inputs.memory_length + inputs.length,) * inputs.batch_size
            num_content = 0 if self.is_query_only else inputs.length
            query_segments, key_segments = pattern.query_segments, pattern.key_segments
        score_masks = queries_without_keys = None
        if visible is not None:
            score_masks = torch.zeros(visible.shape).masked_fill_(~visible, _MASKED_SCORE)
            has_no_key = ~visible.any(-1).flatten()
            queries_without_keys = has_no_key if bool(has_no_key.any()) else None
        sequences, query_start, key_start = [], 0, 0
        for number, (num_queries, num_keys) in enumerate(zip(query_counts, key_counts, strict=True)):
            queries, keys = slice(query_start, query_start + num_queries), slice(key_start, key_start + num_keys)
            query_start, key_start = queries.stop, keys.stop
            distance_indices = None
            if num_queries > num_content:
                distance_indices = offsets[queries][num_content:] + torch.arange(num_keys)
            if num_queries:
                sequences.append(
                    SequenceRange(
                        queries,
                        keys,
                        num_content=min(num_content, num_queries),
                        distance_origin=inputs.length,
                        distance_indices=distance_indices,
                        score_mask=None if score_masks is None else score_masks[number],
                        encoding_group=number * len(self.encodings) // len(key_counts),
                    )
                )
        if query_segments is None or key_segments is None:
            return SequenceRanges(tuple(sequences), queries_without_keys=queries_without_keys)
        segments, indices = torch.cat([query_segments.flatten(), key_segments.flatten()]).unique(return_inverse=True)
        one_hot = F.one_hot(indices, len(segments)).float()
        query_one_hot, key_one_hot = one_hot.split([query_segments.numel(), key_segments.numel()])
        return SequenceRanges(tuple(sequences), query_one_hot, key_one_hot, queries_without_keys)
