"""A stack of Transformer layers with its embeddings: the encoder or the decoder of an encoder-decoder."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.transformer_decoder import default_positions, mask_of_input, validate_cache
from hf_ctxmodels.core.generation_cache import get_targets_per_source
from hf_ctxmodels.core.inputs import check_encoder_input, check_ids
from hf_ctxmodels.layers.attention.layouts import Layout, build_layout, build_memory_layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.hook_points import HookPoint
from hf_ctxmodels.layers.transformer import FeedForward, Memory, StackOutput, TransformerBlock, run_stack


@dataclass(frozen=True, eq=False)
class Source:
    """What a decoder attends to.

    Attributes:
        states: (batch, length, hidden) the encoder's output.
        attention_mask: (batch, length), 0 at what the decoder does not see; None where it sees all.
        sequence_ids: (batch, length) of the encoder's input, or None.
    """

    states: Tensor
    attention_mask: Tensor | None = None
    sequence_ids: Tensor | None = None


class TransformerStack(nn.Module):
    """An encoder or a decoder: embeddings, layers and the final norm; BART's unless a family overrides its parts.

    A token's position is the number of tokens before it in its sequence, wherever the padding is.

    Args:
        config: The model's configuration.
        is_decoder: Whether it is causal and attends to a source.

    Attributes:
        word_embeddings: Table of words; None for a decoder that shares the encoder's.
        embedding_norm: The norm of the embeddings.
        layers: The layers in the order of application.
        final_norm: The norm of the last layer's output, identity with post-norm.
        zeros_padding: Whether padding positions are 0 in all layers.
        embedding_output: Hook point of the embeddings.
    """

    zeros_padding: ClassVar[bool] = False

    def __init__(self, config: Any, *, is_decoder: bool = False) -> None:
        super().__init__()
        self.config = config
        self.is_decoder = is_decoder
        self.word_embeddings = None if is_decoder and config.shares_word_embeddings else self.build_words(config)
        self.build_embeddings(config)
        self.embedding_norm = self.build_embedding_norm(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        count = config.decoder_layers if is_decoder else config.num_hidden_layers
        self.layers = nn.ModuleList(self.build_layer(config) for _ in range(count))
        self.final_norm = self.build_final_norm(config)
        self.embedding_output = HookPoint()

    def build_words(self, config: Any) -> nn.Embedding:
        """Create the table of words."""
        return nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_embeddings(self, config: Any) -> None:
        """Create what is added to the words' embeddings."""
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def build_embedding_norm(self, config: Any) -> nn.Module:
        """Create the norm of the embeddings."""
        return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def build_layer(self, config: Any) -> nn.Module:
        """Create a layer: post-norm, and with cross-attention in a decoder."""
        width, rate = config.hidden_size, config.attention_probs_dropout_prob
        heads = config.decoder_attention_heads if self.is_decoder else config.num_attention_heads
        inner = config.decoder_ffn_dim if self.is_decoder else config.intermediate_size
        return TransformerBlock(
            width,
            SelfAttention(width, heads, dropout=rate),
            FeedForward(width, inner, config.hidden_act, dropout=getattr(config, "activation_dropout", 0.0)),
            norm="post",
            norm_cls=partial(nn.LayerNorm, eps=config.layer_norm_eps),
            dropout=config.hidden_dropout_prob,
            cross_attention=CrossAttention(width, heads, dropout=rate) if self.is_decoder else None,
        )

    def build_final_norm(self, config: Any) -> nn.Module:
        """Create the norm of the last layer's output."""
        return nn.Identity()

    def mask(self) -> MaskSpec:
        """Who sees whom in self-attention, and with which bias; for all layers."""
        return CAUSAL if self.is_decoder else BIDIRECTIONAL

    def extra_embedding_ids(self, words: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """(batch, length) ids that `embed` takes beside words and positions, by name.

        Args:
            words: (batch, length, ...).
            given: Keywords of `forward`; what belongs to the embeddings is taken out.
        """
        return {}

    def embed(self, words: Tensor, position_ids: Tensor, **beside: Tensor) -> Tensor:
        """(..., hidden) word embeddings and (...) positions -> (..., hidden)."""
        return self.dropout(self.embedding_norm(words + self.position_embeddings(position_ids)))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_mask: Tensor | None = None,
        source: Source | None = None,
        words: nn.Module | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the stack.

        Args:
            input_ids: (batch, length) token ids; or `inputs_embeds` (batch, length, hidden) in their place.
            attention_mask: (batch, length), with a cache (batch, past + length): 1 at tokens and 0 at padding.
            position_ids: (batch, length) or (1, length); None for the number of tokens before each.
            sequence_ids: (batch, length), for several sequences in one row: 0 at padding; a run of equal numbers is one
                sequence, whose tokens attend to each other only, and to the same sequence of the source.
            past_key_values: The cache of a decoder's preceding tokens; it is extended in place. Without one the batch
                is computed unpadded.
            output_mask: (batch, length) bool; `last_hidden_state` then holds only these positions, (targets, hidden) in
                row-major order, and the last layer is computed only there.
            source: What a decoder attends to.
            words: The table of words of a stack without one.
            kwargs: `output_hidden_states`, `output_attentions` (by eager attention in place of sdpa), what
                `extra_embedding_ids` takes, and arguments of the attention function.

        Raises:
            CtxError: Inputs do not match each other, the cache or the model.
        """
        recorded = self.config.resolve_output_flags(kwargs)
        table = self.word_embeddings if words is None else words
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        places = {"sequence_ids": sequence_ids, "output_mask": output_mask, "position_ids": position_ids}
        given = self._checked(input_ids, inputs_embeds, attention_mask, past_key_values, past, table, places)
        if position_ids is None:
            position_ids = default_positions(given, attention_mask, sequence_ids, past)
        beside = self.extra_embedding_ids(given, kwargs) | {"position_ids": position_ids.expand(given.shape[:2])}
        kwargs |= recorded | {"past_key_values": past_key_values}
        layout = build_layout(given, attention_mask, sequence_ids, self.config, **kwargs)
        outputs = run_stack(
            self.layers,
            self._embedded(layout.pack(given), table, {name: layout.pack(each) for name, each in beside.items()}),
            layout,
            self.mask(),
            memory=None if source is None else _memory(layout, source, get_targets_per_source(past_key_values)),
            past_key_values=past_key_values,
            final_norm=self.final_norm,
            output_mask=output_mask,
            zero_padding=self.zeros_padding,
            **recorded,
        )
        return _output(outputs, past_key_values, source)

    def _embedded(self, given: Tensor, table: Any, beside: dict[str, Tensor]) -> Tensor:
        """(...) ids or (..., hidden) embeddings, packed -> (..., hidden), the input of the first layer."""
        vectors = given if given.is_floating_point() else table(given)
        return self.embedding_output(self.embed(vectors, **beside))

    def _checked(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
        past: int | Tensor,
        table: Any,
        places: dict[str, Tensor | None],
    ) -> Tensor:
        """(batch, length) ids or (batch, length, hidden) embeddings; raises CtxError if an argument does not fit."""
        config, limit = self.config, self.config.max_sequence_length
        words = check_encoder_input(
            input_ids,
            inputs_embeds,
            mask_of_input(attention_mask, inputs_embeds if input_ids is None else input_ids, cache),
            limit,
            limit=config.vocab_size,
            width=config.hidden_size,
            sequence_ids=places["sequence_ids"],
            output_mask=places["output_mask"],
            aligned={"position_ids": places["position_ids"]},
            dtype=None if inputs_embeds is None or torch.compiler.is_compiling() else table.weight.dtype,
        )
        if cache is not None:
            validate_cache(getattr(cache, "self_attention_cache", cache), words, past, limit)
        if limit is not None:
            check_ids("position_ids", places["position_ids"], limit, "max_position_embeddings")
        return words


def _output(
    outputs: StackOutput, cache: Cache | None, source: Source | None
) -> BaseModelOutputWithPastAndCrossAttentions:
    """What a stack returns."""
    return BaseModelOutputWithPastAndCrossAttentions(
        last_hidden_state=outputs.last_hidden_state,
        past_key_values=cache,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        cross_attentions=None if source is None else outputs.cross_attentions,
    )


def _memory(layout: Layout, source: Source, targets_per_source: int) -> Memory:
    """What a decoder's cross-attention reads; of `targets_per_source` equal rows the first."""
    states, mask = source.states[::targets_per_source], source.attention_mask
    place = build_memory_layout(
        layout, states, None if mask is None else mask[::targets_per_source], source.sequence_ids
    )
    return Memory(place.pack(states), place, BIDIRECTIONAL, targets_per_source)
