"""The Transformer block of encoders and decoders, with post-norm or pre-norm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.adapter_slots import BLOCK_SLOT, BlockAdapters, add_residual
from hf_ctxmodels.layers.attention.backends import Mask
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.dropout import Dropout

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
    mask: Mask = BIDIRECTIONAL
    targets_per_source: int = 1


class BlockOutput(NamedTuple):
    """(..., hidden) at the computed rows, and the probabilities of both attentions, if any."""

    hidden_states: Tensor
    attention: Tensor | None
    cross_attention: Tensor | None


class TransformerBlock(GradientCheckpointingLayer):
    """Self-attention, optional cross-attention, and a feed-forward network, with dropout and residual connections.

    `norm="post"` normalises each sum (Vaswani et al. 2017), `norm="pre"` the input of each sub-layer; the last block's
    output then needs another norm (Radford et al. 2019, section 2.3). `adapters` is None, or adapts what is added.

    Args:
        hidden_size: Width of the input and output.
        self_attention: The first sub-layer.
        feed_forward: The last sub-layer, (..., hidden) -> (..., hidden).
        norm: Position of the norms.
        norm_cls: Creates a norm of a width.
        dropout: Dropout on the output of each sub-layer.
        cross_attention: The second sub-layer of a decoder, or None.
    """

    adapters: BlockAdapters | None

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
        self.cross_attention = cross_attention
        if cross_attention is not None:
            self.cross_attention_norm = norm_cls(hidden_size)
        self.feed_forward = feed_forward
        self.feed_forward_norm = norm_cls(hidden_size)
        self.dropout = Dropout(dropout)
        self.register_module(BLOCK_SLOT, None)

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        mask: Mask = BIDIRECTIONAL,
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
        hidden_states = self._add("attention", layout.select_queries(hidden_states), attended, layer_index)
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
            hidden_states = self._add("cross_attention", hidden_states, attended, layer_index)
        del attended  # without gradients its memory is free for the wide states
        fed = self.feed_forward(self._before(self.feed_forward_norm, hidden_states))
        hidden_states = self._add("feed_forward", hidden_states, fed, layer_index)
        return BlockOutput(hidden_states, probabilities, cross_probabilities)

    def _before(self, norm: nn.Module, states: Tensor) -> Tensor:
        return norm(states) if self.norm == "pre" else states

    def _add(self, place: str, states: Tensor, output: Tensor, depth: int) -> Tensor:
        """The sum after a sub-layer, normalised with post-norm."""
        norm = getattr(self, f"{place}_norm") if self.norm == "post" else None
        return add_residual(self.adapters, place, norm, states, self.dropout(output), depth)
