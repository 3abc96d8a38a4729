"""T5 (Raffel et al. 2020, arXiv 1910.10683): an encoder-decoder pretrained by span corruption.

Pre-norm with RMSNorm, linear layers without biases, unscaled attention scores, and a bucketed relative position bias.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import (
    BaseModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder, TransformerStack
from hf_ctxmodels.architectures.encoder_decoder_heads import (
    EncoderDecoderHeadModel,
    TransformerForConditionalGeneration,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.masks import MaskSpec
from hf_ctxmodels.layers.attention.modules import BucketedPositionBias, CrossAttention, SelfAttention
from hf_ctxmodels.layers.common import RMSNorm
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.transformer import (
    FeedForward,
    GatedFeedForward,
    ResidualSum,
    TransformerBlock,
    clamp_to_float16,
)
from hf_ctxmodels.models.t5.configuration_t5 import CtxT5Config
from hf_ctxmodels.models.t5.conversion_t5 import build_export_conversion


class ClampedResidualSum(ResidualSum):
    """Residual sum that is clamped to finite values in float16."""

    def forward(self, hidden_states: Tensor, output: Tensor, norm: nn.Module | None, layer_index: int) -> Tensor:
        """Sum as in `ResidualSum`, (..., hidden)."""
        return clamp_to_float16(super().forward(hidden_states, output, norm, layer_index))


class DroppedRMSNorm(RMSNorm):
    """Final norm followed by dropout. transformers initializes it because its name contains "RMSNorm"."""

    def __init__(self, width: int, *, eps: float, dropout: float) -> None:
        super().__init__(width, eps=eps)
        self.dropout = Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self.dropout(super().forward(input))


class T5Stack(TransformerStack):
    """Encoder or decoder of T5.

    Attributes:
        position_bias: Added to the self-attention scores; unidirectional in the decoder.
        layer_position_biases: With `layerwise_position_bias`, layer -> its bias, for the layers after the first, which
            has `position_bias`. Empty if all layers share it.
    """

    config: CtxT5Config
    normalizes_embeddings = False
    has_relative_positions = True

    def build_word_embeddings(self, config: CtxT5Config) -> nn.Embedding:
        """Create the word embeddings. The padding token, the decoder's first input, has an embedding."""
        return nn.Embedding(config.vocab_size, config.hidden_size)

    def build_embeddings(self, config: CtxT5Config) -> None:
        """Create the relative position biases."""

        def build_position_bias() -> BucketedPositionBias:
            return BucketedPositionBias(
                config.num_attention_heads,
                num_buckets=config.relative_attention_num_buckets,
                max_distance=config.relative_attention_max_distance,
                bidirectional=not self.is_decoder,
            )

        self.position_bias = build_position_bias()
        num_layers = (config.decoder_layers if self.is_decoder else config.num_hidden_layers) or 0
        layers = range(1, num_layers) if config.layerwise_position_bias else ()
        self.layer_position_biases = nn.ModuleDict({str(layer): build_position_bias() for layer in layers})

    def build_layer(self, config: CtxT5Config) -> TransformerBlock:
        """Create a pre-norm layer without biases, with unscaled scores."""
        width, dropout, clamp = config.hidden_size, config.hidden_dropout_prob, config.clamp_half_precision
        attention: dict[str, Any] = {
            "num_heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "bias": False,
            "dropout": config.attention_dropout,
            "scale": 1.0,
        }
        feed_forward = GatedFeedForward if config.is_gated else FeedForward
        block = TransformerBlock(
            width,
            SelfAttention(width, **attention),
            feed_forward(width, config.intermediate_size, config.activation, dropout=dropout, bias=False, clamp=clamp),
            norm="pre",
            norm_cls=partial(RMSNorm, eps=config.layer_norm_eps),
            dropout=dropout,
            cross_attention=CrossAttention(width, **attention) if self.is_decoder else None,
        )
        if clamp:
            block.attention_residual, block.feed_forward_residual = ClampedResidualSum(), ClampedResidualSum()
            if self.is_decoder:
                block.cross_attention_residual = ClampedResidualSum()
        return block

    def build_final_norm(self, config: CtxT5Config) -> nn.Module:
        """Create the final norm."""
        return DroppedRMSNorm(config.hidden_size, eps=config.layer_norm_eps, dropout=config.hidden_dropout_prob)

    def position_biases(self) -> list[BucketedPositionBias]:
        """The bias that all layers share, or one per layer."""
        return [self.position_bias, *self.layer_position_biases.values()]  # type: ignore[list-item]

    def mask_specs(self) -> MaskSpec | list[MaskSpec]:
        """One mask with the position bias, or one for each of the layers, of which the last may have been removed;
        causal in the decoder."""
        biases = self.position_biases()[: len(self.layers)]
        masks = [MaskSpec(causal=self.is_decoder, bias=bias) for bias in biases]
        return masks if self.config.layerwise_position_bias else masks[0]

    def embed(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """(..., hidden) word embeddings -> (..., hidden); positions enter only through the bias."""
        return self.dropout(embeddings)


class CtxT5PreTrainedModel(CtxPreTrainedModel):
    """Base class of the T5 models.

    Attributes:
        prefixed_reference: Whether encoder and decoder are in a submodule of the class of transformers.
    """

    config: CtxT5Config
    base_model_prefix = "t5"
    reference_model_type = "t5"
    prefixed_reference: ClassVar[bool] = False
    supports_reentrant_checkpointing = False
    _supports_flash_attn = False  # does not support a bias
    # the output layer, copies of the word embeddings, and an unused bias of cross-attention in old checkpoints
    _keys_to_ignore_on_load_unexpected = [
        r"^lm_head\.",
        r"embed_tokens\.",
        r"EncDecAttention\.relative_attention_bias\.",
    ]

    @property
    def export_conversion(self) -> list[WeightTransform]:  # type: ignore[override]
        """The weight conversion of this class and version."""
        return build_export_conversion(gated=self.config.is_gated, prefixed=self.prefixed_reference)

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers, with all fields that affect the logits; raises
        CtxError if its logits would be scaled otherwise."""
        names = ("tie_word_embeddings", "scale_decoder_outputs", "decoder_start_token_id")
        values = super().reference_config() | {name: getattr(self.config, name) for name in names}
        if self.config.layerwise_position_bias:
            if isinstance(self, CtxT5ForConditionalGeneration) and not self.config.scale_decoder_outputs:
                raise CtxError(
                    "The exported logits would differ: transformers' UMT5 scales decoder outputs, and this model has "
                    "scale_decoder_outputs=False.",
                    hint="use save_pretrained, or export the encoder.",
                )
            values |= {"model_type": "umt5", "architectures": [f"UM{self.reference_class_name()}"]}
        return values

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as in the release (mesh-tensorflow), with the standard deviations 1 / sqrt(in_features) for linear
        layers, 1 / sqrt(in_features * head_dim) for query projections (the scores are unscaled), and 1 for
        embeddings."""
        super()._init_weights(module)
        factor, width, head_dim = self.config.initializer_factor, self.config.hidden_size, self.config.head_dim
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=factor * module.in_features**-0.5)
        elif isinstance(module, SelfAttention):
            weight = module.qkv_proj.weight
            query_factor = torch.ones(len(weight), 1, device=weight.device)
            query_factor[: len(weight) // 3] = head_dim**-0.5
            noise = torch.randn(weight.shape, dtype=weight.dtype, device=weight.device)  # no DTensor
            init.copy_(weight, noise * query_factor * factor * width**-0.5)
        elif isinstance(module, CrossAttention):
            init.normal_(module.q_proj.weight, std=factor * (width * head_dim) ** -0.5)
        elif isinstance(module, T5Stack):
            for position_bias in module.position_biases():
                init.normal_(position_bias.buckets.weight, std=factor * width**-0.5)
            if module.word_embeddings is not None:
                init.normal_(module.word_embeddings.weight, std=factor)


class CtxT5Model(EncoderDecoder, CtxT5PreTrainedModel):
    """The T5 encoder-decoder without a head."""

    stack_class = T5Stack


class CtxT5EncoderModel(CtxT5PreTrainedModel):
    """The T5 encoder without a decoder."""

    _keys_to_ignore_on_load_unexpected = [
        *CtxT5PreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^(t5\.)?decoder\.",
    ]

    def __init__(self, config: CtxT5Config) -> None:
        super().__init__(config)
        self.encoder = T5Stack(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The encoder's word embeddings."""
        return self.encoder.word_embeddings  # type: ignore[return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the encoder's word embeddings."""
        self.encoder.word_embeddings = value  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode a batch; arguments as in `TransformerStack.forward`.

        Raises:
            CtxError: Inputs do not match each other or the model.
        """
        outputs = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            return_dict=True,
            **kwargs,
        )
        return BaseModelOutput(outputs.last_hidden_state, outputs.hidden_states, outputs.attentions)


class CtxT5HeadModel(EncoderDecoderHeadModel, CtxT5PreTrainedModel):
    """Base class of the T5 models with a head."""

    encoder_class = CtxT5Model


class CtxT5ForConditionalGeneration(TransformerForConditionalGeneration, CtxT5PreTrainedModel, GenerationMixin):
    """T5 with a language modeling head. Version 1.0 ties the output layer to the word embeddings and scales its input;
    version 1.1 does neither."""

    encoder_class = CtxT5Model
    _tied_weights_keys = {"lm_head.weight": "t5.encoder.word_embeddings.weight"}

    def output_layer_states(self, states: Tensor) -> Tensor:
        """The input of the output layer, scaled with `config.scale_decoder_outputs`."""
        if self.config.scale_decoder_outputs:
            states = states * self.config.hidden_size**-0.5
        return super().output_layer_states(states)


class CtxT5ForSequenceClassification(heads.ForSequenceClassification, CtxT5HeadModel):
    """T5 with a classifier or regressor on the decoder's state at the last </s>."""

    prefixed_reference = True
    classifier_activation = "tanh"
    output_class = Seq2SeqSequenceClassifierOutput


class CtxT5ForQuestionAnswering(heads.ForQuestionAnswering, CtxT5HeadModel):
    """T5 with a span classifier on the decoder's states for extractive question answering."""

    output_class = Seq2SeqQuestionAnsweringModelOutput


class CtxT5ForTokenClassification(heads.ForTokenClassification, CtxT5PreTrainedModel):
    """T5's encoder with a token classifier."""

    prefixed_reference = True
    encoder_class = CtxT5EncoderModel
    _keys_to_ignore_on_load_unexpected = CtxT5EncoderModel._keys_to_ignore_on_load_unexpected

    def build_encoder(self, config: CtxT5Config) -> CtxT5EncoderModel:
        """Create the encoder."""
        return CtxT5EncoderModel(config)
