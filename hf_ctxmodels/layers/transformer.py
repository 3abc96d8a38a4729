"""The layers of Transformers: embeddings, feed-forward networks, the block, the stack of blocks, and the pooler."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import selected_hidden_states

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.backends import missing_attention_weights
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.attention.prepared_masks import AttentionMask, prepare_mask
from hf_ctxmodels.layers.common import HookPoint, get_activation
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import apply_in_chunks, linear, prepack_linear_layers
from hf_ctxmodels.layers.prepacked_block import PrepackedBlock

Norm = Literal["post", "pre"]

HiddenStatesSelection = bool | int | Sequence[int] | None  # all, none, or indices; 0 is the first block's input


class TokenPositionTypeEmbeddings(nn.Module):
    """Sum of word, learned position and segment embeddings, normalized (Devlin et al. 2019, figure 2).

    Args:
        num_types: Number of segments; 0 for no segment embeddings (DistilBERT).
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

    def forward(self, tokens: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """(...) ids or (..., width) word embeddings, with ids broadcastable to them -> (..., width or projected size).

        `token_type_ids` is None for the first segment, and ignored without segment embeddings.
        """
        embeddings = tokens if tokens.is_floating_point() else self.word_embeddings(tokens)
        embeddings = embeddings + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(position_ids)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        embeddings = self.embedding_output(self.dropout(self.norm(embeddings)))
        return embeddings if self.projection is None else linear(self.projection, embeddings)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        return super().forward(input) * self.embedding_dim**0.5


class FeedForward(nn.Module):
    """Two linear layers with an activation and dropout between them (Vaswani et al. 2017, section 3.3).

    With `clamp`, infinite float16 values before and after the second layer are clamped to the largest finite ones.
    """

    tp_styles: ClassVar[Mapping[str, str]] = {"up_proj": "colwise", "down_proj": "rowwise"}

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

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        return apply_in_chunks(self.transform, hidden_states, self)

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Compute `forward` for all rows at once."""
        intermediate = self.dropout(self._clamp(self.activate(hidden_states)))
        return self._clamp(linear(self.down_proj, intermediate))

    def activate(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., intermediate), before dropout."""
        return self.activation(linear(self.up_proj, hidden_states))

    def _clamp(self, tensor: Tensor) -> Tensor:
        return clamp_to_float16(tensor) if self.clamp else tensor


class GatedFeedForward(FeedForward):
    """A feed-forward network with a gate, the activation of another linear layer (Shazeer 2020, arXiv 2002.05202,
    equation 6); with "gelu_new" the feed-forward network of T5 v1.1. Arguments as in `FeedForward`."""

    tp_styles = {**FeedForward.tp_styles, "gate_proj": "colwise"}

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, activation, bias=bias, **kwargs)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)

    def activate(self, hidden_states: Tensor) -> Tensor:
        """The gated (..., intermediate) values."""
        gate = self._clamp(self.activation(linear(self.gate_proj, hidden_states)))
        return gate * self._clamp(linear(self.up_proj, hidden_states))  # infinity times zero would be NaN


def clamp_to_float16(tensor: Tensor) -> Tensor:
    """Clamp infinite values of a float16 tensor to the largest finite ones; other dtypes are unchanged."""
    if tensor.dtype is not torch.float16:
        return tensor
    limit = torch.finfo(torch.float16).max
    return tensor.clamp(-limit, limit)


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoder output for cross-attention.

    Attributes:
        states: (..., hidden) as packed by `layout`.
        mask: The attention mask, prepared by the stack.
        targets_per_source: Number of consecutive rows of a padded batch that attend to the same row of `states`.
    """

    states: Tensor
    layout: Layout
    mask: AttentionMask = BIDIRECTIONAL
    targets_per_source: int = 1


class BlockOutput(NamedTuple):
    """(..., hidden) at the computed tokens, and the attention probabilities, None if not available."""

    hidden_states: Tensor
    attention: Tensor | None
    cross_attention: Tensor | None


class ResidualSum(nn.Module):
    """Sum of a sub-layer's (..., hidden) input and output, normalized with post-norm; forward pre-hooks may change its
    arguments, which are always positional."""

    def forward(self, hidden_states: Tensor, output: Tensor, norm: nn.Module | None, layer_index: int) -> Tensor:
        """Add and normalize; `norm` is None with pre-norm, and the block's `layer_index` is for hooks."""
        total = hidden_states + output
        return total if norm is None else norm(total)


class CheckpointingWithCache:
    """Mixin for blocks that use the cache despite gradient checkpointing if no gradients are computed, as in
    `generate`."""

    @property
    def _can_checkpoint_with_cache(self) -> bool:
        # transformers drops the cache of a checkpointed block, because its recomputation would update the cache again
        return not torch.is_grad_enabled()


class TransformerBlock(CheckpointingWithCache, GradientCheckpointingLayer):
    """Self-attention, optional cross-attention, and a feed-forward network, with dropout and residual connections.

    `norm="post"` normalizes each sum (Vaswani et al. 2017), `norm="pre"` the input of each sub-layer; the last block's
    output then needs another norm (Radford et al. 2019, section 2.3).
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
        self.cross_attention: CrossAttention | None = None
        if cross_attention is not None:
            self.add_cross_attention(cross_attention)
        self.feed_forward = feed_forward
        self.feed_forward_norm = norm_cls(hidden_size)
        self.feed_forward_residual = ResidualSum()
        self.dropout = Dropout(dropout)
        self.prepacked: PrepackedBlock | None = None

    def add_cross_attention(self, cross_attention: CrossAttention) -> None:
        """Add cross-attention between self-attention and the feed-forward network, with a norm like the others."""
        self.cross_attention = cross_attention
        self.cross_attention_norm = deepcopy(self.attention_norm)
        self.cross_attention_residual = ResidualSum()

    def prepack(self) -> None:
        """Prepack the linear layers for inference, see `CtxPreTrainedModel.prepare_for_inference`."""
        prepack_linear_layers(self)
        has_plain_layers = type(self.attention) is SelfAttention and type(self.feed_forward) is FeedForward
        if has_plain_layers and self.cross_attention is None:
            self.prepacked = PrepackedBlock(self)

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
        """Run the block; (..., hidden) at all tokens of `layout` -> (..., hidden) at the tokens it computes.

        `memory` is the encoder's output for cross-attention; the other arguments are as in `SelfAttention`.
        """
        if self.prepacked is not None and (output := self.prepacked.forward(hidden_states, layout, mask)) is not None:
            return BlockOutput(output, None, None)
        self_attention_cache, cross_attention_cache = past_key_values, None
        if isinstance(past_key_values, EncoderDecoderCache):
            self_attention_cache, cross_attention_cache = past_key_values.self_attention_cache, past_key_values
        attention_output, probabilities = self.attention(
            self._pre_norm(self.attention_norm, hidden_states),
            layout,
            mask,
            past_key_values=self_attention_cache,
            layer_index=layer_index,
        )
        hidden_states = self.attention_residual(
            layout.select_queries(hidden_states),
            self.dropout(attention_output),
            self._post_norm(self.attention_norm),
            layer_index,
        )
        cross_probabilities = None
        if self.cross_attention is not None:
            if memory is None:
                raise CtxError("This block has cross-attention, but memory is None.", hint="pass memory.")
            attention_output, cross_probabilities = self.cross_attention(
                self._pre_norm(self.cross_attention_norm, hidden_states),
                layout,
                memory.states,
                memory.layout,
                memory.mask,
                past_key_values=cross_attention_cache,
                layer_index=layer_index,
                targets_per_source=memory.targets_per_source,
            )
            hidden_states = self.cross_attention_residual(
                hidden_states, self.dropout(attention_output), self._post_norm(self.cross_attention_norm), layer_index
            )
        del attention_output  # frees its memory before the feed-forward network if no gradient needs it
        output = self.feed_forward(self._pre_norm(self.feed_forward_norm, hidden_states))
        hidden_states = self.feed_forward_residual(
            hidden_states, self.dropout(output), self._post_norm(self.feed_forward_norm), layer_index
        )
        return BlockOutput(hidden_states, probabilities, cross_probabilities)

    def _pre_norm(self, norm: nn.Module, hidden_states: Tensor) -> Tensor:
        return norm(hidden_states) if self.norm == "pre" else hidden_states

    def _post_norm(self, norm: nn.Module) -> nn.Module | None:
        return norm if self.norm == "post" else None


@dataclass(frozen=True, eq=False)
class StackOutput:
    """Output of a stack of blocks.

    Attributes:
        last_hidden_state: (batch, length, hidden), zeros at padding in a packed layout; with an output mask (targets,
            hidden) in row-major order.
        computed_states: (..., hidden) at all computed tokens of `layout`; `layout.first_tokens(computed_states)` is a
            pooler's input.
        hidden_states: (batch, length, hidden) inputs of all blocks, and `last_hidden_state`; None for states that are
            not selected, or if none are requested. Later states are computed from these tensors, so that gradients with
            respect to them are available.
        attentions: (batch, heads, queries, keys) probabilities of each block; None unless requested.
        cross_attentions: As `attentions`; empty without cross-attention.
    """

    last_hidden_state: Tensor
    computed_states: Tensor
    layout: Layout
    hidden_states: tuple[Tensor | None, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


def run_stack(
    blocks: Iterable[Callable[..., BlockOutput]],
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
    output_hidden_states: HiddenStatesSelection = None,
    output_attentions: bool | None = None,
) -> StackOutput:
    """Run blocks one after the other; the last one only at the tokens whose outputs are used.

    Args:
        blocks: `TransformerBlock`s, or functions with their arguments, in the order of application; one object may
            occur several times.
        hidden_states: (..., hidden) as packed by `layout`.
        masks: The attention mask of all blocks, or one for each.
        past_key_values: The cache that `layout` was built with.
        final_norm: Applied to the last block's output: the norm of pre-norm models, with dropout if they have it.
        output_mask: (batch, length) bool, the positions whose outputs are used: the last block of a packed layout is
            computed only there. None for all.
        include_first_tokens: Also compute the first token of each example.
        zero_padding: Set padding positions to 0 before the first block and after each block, if they are computed.

    Raises:
        CtxError: Attention weights are requested, but the attention implementation returns none.
    """
    layers = list(blocks)
    final_layout = layout
    if output_mask is not None:
        final_layout = layout.select(output_mask, include_first_tokens=include_first_tokens)
    specs = [masks] * len(layers) if isinstance(masks, MaskSpec) else list(masks)
    if len(specs) != len(layers):
        raise CtxError(f"{len(specs)} masks for {len(layers)} blocks; pass one for all, or one for each.")
    layouts = [layout] * (len(layers) - 1) + [final_layout] * min(len(layers), 1)
    # blocks with the same mask and layout share the prepared mask, which is freed after the last of them
    keys = [(id(spec), id(block_layout)) for spec, block_layout in zip(specs, layouts, strict=True)]
    last_uses = {key: number for number, key in enumerate(keys)}
    contexts: dict[tuple[int, int], tuple[Layout, AttentionMask, Memory | None]] = {}
    padding_mask = layout.padding_mask() if zero_padding else None
    recorded_numbers = recorded_layer_numbers(output_hidden_states, len(layers) + 1)
    recorded_states: list[Tensor | None] = []
    attentions: list[Tensor] = []
    cross_attentions: list[Tensor] = []
    for number, (block, spec, block_layout) in enumerate(zip(layers, specs, layouts, strict=True)):
        hidden_states = _zero_at(padding_mask, hidden_states)
        state = layout.unpack(hidden_states) if number in recorded_numbers else None
        recorded_states.append(state)
        if state is not None:
            hidden_states = layout.pack(state)  # for gradients with respect to the recorded states
        if keys[number] not in contexts:
            contexts[keys[number]] = _block_context(spec, block_layout, memory, hidden_states)
        hidden_states, attention, cross_attention = block(
            hidden_states, *contexts[keys[number]], past_key_values=past_key_values, layer_index=number
        )
        if last_uses[keys[number]] == number:
            del contexts[keys[number]]
        if output_attentions:
            if attention is None or attention.dim() != 4:  # flex attention may return log-sum-exp instead
                raise missing_attention_weights()
            attentions.append(attention)
            cross_attentions += [] if cross_attention is None else [cross_attention]
    if final_norm is not None:
        hidden_states = final_norm(hidden_states)
    hidden_states = _zero_at(padding_mask, hidden_states)
    output = final_layout.select_outputs(hidden_states)
    recorded_states.append(output if len(layers) in recorded_numbers else None)
    if recorded_states[-1] is not None and output_mask is None:
        hidden_states = final_layout.pack(output)
    return StackOutput(
        output,
        hidden_states,
        final_layout,
        hidden_states=None if output_hidden_states is None or output_hidden_states is False else tuple(recorded_states),
        attentions=tuple(attentions) if output_attentions else None,
        cross_attentions=tuple(cross_attentions) if output_attentions else None,
    )


def _block_context(
    spec: MaskSpec, layout: Layout, memory: Memory | None, like: Tensor
) -> tuple[Layout, AttentionMask, Memory | None]:
    """The layout, mask and memory of a block, with prepared masks; `like` as in `prepare_mask`."""
    if memory is not None:
        queries = layout.share_source(memory.targets_per_source)
        memory = replace(memory, mask=prepare_mask(memory.mask, queries, like, memory.layout))
    return layout, prepare_mask(spec, layout, like), memory


def _zero_at(padding_mask: Tensor | None, hidden_states: Tensor) -> Tensor:
    return hidden_states if padding_mask is None else hidden_states.masked_fill(padding_mask, 0.0)


def recorded_layer_numbers(selection: HiddenStatesSelection, count: int) -> set[int]:
    """Numbers of the hidden states to record, out of `count`; negative indices count from the last."""
    if selection is None or selection is False:
        return set()
    numbers = selected_hidden_states(selection)
    return set(range(count)) if numbers is None else {number % count for number in numbers if -count <= number < count}


class FirstTokenPooler(nn.Module):
    """Linear layer and activation on the first token's state (Devlin et al. 2019: tanh; Sanh et al. 2019: ReLU)."""

    def __init__(self, hidden_size: int, activation: str = "tanh") -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = get_activation(activation)

    def forward(self, first_states: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return self.activation(self.dense(first_states))
