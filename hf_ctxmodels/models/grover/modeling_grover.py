"""Grover (Zellers et al. 2019, Defending Against Neural Fake News, arXiv 1905.12616): a causal Transformer, neither
pre-norm nor post-norm."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_decoder import (
    DecoderForSequenceClassification,
    DecoderHeadModel,
    TransformerDecoder,
)
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.attention.prepared_masks import AttentionMask
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.pooling import build_token_mask, last_token_columns, states_at
from hf_ctxmodels.layers.transformer import BlockOutput, CheckpointingWithCache, FeedForward, Memory, ResidualSum
from hf_ctxmodels.models.grover.configuration_grover import CtxGroverConfig


class GroverBlock(CheckpointingWithCache, GradientCheckpointingLayer):
    """Attention without a norm, then a feed-forward network between two norms.

    x = h + attention(h); the output is LN1(x + feed_forward(LN0(x))). Both branches have dropout.
    """

    def __init__(self, config: CtxGroverConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention = SelfAttention(width, config.num_attention_heads, dropout=config.attention_probs_dropout_prob)
        self.feed_forward_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(width, config.feed_forward_size, config.hidden_act)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.attention_residual, self.feed_forward_residual = ResidualSum(), ResidualSum()

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
        """(..., hidden) in the layout -> the computed states; arguments as in `TransformerBlock`."""
        attention_output, probabilities = self.attention(
            hidden_states, layout, mask, past_key_values=past_key_values, layer_index=layer_index
        )
        residual = layout.select_queries(hidden_states)
        hidden_states = self.attention_residual(residual, self.dropout(attention_output), None, layer_index)
        output = self.dropout(self.feed_forward(self.feed_forward_norm(hidden_states)))
        output = self.feed_forward_residual(hidden_states, output, self.output_norm, layer_index)
        return BlockOutput(output, probabilities, None)


class CtxGroverPreTrainedModel(CtxPreTrainedModel):
    """Base class of the Grover models."""

    config: CtxGroverConfig
    base_model_prefix = "grover"
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize by a normal distribution, truncated at two standard deviations as in TensorFlow."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear | nn.Embedding):
            self._init_truncated(module.weight, self.config.initializer_range)
        elif isinstance(module, FeedForward):
            for linear in (module.up_proj, module.down_proj):
                self._init_truncated(linear.weight, self.config.feed_forward_initializer_range)

    @staticmethod
    def _init_truncated(weight: Tensor, std: float) -> None:
        init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class CtxGroverModel(TransformerDecoder, CtxGroverPreTrainedModel):
    """The Grover decoder without the output layer: word and position embeddings, their norm, the layers."""

    _no_split_modules = ["GroverBlock"]

    def build_layer(self, config: CtxGroverConfig) -> nn.Module:
        """Create a layer."""
        return GroverBlock(config)


class CtxGroverHeadModel(DecoderHeadModel, CtxGroverPreTrainedModel):
    """Base class of the Grover models with a head."""

    encoder_class = CtxGroverModel


class CtxGroverForCausalLM(heads.ForCausalLM, CtxGroverHeadModel, GenerationMixin):
    """Grover language model; the output layer is tied to the word embeddings and has no bias.

    `hf_ctxmodels.inference.generate_field` generates a field of an article from other fields.
    """

    _tied_weights_keys = {"lm_head.weight": "grover.word_embeddings.weight"}


class CtxGroverForSequenceClassification(DecoderForSequenceClassification, CtxGroverHeadModel):
    """Grover with a sequence classifier, for example of human and machine-generated articles (section 5).

    The classifier's input is the state of the first `config.classifier_token_id`, <|beginsummary|>, or of the last
    token without it, or with `inputs_embeds`, whose tokens are unknown. The training loss has an auxiliary language
    modeling term (`DecoderHeadModel`), averaged over the targets of an example and then over examples. The released
    code averages over all tokens of a batch, which is not invariant to gradient accumulation.
    """

    has_auxiliary_lm_loss = True

    def encode(self, *, input_ids: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the decoder; `pooler_output` is the classifier's input."""
        outputs = super().encode(input_ids=input_ids, **kwargs)
        if self.config.classifier_pooling is None and input_ids is not None:
            states, (_, attention_mask, sequence_ids) = outputs.last_hidden_state, outputs.encoded_tokens
            token_mask = build_token_mask(states, attention_mask, sequence_ids)
            is_classifier_token = (input_ids == self.config.classifier_token_id) & token_mask
            first = is_classifier_token.int().argmax(1)
            columns = torch.where(is_classifier_token.any(1), first, last_token_columns(states, token_mask))
            outputs.pooler_output = states_at(states, columns)
        return outputs
