"""Layouts of XLNet's two streams: which states a layer computes, and which keys each of them attends to.

The content stream has one state per position of the batch, the query stream one per target (Yang et al. 2019, section
2.3). Both attend to the keys of the content stream, so the query states are appended to the content states and a layer
makes one attention call. States of earlier segments (the memory) are additional keys, which precede the keys of the
batch.

`PaddedStreams` computes all positions of a batch. `PackedStreams` holds the tokens of a single-stream batch
concatenated, without padding.
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
    one_hot_segments,
    runs_per_sequence,
    visibility_to_score_mask,
)
from hf_ctxmodels.models.xlnet.encoder_inputs import EncoderInputs
from hf_ctxmodels.models.xlnet.relative_attention import (
    AttentionPattern,
    RelativeBiases,
    dense_attention,
    eager_attention,
)

Probabilities = Tensor | tuple[Tensor, Tensor] | None
"""(batch, heads, queries, keys) attention probabilities, a pair (content stream, query stream) where a layer computes
both streams; None if the attention implementation does not return them."""


def build_streams(
    inputs: EncoderInputs, encodings: Tensor, config: CtxXLNetConfig, *, output_attentions: bool | None
) -> "Streams":
    """Choose the layout of a batch: packed where the result is the same, padded otherwise.

    The padded layout is used for `config.unpad=False`, eager attention, `output_attentions`, permutations and targets,
    memory, `attn_type="uni"`, `bi_data`, padding between the tokens of a sequence, and traced graphs.

    Args:
        inputs: The batch.
        encodings: (groups, memory + 2 * length, hidden) encodings of the distances memory + length, ..., 1 - length.
        config: The model's configuration.
        output_attentions: Whether to return attention probabilities (by eager attention).
    """
    if output_attentions or not _is_packable(inputs, config):
        return PaddedStreams.build(inputs, encodings, config, uses_eager=bool(output_attentions))
    layout = PackedLayout.build(*inputs.shape, inputs.tokens, inputs.sequence_ids, inputs.words.device)
    segments = None if inputs.token_types is None else layout.pack(inputs.token_types)
    build_padded = cache(partial(PaddedStreams.build, inputs, encodings, config))
    return PackedStreams(inputs, encodings, layout, segments, build_padded)


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
    """The content states of all positions, (batch, length, ...), followed by the query states, if any.

    Attributes:
        inputs: The batch.
        encodings: (groups, memory + 2 * length, hidden) encodings of the distances memory + length, ..., 1 - length;
            two groups if the second half of the batch holds reversed text (`bi_data`).
        pattern: Distances, visible keys and segments of the computed states.
        uses_eager: Whether to compute attention by the reference implementation, which returns the probabilities.
        is_query_only: Whether only the query states are computed, as in a last layer; the content states are keys.
        output_mask: (batch, length) bool, the positions whose outputs are returned; None for all.
    """

    inputs: EncoderInputs
    encodings: Tensor
    pattern: AttentionPattern
    uses_eager: bool
    is_query_only: bool = False
    output_mask: Tensor | None = None

    @classmethod
    def build(
        cls, inputs: EncoderInputs, encodings: Tensor, config: CtxXLNetConfig, *, uses_eager: bool = False
    ) -> "PaddedStreams":
        """Build the layout of a batch; arguments as in `build_streams`. The memory belongs to segment 0.

        Args:
            uses_eager: Use eager attention regardless of the configuration.
        """
        targets, memory_length = inputs.target_positions, inputs.memory_length
        visible = visible_keys(
            inputs.shape,
            encodings.device,
            tokens=inputs.tokens,
            sequence_numbers=None if inputs.sequence_ids is None else sequence_numbers(inputs.sequence_ids),
            order=inputs.permutation.order,
            hidden_pairs=inputs.permutation.hidden_pairs,
            target_positions=targets,
            memory_length=memory_length,
            memory_tokens=inputs.memory_tokens,
            causal=config.attn_type == "uni",
            same_length=config.same_length,
        )
        positions = torch.arange(inputs.length, device=encodings.device).expand(inputs.shape)
        query_segments = inputs.token_types
        if targets is not None:
            columns = targets.clamp(min=0)
            positions = torch.cat([positions, columns], 1)
            if query_segments is not None:
                query_segments = torch.cat([query_segments, query_segments.gather(1, columns)], 1)
        key_segments = None if inputs.token_types is None else F.pad(inputs.token_types, (memory_length, 0))
        pattern = AttentionPattern(inputs.length - positions[..., None], visible, query_segments, key_segments)
        return cls(inputs, encodings, pattern, uses_eager=uses_eager or config._attn_implementation == "eager")

    def for_last_layer(self, *, returns_content: bool) -> "PaddedStreams":
        """The layout for the last layer.

        Args:
            returns_content: Whether the content states are returned in addition to the query states.
        """
        if self.inputs.target_positions is None:
            return replace(self, output_mask=self.inputs.output_mask)
        if returns_content:
            return self
        query_pattern = self.pattern.select_queries(slice(self.inputs.length, None))
        return replace(self, pattern=query_pattern, is_query_only=True)

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the (batch, length, ...) tensor unchanged."""
        return tensor

    def select_keys(self, states: Tensor) -> Tensor:
        """(batch, states, ...) -> (batch, length, ...), the content states."""
        return states if self.inputs.target_positions is None else states[:, : self.inputs.length]

    def select_queries(self, states: Tensor) -> Tensor:
        """(batch, states, ...) -> the states that the layer computes."""
        return states[:, self.inputs.length :] if self.is_query_only else states

    def unpack(self, states: Tensor) -> tuple[Tensor | None, ...]:
        """Computed states -> the hidden states of each stream.

        Returns:
            For a single stream, (batch, length, hidden), or (outputs, hidden) with an output mask. For two streams,
            (batch, length, hidden), None if not computed, and (batch, targets, hidden).
        """
        if self.inputs.target_positions is None:
            return (states if self.output_mask is None else states[self.output_mask],)
        if self.is_query_only:
            return None, states
        return states[:, : self.inputs.length], states[:, self.inputs.length :]

    def repack(self, streams: Sequence[Tensor]) -> Tensor:
        """Inverse of `unpack` for a layer that computes all states."""
        return torch.cat(list(streams), 1) if len(streams) > 1 else streams[0]

    def content_states(self, states: Tensor) -> Tensor:
        """(batch, length, hidden) of the content stream, zeros at padding; the memory stores them."""
        states = self.select_keys(states)
        return states if self.inputs.tokens is None else states * self.inputs.tokens[..., None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, relative: Tensor, biases: RelativeBiases, **options: float
    ) -> tuple[Tensor, Probabilities]:
        """Attention of the computed states.

        Args:
            query: (batch, queries, heads, head_dim).
            key, value: (batch, keys, heads, head_dim).
            relative: (groups, distances, heads, head_dim), the projected distance encodings.
            biases: Learned parameters of the score.
            options: `scaling`, the factor applied to the scores, and `dropout`, the rate on the probabilities.

        Returns:
            The context, in the shape of `query`, and the probabilities.
        """
        if not self.uses_eager and runs_per_sequence(query):
            packed = [tensor.flatten(0, 1) for tensor in (query, key, value)]
            context = attend_per_sequence(packed[0], packed[1], packed[2], relative, biases, self.ranges, **options)
            return context.unflatten(0, query.shape[:2]), None
        if relative.shape[0] > 1:
            relative = relative.repeat_interleave(query.shape[0] // relative.shape[0], 0)
        if not self.uses_eager:
            return dense_attention(query, key, value, relative, biases, self.pattern, **options), None
        if self.inputs.target_positions is None or self.is_query_only:
            return eager_attention(query, key, value, relative, biases, self.pattern, **options)
        content, queries = slice(self.inputs.length), slice(self.inputs.length, None)
        (content_context, content_probabilities), (query_context, query_probabilities) = (
            eager_attention(
                query[:, stream], key, value, relative, biases, self.pattern.select_queries(stream), **options
            )
            for stream in (content, queries)
        )
        return torch.cat([content_context, query_context], 1), (content_probabilities, query_probabilities)

    @cached_property
    def ranges(self) -> SequenceRanges:
        """The ranges of each example for `attend_per_sequence`."""
        offsets, visible = self.pattern.distance_offsets, self.pattern.visible
        batch_size, num_queries = offsets.shape[:2]
        length, num_keys = self.inputs.length, self.inputs.memory_length + self.inputs.length
        num_content = 0 if self.is_query_only else length
        has_query_stream = num_queries > num_content
        distance_indices = offsets[:, num_content:] + torch.arange(num_keys) if has_query_stream else None
        score_mask = queries_without_keys = None
        if visible is not None:
            score_mask = visibility_to_score_mask(visible)
            has_no_key = ~visible.any(-1).flatten()
            queries_without_keys = has_no_key if bool(has_no_key.any()) else None
        sequences = tuple(
            SequenceRange(
                query_start=example * num_queries,
                query_stop=(example + 1) * num_queries,
                key_start=example * num_keys,
                key_stop=(example + 1) * num_keys,
                num_content=num_content,
                distance_origin=length,
                distance_indices=None if distance_indices is None else distance_indices[example],
                score_mask=None if score_mask is None else score_mask[example],
                encoding_group=example * len(self.encodings) // batch_size,
            )
            for example in range(batch_size)
        )
        segments = one_hot_segments(self.pattern.query_segments, self.pattern.key_segments)
        return SequenceRanges(sequences, *segments, queries_without_keys)


@dataclass(frozen=True, eq=False)
class PackedStreams:
    """The tokens of a single-stream batch concatenated, (tokens, ...); each sequence attends to itself.

    Attributes:
        inputs: The batch.
        encodings: (1, 2 * length, hidden) encodings of the distances length, ..., 1 - length.
        layout: The packed layout of the tokens; in a last layer also the selected queries.
        segments: (tokens,) segment ids, or None to omit the segment term.
        build_padded: Builds the padded layout, for devices and dtypes without per-sequence attention.
    """

    inputs: EncoderInputs
    encodings: Tensor
    layout: PackedLayout
    segments: Tensor | None
    build_padded: Callable[[], PaddedStreams]

    def for_last_layer(self, *, returns_content: bool) -> "PackedStreams":
        """The layout for the last layer, which computes only the positions of the output mask."""
        mask = self.inputs.output_mask
        return self if mask is None else replace(self, layout=self.layout.select(mask, include_first_tokens=False))

    def pack(self, tensor: Tensor) -> Tensor:
        """(batch, length, ...) -> (tokens, ...)."""
        return self.layout.pack(tensor)

    def select_keys(self, states: Tensor) -> Tensor:
        """Return the (tokens, ...) states unchanged: all tokens are keys."""
        return states

    def select_queries(self, states: Tensor) -> Tensor:
        """(tokens, ...) -> the states that the layer computes."""
        return self.layout.select_queries(states)

    def unpack(self, states: Tensor) -> tuple[Tensor]:
        """Computed states -> (batch, length, hidden), zeros at padding; or (outputs, hidden) with an output mask."""
        return (self.layout.select_outputs(states),)

    def repack(self, streams: Sequence[Tensor]) -> Tensor:
        """Inverse of `unpack` for a layer that computes all states."""
        return self.layout.pack(streams[0])

    def content_states(self, states: Tensor) -> Tensor:
        """(batch, length, hidden), zeros at padding; the memory stores them."""
        return self.layout.unpack(states)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, relative: Tensor, biases: RelativeBiases, **options: float
    ) -> tuple[Tensor, Probabilities]:
        """Compute `PaddedStreams.attend` for packed (queries, heads, head_dim) and (tokens, heads, head_dim)."""
        if runs_per_sequence(query):
            return attend_per_sequence(query, key, value, relative, biases, self.ranges, **options), None
        if self.layout.query is not None:
            query = torch.zeros_like(key).index_copy(0, self.layout.query, query)
        query, key, value = (self.layout.unpack(tensor) for tensor in (query, key, value))
        context, _ = self.build_padded().attend(query, key, value, relative, biases, **options)
        return self.select_queries(self.layout.pack(context)), None

    @cached_property
    def ranges(self) -> SequenceRanges:
        """The ranges of each sequence for `attend_per_sequence`."""
        layout = self.layout
        sequences, query_start, key_start = [], 0, 0
        for length, num_queries in zip(layout.lengths, layout.query_counts, strict=True):
            query_stop, key_stop = query_start + num_queries, key_start + length
            distance_indices, num_content = None, length
            if layout.query is not None:
                positions = layout.query[query_start:query_stop, None] - key_start
                distance_indices, num_content = layout.length - positions + torch.arange(length), 0
            if num_queries:
                sequences.append(
                    SequenceRange(
                        query_start, query_stop, key_start, key_stop, num_content, layout.length, distance_indices
                    )
                )
            query_start, key_start = query_stop, key_stop
        query_segments = None if self.segments is None else self.select_queries(self.segments)
        return SequenceRanges(tuple(sequences), *one_hot_segments(query_segments, self.segments))


Streams = PaddedStreams | PackedStreams


def visible_keys(
    shape: tuple[int, int],
    device: torch.device,
    *,
    tokens: Tensor | None = None,
    sequence_numbers: Tensor | None = None,
    order: Tensor | None = None,
    hidden_pairs: Tensor | None = None,
    target_positions: Tensor | None = None,
    memory_length: int = 0,
    memory_tokens: Tensor | None = None,
    causal: bool = False,
    same_length: bool = False,
) -> Tensor | None:
    """The keys visible to each content state and each query state (Yang et al. 2019, sections 2.2 to 2.4).

    Args:
        shape: (batch, length).
        device: Device of the batch.
        tokens: (batch, length) bool, False at padding, which is visible to no state.
        sequence_numbers: (batch, length) number of the sequence of each position; other sequences are not visible.
        order: (batch, length) rank of each position in the factorisation order (section 2.2). A content state attends
            to lower and equal ranks, a query state to lower ranks.
        hidden_pairs: (batch, length, length) bool, an alternative to `order`: True where key j is hidden from query i;
            a content state always attends to itself.
        target_positions: (batch, targets), -1 for a query state without a target, to which no key is visible.
        memory_length: Number of memory keys, which precede the keys of the batch and are visible to all states.
        memory_tokens: (batch, memory) bool, False where the memory is empty and not visible.
        causal: Hide later positions.
        same_length: With `causal`, the number of visible keys is the same for all states (Dai et al. 2019).

    Returns:
        (batch, length + targets, memory + length) bool, or None if all keys are visible.
    """
    batch_size, length = shape
    restrictions = (tokens, sequence_numbers, order, hidden_pairs, target_positions, memory_tokens)
    if not causal and all(tensor is None for tensor in restrictions):
        return None
    all_keys = torch.ones(1, length, memory_length + length, dtype=torch.bool, device=device)
    content = query = all_keys[..., memory_length:]
    if order is not None:
        content = order[:, None, :] <= order[:, :, None]
        query = order[:, None, :] < order[:, :, None]
    elif hidden_pairs is not None:
        content, query = ~hidden_pairs | torch.eye(length, dtype=torch.bool, device=device), ~hidden_pairs
    streams = [content] if target_positions is None else [content, query]
    for number, stream in enumerate(streams):
        memory = all_keys[..., :memory_length].expand(stream.shape[0], -1, -1)
        visible = torch.cat([memory, stream], -1)
        if causal:
            visible = visible & _causal_keys(length, memory_length, same_length, device)
        streams[number] = visible.expand(batch_size, -1, -1)
    if sequence_numbers is not None:
        is_same_sequence = sequence_numbers[:, :, None] == sequence_numbers[:, None, :]
        is_same_sequence = F.pad(is_same_sequence, (memory_length, 0), value=True)
        streams = [visible & is_same_sequence for visible in streams]
    if target_positions is not None:
        columns = target_positions.clamp(min=0)[..., None].expand(-1, -1, memory_length + length)
        streams[1] = streams[1].gather(1, columns) & (target_positions >= 0)[..., None]
    visible = torch.cat(streams, 1)
    if memory_tokens is not None:
        visible = visible & F.pad(memory_tokens, (0, length), value=True)[:, None]
    return visible if tokens is None else visible & F.pad(tokens, (memory_length, 0), value=True)[:, None]


def _causal_keys(length: int, memory_length: int, same_length: bool, device: torch.device) -> Tensor:
    """(length, memory + length) bool: each position and earlier ones; with `same_length`, all positions have the
    attention span of the last one."""
    positions = torch.arange(length, device=device)[:, None]
    keys = torch.arange(memory_length + length, device=device)
    visible = keys <= positions + memory_length
    return visible & ((keys >= positions) | (keys >= length)) if same_length else visible
