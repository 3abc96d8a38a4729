"""The layers of Transformers: embeddings, feed-forward networks, the block, the stack of blocks, and the pooler."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import selected_hidden_states

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.activations import get_activation
from hf_ctxmodels.layers.attention.backends import AttentionMask, prepare_mask
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import can_use_onednn, is_rowwise, linear
from hf_ctxmodels.layers.hook_points import HookPoint, ResidualSum


class TokenPositionTypeEmbeddings(nn.Module):
    """Sum of word, learned position and segment embeddings, normalised (Devlin et al. 2019, figure 2).

    Args:
        vocab_size: Number of tokens.
        width: Width of each table.
        max_positions: Longest sequence.
        num_types: Number of segments; 0 for no segment embeddings (DistilBERT).
        layer_norm_eps: Epsilon of the LayerNorm.
        dropout: Dropout on the result.
        padding_idx: Id with a zero word embedding without a gradient.
        projected_size: Width of a projection of the result (Lan et al. 2019, section 3.1, "factorized embedding
            parameterization"); None for none.

    Attributes:
        embedding_output: Hook point of the result, before the projection.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        max_positions: int,
        num_types: int,
        *,
        layer_norm_eps: float,
        dropout: float,
        padding_idx: int | None,
        projected_size: int | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx)
        self.position_embeddings = nn.Embedding(max_positions, width)
        self.token_type_embeddings = nn.Embedding(num_types, width) if num_types else None
        self.norm = nn.LayerNorm(width, eps=layer_norm_eps)
        self.dropout = Dropout(dropout)
        self.embedding_output = HookPoint()
        self.projection = None if projected_size is None else nn.Linear(width, projected_size)

    def forward(self, words: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Embed tokens.

        Args:
            words: (...) ids, or (..., width) word embeddings.
            position_ids: Same leading shape as `words`, or broadcastable to it.
            token_type_ids: Likewise; None for the first segment. Not read without segment embeddings.

        Returns:
            (..., width), or (..., projected_size).
        """
        embedded = words if words.is_floating_point() else self.word_embeddings(words)
        embedded = embedded + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(position_ids)
            embedded = embedded + self.token_type_embeddings(token_type_ids)
        embedded = self.embedding_output(self.dropout(self.norm(embedded)))
        return embedded if self.projection is None else linear(self.projection, embedded)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        return super().forward(input) * self.embedding_dim**0.5


_CHUNK = 1024  # rows for which a CPU holds the wide states at once, where no gradient needs them


class FeedForward(nn.Module):
    """Two linear maps with an activation between them.

    Args:
        hidden_size: Width of the input and output.
        intermediate_size: Width between the two maps.
        activation: Name of an activation known to transformers (`gelu`, `relu`, ...).
        dropout: Dropout between the activation and the second map.
        bias: Whether the maps have a bias.
        clamp: Whether values that fp16 cannot hold become the largest that it can, before and after the second map.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        clamp: bool = False,
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = get_activation(activation)
        self.dropout = Dropout(dropout)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.clamp = clamp

    def activate(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., intermediate), before dropout."""
        return self.activation(linear(self.up_proj, hidden_states))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        if not self._may_chunk(hidden_states):
            return self._compute(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = torch.empty_like(rows)
        for start in range(0, len(rows), _CHUNK):
            output[start : start + _CHUNK] = self._compute(rows[start : start + _CHUNK])
        return output.view(hidden_states.shape)

    def _compute(self, hidden_states: Tensor) -> Tensor:
        between = self.dropout(self._finite(self.activate(hidden_states)))
        return self._finite(linear(self.down_proj, between))

    def _may_chunk(self, hidden_states: Tensor) -> bool:
        """Whether there are many rows, nobody needs the wide states or the order of dropout, and a CPU computes now."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if hidden_states.numel() <= _CHUNK * hidden_states.shape[-1] or self.activation._forward_hooks:
            return False
        return can_use_onednn(hidden_states) and all(map(is_rowwise, self._maps()))

    def _maps(self) -> list[nn.Module]:
        return [self.up_proj, self.down_proj]

    def _finite(self, tensor: Tensor) -> Tensor:
        return clamp_to_float16(tensor) if self.clamp else tensor


class GatedFeedForward(FeedForward):
    """A feed-forward network whose activation gates a second map of its input (Shazeer 2020, arXiv 2002.05202,
    equation 5): with "gelu_new" it is that of T5 v1.1.

    Args: those of `FeedForward`.

    Attributes:
        gate_proj: The map under the activation; `up_proj` is the linear one.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, activation, bias=bias, **kwargs)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)

    def _maps(self) -> list[nn.Module]:
        return [*super()._maps(), self.gate_proj]

    def activate(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., intermediate), before dropout."""
        gate = self._finite(self.activation(linear(self.gate_proj, hidden_states)))
        return gate * self._finite(linear(self.up_proj, hidden_states))  # infinite times zero would be no number


def clamp_to_float16(tensor: Tensor) -> Tensor:
    """The tensor, in fp16 with its infinite values replaced by the largest finite ones; other types are unchanged."""
    if tensor.dtype is not torch.float16:
        return tensor
    largest = torch.finfo(torch.float16).max
    return tensor.clamp(-largest, largest)


Norm = Literal["post", "pre"]


@dataclass(frozen=True, eq=False)
class Memory:
    """An encoder's output, for cross-attention.

    Attributes:
        states: (..., memory) as packed by `layout`.
        layout: The layout of its tokens.
        mask: The attention mask, prepared by the stack.
        targets_per_source: Consecutive rows of a padded batch that attend to one row of these.
    """

    states: Tensor
    layout: Layout
    mask: AttentionMask = BIDIRECTIONAL
    targets_per_source: int = 1


class BlockOutput(NamedTuple):
    """(..., hidden) at the computed rows, and the probabilities of both attentions, if any."""

    hidden_states: Tensor
    attention: Tensor | None
    cross_attention: Tensor | None


class TransformerBlock(GradientCheckpointingLayer):
    """Self-attention, optional cross-attention, and a feed-forward network, with dropout and residual connections.

    `norm="post"` normalises each sum (Vaswani et al. 2017), `norm="pre"` the input of each sub-layer; the last block's
    output then needs another norm (Radford et al. 2019, section 2.3). Each sub-layer's output is added
    by its `ResidualSum`, at which hooks may change it.

    Args:
        hidden_size: Width of the input and output.
        self_attention: The first sub-layer.
        feed_forward: The last sub-layer, (..., hidden) -> (..., hidden).
        norm: Position of the norms.
        norm_cls: Creates a norm of a width.
        dropout: Dropout on the output of each sub-layer.
        cross_attention: The second sub-layer of a decoder, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        self_attention: SelfAttention,
        feed_forward: nn.Module,
        *,
        norm: Norm,
        norm_cls: Callable[[int], nn.Module],
        dropout: float,
        cross_attention: CrossAttention | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.attention = self_attention
        self.attention_norm = norm_cls(hidden_size)
        self.attention_residual = ResidualSum()
        self.cross_attention = cross_attention
        if cross_attention is not None:
            self.cross_attention_norm = norm_cls(hidden_size)
            self.cross_attention_residual = ResidualSum()
        self.feed_forward = feed_forward
        self.feed_forward_norm = norm_cls(hidden_size)
        self.feed_forward_residual = ResidualSum()
        self.dropout = Dropout(dropout)

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        mask: AttentionMask = BIDIRECTIONAL,
        memory: Memory | None = None,
        *,
        past_key_values: Cache | None = None,
        layer_index: int = 0,
    ) -> BlockOutput:
        """(..., hidden) as packed by `layout` -> the rows it computes.

        Args:
            hidden_states, layout, mask, past_key_values, layer_index: As in `SelfAttention`.
            memory: The encoder's output for cross-attention, or None.
        """
        cache, cross_probabilities = past_key_values, None
        own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        attended, probabilities = self.attention(
            self._before(self.attention_norm, hidden_states),
            layout,
            mask,
            past_key_values=own_cache,
            layer_index=layer_index,
        )
        hidden_states = self.attention_residual(
            layout.select_queries(hidden_states),
            self.dropout(attended),
            self.attention_norm if self.norm == "post" else None,
            layer_index,
        )
        if self.cross_attention is not None:
            if memory is None:
                raise CtxError("This block has cross-attention, but memory is None.", hint="give memory.")
            attended, cross_probabilities = self.cross_attention(
                self._before(self.cross_attention_norm, hidden_states),
                layout,
                memory.states,
                memory.layout,
                memory.mask,
                past_key_values=cache if isinstance(cache, EncoderDecoderCache) else None,
                layer_index=layer_index,
                targets_per_source=memory.targets_per_source,
            )
            hidden_states = self.cross_attention_residual(
                hidden_states,
                self.dropout(attended),
                self.cross_attention_norm if self.norm == "post" else None,
                layer_index,
            )
        del attended  # without gradients its memory is free for the wide states
        fed = self.feed_forward(self._before(self.feed_forward_norm, hidden_states))
        hidden_states = self.feed_forward_residual(
            hidden_states, self.dropout(fed), self.feed_forward_norm if self.norm == "post" else None, layer_index
        )
        return BlockOutput(hidden_states, probabilities, cross_probabilities)

    def _before(self, norm: nn.Module, states: Tensor) -> Tensor:
        return norm(states) if self.norm == "pre" else states


HiddenStates = bool | int | Sequence[int] | None
"""Which hidden states to record: all, none, or those with these numbers (0 is the input of the first block)."""


@dataclass(frozen=True, eq=False)
class StackOutput:
    """What a stack gives.

    Attributes:
        last_hidden_state: (batch, length, hidden), zeros at padding in a packed layout; with an output mask (targets,
            hidden) in row-major order.
        rows: (..., hidden) all computed rows.
        layout: Where these lie: `layout.first_tokens(rows)` is what a pooler reads.
        hidden_states: The input of every block, (batch, length, hidden), and `last_hidden_state`, None in place of
            those not chosen; None if none were asked for. What follows is computed from them, so that gradients with
            respect to them can be taken.
        attentions: (batch, heads, queries, keys) of every block; None if they were not asked for.
        cross_attentions: Likewise; empty without cross-attention.
    """

    last_hidden_state: Tensor
    rows: Tensor
    layout: Layout
    hidden_states: tuple[Tensor | None, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


def run_stack(
    blocks: Iterable[nn.Module],
    hidden_states: Tensor,
    layout: Layout,
    masks: MaskSpec | Sequence[MaskSpec] = BIDIRECTIONAL,
    *,
    memory: Memory | None = None,
    past_key_values: Cache | None = None,
    final_norm: Callable[[Tensor], Tensor] | None = None,
    output_mask: Tensor | None = None,
    include_first_tokens: bool = False,
    zero_padding: bool = False,
    output_hidden_states: HiddenStates = None,
    output_attentions: bool | None = None,
) -> StackOutput:
    """Run blocks one after the other.

    Args:
        blocks: `TransformerBlock`s in the order they are applied; one object may stand at several depths.
        hidden_states: (..., hidden) as packed by `layout`.
        layout: Where the tokens lie.
        masks: Who sees whom: one for all blocks, or one for each.
        memory: What their cross-attention reads, or None.
        past_key_values: The cache that `layout` was built with, or None.
        final_norm: Applied to the last block's output: the norm of pre-norm models, with dropout if they have it.
        output_mask: (batch, length) bool, the positions whose outputs are used: the last block of a packed layout is
            computed only there. None for all.
        include_first_tokens: Compute each row's first token as well.
        zero_padding: Set padding positions to 0 before the first block and after each, where they are computed at all.
        output_hidden_states, output_attentions: What to record.

    Raises:
        CtxError: Attention weights are asked for, and the implementation in use gives none.
    """
    chain = list(blocks)
    final = layout if output_mask is None else layout.select(output_mask, include_first_tokens=include_first_tokens)
    views = _views(masks, len(chain), layout, final, memory, hidden_states)
    padding = layout.padding_mask() if zero_padding else None
    kept = recorded_layer_numbers(output_hidden_states, len(chain) + 1)
    recorded: list[Tensor | None] = []
    weights: list[tuple[Tensor, Tensor | None]] | None = [] if output_attentions else None
    for number, (block, view) in enumerate(zip(chain, views, strict=True)):
        hidden_states, state = _recorded(_zeroed(hidden_states, padding), layout, number in kept)
        recorded.append(state)
        hidden_states, *probabilities = block(
            hidden_states, view.layout, view.mask, view.memory, past_key_values=past_key_values, layer_index=number
        )
        if weights is not None:
            weights.append(_checked_weights(*probabilities))
    hidden_states = _zeroed(hidden_states if final_norm is None else final_norm(hidden_states), padding)
    output = final.select_outputs(hidden_states)
    recorded.append(output if len(chain) in kept else None)
    if recorded[-1] is not None and output_mask is None:
        hidden_states = final.pack(output)
    states = None if output_hidden_states is None or output_hidden_states is False else tuple(recorded)
    return StackOutput(output, hidden_states, final, states, *_by_kind(weights))


def _zeroed(rows: Tensor, padding: Tensor | None) -> Tensor:
    """The rows with 0 at padding; as they are where that is None."""
    return rows if padding is None else rows.masked_fill(padding, 0.0)


def _recorded(rows: Tensor, layout: Layout, kept: bool) -> tuple[Tensor, Tensor | None]:
    """The rows and, if they are kept, what is recorded of them. The rows are made from that, so that gradients with
    respect to it pass through it."""
    state = layout.unpack(rows) if kept else None
    return (rows if state is None else layout.pack(state)), state


def _by_kind(
    weights: list[tuple[Tensor, Tensor | None]] | None,
) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Attention weights of all blocks, and of cross-attention where there is any; None where none are recorded."""
    if weights is None:
        return None, None
    return tuple(own for own, _ in weights), tuple(cross for _, cross in weights if cross is not None)


class _View(NamedTuple):
    """What one block attends by."""

    layout: Layout
    mask: AttentionMask
    memory: Memory | None


def _views(
    masks: MaskSpec | Sequence[MaskSpec],
    count: int,
    layout: Layout,
    final: Layout,
    memory: Memory | None,
    like: Tensor,
) -> list[_View]:
    """One for each block; blocks that attend alike share the prepared mask."""
    specs = [masks] * count if isinstance(masks, MaskSpec) else list(masks)
    if len(specs) != count:
        raise CtxError(f"{len(specs)} masks for {count} blocks; give one for all, or one for each.")
    made: list[tuple[MaskSpec, Layout, _View]] = []
    views = []
    for number, spec in enumerate(specs):
        place = final if number + 1 == count else layout
        known = next((view for key, where, view in made if key is spec and where is place), None)
        if known is None:
            seen = None if memory is None else _prepare_memory(memory, place, like)
            known = _View(place, prepare_mask(spec, place, like), seen)
            made.append((spec, place, known))
        views.append(known)
    return views


def _prepare_memory(memory: Memory, layout: Layout, like: Tensor) -> Memory:
    return replace(
        memory, mask=prepare_mask(memory.mask, layout.share_source(memory.targets_per_source), like, memory.layout)
    )


def _checked_weights(probabilities: Tensor | None, cross_probabilities: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if probabilities is None or probabilities.dim() != 4:  # flex attention may give the logarithms of sums
        raise CtxError(
            "The attention implementation in use gives no attention weights, which output_attentions asks for.",
            hint='use attn_implementation="eager": model.set_attn_implementation("eager").',
        )
    return probabilities, cross_probabilities


def recorded_layer_numbers(choice: HiddenStates, count: int) -> set[int]:
    """Which of `count` hidden states to record, by their numbers from 0; a negative choice counts from the last."""
    if choice is None or choice is False:
        return set()
    numbers = selected_hidden_states(choice)
    return set(range(count)) if numbers is None else {number % count for number in numbers if -count <= number < count}


class FirstTokenPooler(nn.Module):
    """Dense and tanh on the first token's state."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first_states: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return self.dense(first_states).tanh()
