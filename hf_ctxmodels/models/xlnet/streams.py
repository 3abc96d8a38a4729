"""XLNet's two streams: the inputs of the encoder and their validation, and the layouts of the states that a layer
computes and of the keys that they attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from hf_ctxmodels.core.compiled_ops import is_compiled
from hf_ctxmodels.core.constants import IGNORE_INDEX, NO_TARGET
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, needs_static_sizes
from hf_ctxmodels.core.inputs import check_tensors, sequence_numbers
from hf_ctxmodels.layers.attention.backends import missing_attention_weights
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout, TracedLayout
from hf_ctxmodels.layers.attention.prepared_masks import attention_dtype
from hf_ctxmodels.layers.cpu.compiled_relative_attention import relative_attention_traced
from hf_ctxmodels.layers.cpu.relative_attention import (
    RelativeBiases,
    SequenceRanges,
    attend_per_sequence,
    build_ranges,
    runs_per_sequence,
)
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.relative_attention import (
    AttentionPattern,
    DensePattern,
    dense_attention,
    eager_attention,
    flex_attention,
)

Implementation = Literal["eager", "flex_attention", "sdpa"]

Probabilities = Tensor | tuple[Tensor, Tensor] | None
"""(batch, heads, queries, keys) attention probabilities, a pair (content stream, query stream) where a layer computes
both streams; None if the attention implementation does not return them."""


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """Validated inputs of one forward pass.

    There is a content state for each position of the batch, followed by a query state for each target (Yang et al.
    2019, section 2.3). The keys are the memory, followed by the positions of the batch. Other attributes as in
    `CtxXLNetModel.forward`.

    Attributes:
        tokens: (batch, length) ids, or (batch, length, hidden) embeddings.
        token_mask: (batch, length) bool, False at padding; None without padding.
        memory: (batch, memory, hidden) states of earlier segments per layer, zeros where empty; or None.
        order: (batch, length) rank of each position in the factorization order (section 2.2), -1 for positions that are
            visible to all; or None. Key j is visible to the content state at i if order[j] <= order[i], and to the
            query state of target i if order[j] < order[i].
        hidden_pairs: (batch, length, length) bool, the form of the order in transformers: True where key j is hidden
            from position i; or None. A content state always attends to itself.
    """

    config: CtxXLNetConfig
    tokens: Tensor
    token_mask: Tensor | None = None
    token_types: Tensor | None = None
    sequence_ids: Tensor | None = None
    memory: Sequence[Tensor] | None = None
    order: Tensor | None = None
    hidden_pairs: Tensor | None = None
    target_positions: Tensor | None = None
    output_mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.output_mask is not None and self.target_positions is not None:
            raise CtxError(
                "output_mask cannot be combined with targets, for which the query stream is returned.",
                hint="remove output_mask.",
            )
        if self.sequence_ids is not None and self.memory is not None:
            raise CtxError("mems cannot be combined with packed sequences (sequence_ids).", hint="remove one of them.")
        if self.config.bi_data and self.tokens.shape[0] % 2:
            raise CtxError(
                f"With bi_data the second half of a batch is reversed text, but the batch size {self.tokens.shape[0]} "
                "is odd.",
                hint="use an even number of examples, or set config.bi_data=False.",
            )

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Number of columns of the batch."""
        return self.tokens.shape[1]

    @property
    def memory_length(self) -> int:
        """Number of memory keys."""
        return 0 if self.memory is None else self.memory[0].shape[1]

    @property
    def has_inner_padding(self) -> bool:
        """Whether there is padding between the tokens of a sequence, which counts in their distances."""
        if self.token_mask is None or is_compiled():  # `build_ranges` regards it
            return False
        if self.sequence_ids is not None:
            return bool((host_copy(self.token_mask) != (host_copy(self.sequence_ids) != 0)).any())
        token_mask = host_copy(self.token_mask)
        starts = token_mask[:, 1:] & ~token_mask[:, :-1]
        return bool((token_mask[:, 0].long() + starts.sum(1) != 1).any())

    @property
    def state_positions(self) -> Tensor:
        """(batch, length + targets) column of each content and query state."""
        positions = torch.arange(self.length, device=self.tokens.device).expand(self.batch_size, -1)
        if self.target_positions is None:
            return positions
        return torch.cat([positions, self.target_positions.clamp(min=0)], 1)

    def build_pattern(self) -> AttentionPattern:
        """The attention pattern of all states in the padded batch. The memory belongs to segment 0."""
        positions = self.state_positions
        query_segments = key_segments = None
        if self.token_types is not None:
            query_segments = self.token_types.gather(1, positions)
            key_segments = F.pad(self.token_types, (self.memory_length, 0))
        return AttentionPattern(self.length - positions[..., None], self.visible_keys(), query_segments, key_segments)

    def visible_keys(self) -> Tensor | None:
        """(batch, length + targets, memory + length) bool, the keys that each state attends to; None for all keys.

        Memory is visible to all states, except where it is zero, that is, empty. No key is visible to the query state
        of no target. With `attn_type="uni"` later positions are hidden. With `same_length` the number of visible keys
        is the same for all states: of Transformer-XL at most `attention_window`, of XLNet also in the first segment.
        """
        memory_mask = None if self.memory is None else (self.memory[-1] != 0).any(-1)
        if memory_mask is not None and memory_mask.device.type == "cpu" and not is_traced(memory_mask):
            memory_mask = None if bool(memory_mask.all()) else memory_mask  # a device is not read for it
        is_causal, targets, memory_length = self.config.attn_type == "uni", self.target_positions, self.memory_length
        restrictions = (self.token_mask, self.sequence_ids, self.order, self.hidden_pairs, targets, memory_mask)
        if not is_causal and all(tensor is None for tensor in restrictions):
            return None
        device, positions = self.tokens.device, self.state_positions[..., None]
        visible = torch.ones(self.batch_size, self.length, self.length, dtype=torch.bool, device=device)
        visible_to_queries = visible
        if self.order is not None:
            visible = self.order[:, None, :] <= self.order[:, :, None]
            visible_to_queries = self.order[:, None, :] < self.order[:, :, None]
        elif self.hidden_pairs is not None:
            visible_to_queries = ~self.hidden_pairs
            visible = visible_to_queries | torch.eye(self.length, dtype=torch.bool, device=device)
        if targets is not None:
            columns = positions[:, self.length :].expand(-1, -1, self.length)
            visible = torch.cat([visible, visible_to_queries.gather(1, columns)], 1)
        if self.sequence_ids is not None:
            numbers = sequence_numbers(self.sequence_ids)
            visible = visible & (numbers.gather(1, positions[..., 0])[..., None] == numbers[:, None, :])
        visible = F.pad(visible, (memory_length, 0), value=True)
        if is_causal:
            keys = torch.arange(memory_length + self.length, device=device)
            visible = visible & (keys <= positions + memory_length)
            if self.config.attention_window is not None:
                visible = visible & (keys > positions + memory_length - self.config.attention_window)
            elif self.config.same_length:
                visible = visible & ((keys >= positions) | (keys >= self.length))
        if targets is not None:
            visible = visible & F.pad(targets >= 0, (self.length, 0), value=True)[..., None]
        if memory_mask is not None:
            visible = visible & F.pad(memory_mask, (0, self.length), value=True)[:, None]
        if self.token_mask is not None:
            visible = visible & F.pad(self.token_mask, (memory_length, 0), value=True)[:, None]
        return visible


@dataclass(frozen=True, eq=False)
class StreamLayout:
    """The layout of the states that a layer computes, and of their keys.

    The states are content states, followed by query states, if any. Both attend to the keys of the content stream, so
    that a layer makes one attention call. The states of a single stream may be packed, that is, the tokens of all
    sequences concatenated without padding.

    Attributes:
        inputs: The batch.
        encodings: (groups, memory + 2 * length, hidden) encodings of the distances memory + length, ..., 1 - length;
            two groups if the second half of the batch holds reversed text (`bi_data`).
        layout: The layout of the content states, and the positions whose outputs are returned.
        pattern: The attention pattern of the computed states in the padded batch; None if it is not needed.
        dense_pattern: The tensors of this pattern for `dense_attention`; None if it is not used.
        implementation: "eager", the reference implementation, which returns the probabilities; "flex_attention"; or
            "sdpa", on a CPU the implementation per sequence.
        is_query_only: Whether only the query states are computed, as in a last layer; the content states are keys.
    """

    inputs: EncoderInputs
    encodings: Tensor
    layout: Layout
    pattern: AttentionPattern | None
    implementation: Implementation
    is_query_only: bool = False
    dense_pattern: DensePattern | None = None

    @classmethod
    def build(cls, inputs: EncoderInputs, encodings: Tensor, *, output_attentions: bool | None) -> "StreamLayout":
        """Choose the layout of a batch: packed where the result is the same, padded otherwise.

        The padded layout is used for `config.unpad=False`, eager attention and FlexAttention, `output_attentions`,
        permutations and targets, memory, `attn_type="uni"`, `bi_data`, exported graphs and, outside of compiled graphs,
        padding between the tokens of a sequence.
        """
        config = inputs.config
        implementation: Implementation = "sdpa"
        if config._attn_implementation == "flex_attention":
            if output_attentions:
                raise missing_attention_weights()
            implementation = "flex_attention"
        elif output_attentions or config._attn_implementation == "eager":
            implementation = "eager"
        is_permuted = inputs.order is not None or inputs.hidden_pairs is not None or inputs.target_positions is not None
        is_packed = (
            config.unpad
            and config.attn_type == "bi"
            and implementation == "sdpa"
            and not (config.bi_data or is_permuted or inputs.memory is not None)
            and not (needs_static_sizes(inputs.tokens) or inputs.has_inner_padding)
        )
        layout: Layout = PaddedLayout(inputs.batch_size, inputs.length)
        if is_packed:
            layout_class = TracedLayout if is_compiled() else PackedLayout
            layout = layout_class.build(
                inputs.batch_size, inputs.length, inputs.token_mask, inputs.sequence_ids, inputs.tokens.device
            )
        is_dense = implementation == "sdpa" and not runs_per_sequence(encodings)
        pattern = inputs.build_pattern() if is_dense or not is_packed else None
        if pattern is not None and implementation == "flex_attention":
            pattern = pattern.with_block_mask()
        streams = cls(inputs, encodings, layout, pattern, implementation)
        return streams._with_dense_pattern() if is_dense else streams

    def _with_dense_pattern(self) -> "StreamLayout":
        config, pattern = self.inputs.config, self.pattern or self.inputs.build_pattern()
        num_keys, dtype = self.inputs.memory_length + self.inputs.length, attention_dtype(self.encodings)
        scaling = (config.hidden_size // config.num_attention_heads) ** -0.5
        return replace(self, dense_pattern=DensePattern.build(pattern, num_keys, dtype, scaling))

    @property
    def has_queries(self) -> bool:
        """Whether there is a query stream."""
        return self.inputs.target_positions is not None

    def for_last_layer(self, *, returns_content: bool) -> "StreamLayout":
        """The layout for the last layer, which computes only the returned states: with `returns_content` the content
        states in addition to the query states."""
        if self.has_queries and self.pattern is not None:
            if returns_content:
                return self
            queries, dense = slice(self.inputs.length, None), self.dense_pattern
            dense = None if dense is None else dense.select_queries(queries)
            return replace(self, pattern=self.pattern.select_queries(queries), dense_pattern=dense, is_query_only=True)
        mask = self.inputs.output_mask
        return self if mask is None else replace(self, layout=self.layout.select(mask, include_first_tokens=False))

    def select_keys(self, states: Tensor) -> Tensor:
        """(..., hidden) states -> the content states."""
        return states[:, : self.inputs.length] if self.has_queries else states

    def select_queries(self, states: Tensor) -> Tensor:
        """(..., hidden) states -> the states that the layer computes."""
        return states[:, self.inputs.length :] if self.is_query_only else self.layout.select_queries(states)

    def unpack(self, states: Tensor) -> tuple[Tensor | None, ...]:
        """Computed states -> (batch, length, hidden) or, with an output mask, (outputs, hidden) for a single stream;
        for two streams (batch, length, hidden), None if not computed, and (batch, targets, hidden)."""
        if not self.has_queries:
            outputs, token_mask = self.layout.select_outputs(states), self.inputs.token_mask
            if token_mask is not None and self.inputs.config.unpad and outputs.dim() == 3:  # as if padding were skipped
                outputs = outputs * token_mask[..., None]
            return (outputs,)
        if self.is_query_only:
            return None, states
        return states[:, : self.inputs.length], states[:, self.inputs.length :]

    def repack(self, streams: Sequence[Tensor]) -> Tensor:
        """Inverse of `unpack` for a layer that computes all states."""
        return torch.cat(list(streams), 1) if self.has_queries else self.layout.pack(streams[0])

    def content_states(self, states: Tensor) -> Tensor:
        """(batch, length, hidden) of the content stream, zeros at padding; the memory stores them."""
        states, token_mask = self.layout.unpack(self.select_keys(states)), self.inputs.token_mask
        return states if token_mask is None or isinstance(self.layout, PackedLayout) else states * token_mask[..., None]

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
        """The context of the computed states, in the shape of `query`, and the probabilities.

        Arguments as in `eager_attention`, with (groups, distances, heads, head_dim) `relative` and, if packed, without
        the axis of the batch.
        """
        if self.implementation == "sdpa" and runs_per_sequence(query):
            queries, keys, values = (tensor.flatten(0, -3) for tensor in (query, key, value))
            options = {"scaling": scaling, "dropout": dropout}
            if is_compiled():
                context = self._attend_traced(queries, keys, values, relative, biases, **options)
            else:
                context = attend_per_sequence(queries, keys, values, relative, biases, self.ranges, **options)
            return context.unflatten(0, query.shape[:-2]), None
        if relative.shape[0] > 1:
            relative = relative.repeat_interleave(query.shape[0] // relative.shape[0], 0)
        layout = self.layout
        if isinstance(layout, PackedLayout):
            if layout.query is not None:
                query = torch.zeros_like(key).index_copy(0, layout.query, query)
            query, key, value = layout.unpack(torch.stack((query, key, value), 1)).unbind(2)
        if self.implementation == "sdpa":
            streams = self._with_dense_pattern() if self.dense_pattern is None else self  # None in autocast on a CPU
            assert streams.dense_pattern is not None
            context = dense_attention(
                query, key, value, relative, biases, streams.dense_pattern, scaling=scaling, dropout=dropout
            )
            return layout.select_queries(layout.pack(context)), None  # both are the identity in a padded layout
        pattern = self.pattern or self.inputs.build_pattern()
        if self.implementation == "flex_attention":
            context = flex_attention(query, key, value, relative, biases, pattern, scaling=scaling, dropout=dropout)
            return context, None
        context, probabilities = eager_attention(
            query, key, value, relative, biases, pattern, scaling=scaling, dropout=dropout
        )
        if self.has_queries and not self.is_query_only:
            length = self.inputs.length
            return context, (probabilities[:, :, :length], probabilities[:, :, length:])
        return context, probabilities

    @cached_property
    def ranges(self) -> SequenceRanges:
        """The ranges of each sequence for `attend_per_sequence`."""
        inputs, layout = self.inputs, self.layout
        arguments = self._range_arguments()
        if isinstance(layout, PackedLayout):
            counts = layout.query_counts, layout.lengths
        else:
            num_keys = inputs.memory_length + inputs.length
            num_queries = len(arguments["offsets"]) // inputs.batch_size
            counts = (num_queries,) * inputs.batch_size, (num_keys,) * inputs.batch_size
        return build_ranges(*counts, length=inputs.length, num_groups=len(self.encodings), **arguments)

    def _range_arguments(self) -> dict[str, Any]:
        """Arguments of `build_ranges`, without the counts."""
        inputs, layout = self.inputs, self.layout
        if not isinstance(layout, PackedLayout):
            pattern = self.pattern or inputs.build_pattern()
            return {
                "offsets": pattern.distance_offsets.flatten(0, 1),
                "num_content": 0 if self.is_query_only else inputs.length,
                "visible": pattern.visible,
                "query_segments": pattern.query_segments,
                "key_segments": pattern.key_segments,
            }
        key_segments = None if inputs.token_types is None else layout.pack(inputs.token_types)
        positions = torch.arange(inputs.length, device=inputs.tokens.device).expand(inputs.batch_size, -1)
        key_columns = layout.pack(positions)
        return {
            "offsets": inputs.length - layout.select_queries(key_columns)[:, None],
            "num_content": inputs.length if layout.query is None else 0,
            "query_segments": None if key_segments is None else layout.select_queries(key_segments),
            "key_segments": key_segments,
            "key_columns": key_columns,
        }

    def _attend_traced(
        self, query: Tensor, key: Tensor, value: Tensor, relative: Tensor, biases: RelativeBiases, **options: Any
    ) -> Tensor:
        """`attend_per_sequence` in a compiled graph."""
        layout, arguments = self.layout, self._range_arguments()
        if isinstance(layout, TracedLayout):
            arguments |= {"query_lengths": layout.query_lengths, "key_lengths": layout.lengths}
            if layout.query is None:  # the arguments of an operator in a graph are different tensors
                arguments["query_segments"] = None
        arguments |= {"batch_size": self.inputs.batch_size, "length": self.inputs.length}
        return relative_attention_traced(query, key, value, relative, biases, **arguments, **options)


def check_memory(mems: Sequence[Tensor] | None, config: CtxXLNetConfig, batch_size: int) -> Sequence[Tensor] | None:
    """The memory, or None if it is empty; raises CtxError for another type, number, shape or length of the tensors."""
    if mems is None:
        return None
    unchanged = "pass mems unchanged, as returned by the model."
    if isinstance(mems, Cache) or not all(isinstance(memory, Tensor) for memory in mems):
        raise CtxError(f"mems is a {type(mems).__name__}, expected a tuple of tensors.", hint=unchanged)
    if not len(mems):
        return None
    if len(mems) != config.num_hidden_layers:
        raise CtxError(
            f"mems has {len(mems)} tensors, expected one for each of the {config.num_hidden_layers} layers.",
            hint=unchanged,
        )
    length = mems[0].shape[1] if mems[0].dim() == 3 else -1
    for number, memory in enumerate(mems):
        if memory.dim() != 3 or memory.shape[0] != batch_size or memory.shape[2] != config.hidden_size:
            raise CtxError(
                f"mems[{number}] is {tuple(memory.shape)}, expected (batch={batch_size}, memory, "
                f"hidden={config.hidden_size}).",
                hint="pass the memory that this model returned for the same batch; transpose the memory of a model of "
                "transformers: mem.transpose(0, 1).",
            )
        if memory.shape[1] != length:
            raise CtxError(
                f"mems[{number}] has {memory.shape[1]} positions, expected {length} as in mems[0].", hint=unchanged
            )
    if config.mem_len and length > config.mem_len:
        raise CtxError(
            f"mems has {length} positions, above mem_len={config.mem_len}.",
            hint="truncate the memory (memory[:, -mem_len:]), or raise config.mem_len.",
        )
    return mems


def check_permutation(
    tokens: Tensor,
    token_mask: Tensor | None,
    permutation_order: Tensor | None,
    target_positions: Tensor | None,
    perm_mask: Tensor | None,
    target_mapping: Tensor | None,
) -> dict[str, Tensor | None]:
    """The arguments `order`, `hidden_pairs` and `target_positions` of `EncoderInputs`.

    `tokens` and `token_mask` as in `EncoderInputs`, the other arguments as in `CtxXLNetModel.forward`.

    Raises:
        CtxError: Both forms are passed, a shape does not match the input, or a target cannot be predicted.
    """
    batch_size, length = tokens.shape[:2]
    alternatives = {
        "permutation_order and perm_mask": (permutation_order, perm_mask),
        "target_positions and target_mapping": (target_positions, target_mapping),
    }
    for names, (compact, dense) in alternatives.items():
        if compact is not None and dense is not None:
            raise CtxError(f"{names} are two forms of the same argument.", hint="pass only one of them.")
    shapes: dict[str, tuple[Tensor | None, tuple[int | str, ...]]] = {
        "permutation_order": (permutation_order, (batch_size, length)),
        "perm_mask": (perm_mask, (batch_size, length, length)),
        "target_mapping": (target_mapping, (batch_size, "targets", length)),
        "target_positions": (target_positions, (batch_size, "targets")),
    }
    for name, (tensor, expected) in shapes.items():
        if tensor is None:
            continue
        if tensor.dim() != len(expected) or any(
            size not in ("targets", actual) for size, actual in zip(expected, tensor.shape)
        ):
            sizes = ", ".join(map(str, expected))
            raise CtxError(
                f"{name} is {tuple(tensor.shape)}, expected ({sizes}) for this input.",
                hint=f"pass {name} of this shape.",
            )
    if target_mapping is not None:
        is_selected = target_mapping != 0
        is_invalid = (is_selected.sum(-1) > 1) | (is_selected & (target_mapping != 1)).any(-1)
        hint = "set 1 at the position to predict, else 0."
        _reject_elements("target_mapping", target_mapping, is_invalid, " is not one-hot.", hint)
        target_positions = is_selected.long().argmax(-1).masked_fill(~is_selected.any(-1), NO_TARGET)
    elif target_positions is not None:
        if permutation_order is None and perm_mask is None:
            raise CtxError(
                "target_positions requires permutation_order: otherwise each target could attend to itself.",
                hint="pass permutation_order (batch, length), as the data collator does, or perm_mask.",
            )
        _check_target_positions(target_positions, permutation_order, token_mask, length)
    if permutation_order is not None:
        problem = "; expected ranks 0, 1, ..., or -1 for positions that are visible to all."
        ranks = host_copy(permutation_order)
        _reject_elements("permutation_order", ranks, ranks < -1, problem, "use such ranks.")
    hidden_pairs = None if perm_mask is None else perm_mask > 0
    return {"order": permutation_order, "hidden_pairs": hidden_pairs, "target_positions": target_positions}


def _check_target_positions(
    target_positions: Tensor, permutation_order: Tensor | None, token_mask: Tensor | None, length: int
) -> None:
    """Raise CtxError for a target that cannot be predicted; skipped in traced graphs, for which the length in a message
    would be a constant."""
    if is_traced(target_positions):
        return
    positions = host_copy(target_positions)
    columns = positions.clamp(0, length - 1)
    is_outside = (positions < -1) | (positions >= length)
    problems = {f", outside [0, length={length}) and not -1 (no target).": is_outside}
    if permutation_order is not None:
        is_visible = host_copy(permutation_order).gather(1, columns) < 0
        problems[", which has rank -1 in permutation_order and is visible to all positions."] = is_visible
    if token_mask is not None:
        problems[", where attention_mask is 0 (padding)."] = ~host_copy(token_mask).gather(1, columns)
    for problem, is_invalid in problems.items():
        is_invalid = is_invalid & (positions != NO_TARGET)
        hint = "choose positions of real tokens to predict, or -1."
        _reject_elements("target_positions", positions, is_invalid, problem, hint)


def check_target_labels(labels: Tensor, target_positions: Tensor | None, target_mapping: Tensor | None) -> None:
    """Raise CtxError if the shape of the labels does not match the targets, or a label has no target."""
    check_tensors(target_positions=target_positions, target_mapping=target_mapping)
    targets = target_mapping if target_positions is None else target_positions
    if targets is not None and labels.shape != targets.shape[:2]:
        raise CtxError(
            f"labels is {tuple(labels.shape)}, but the targets are {tuple(targets.shape[:2])}.",
            hint="pass a label for each target; -100 is ignored.",
        )
    if target_positions is not None:
        misplaced = (host_copy(labels) != IGNORE_INDEX) & (host_copy(target_positions) == NO_TARGET)
        problem = ", but target_positions is -1 (no target) there."
        _reject_elements("labels", labels, misplaced, problem, "use the label -100.")


def _reject_elements(name: str, tensor: Tensor, is_invalid: Tensor, problem: str, hint: str) -> None:
    """Raise CtxError for the first element, or vector, of the tensor that is (batch, columns) `is_invalid`."""
    if not is_traced(is_invalid) and bool(is_invalid.any()):
        row, column = is_invalid.nonzero()[0].tolist()
        value = f" is {int(tensor[row, column])}" if tensor.dim() == 2 else ""
        raise CtxError(f"{name}[{row}, {column}]{value}{problem}", hint=hint)
