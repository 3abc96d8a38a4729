"""GPT-3 (Brown et al. 2020, arXiv 2005.14165): GPT-2 with alternating dense and locally banded attention layers."""

from typing import Any

from torch import nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_decoder import (
    DecoderForSequenceClassification,
    DecoderHeadModel,
    TransformerDecoder,
)
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.attention.masks import CAUSAL, MaskSpec
from hf_ctxmodels.models.gpt2.modeling_gpt2 import init_residual_projections
from hf_ctxmodels.models.gpt3.configuration_gpt3 import CtxGpt3Config


class CtxGpt3PreTrainedModel(CtxPreTrainedModel):
    """Base class of the GPT-3 models, which transformers does not have."""

    config: CtxGpt3Config
    base_model_prefix = "gpt3"
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as in GPT-2."""
        super()._init_weights(module)
        init_residual_projections(module, self.config)


class CtxGpt3Model(TransformerDecoder, CtxGpt3PreTrainedModel):
    """The GPT-3 decoder without the output layer.

    In a banded layer a token attends to itself and the `config.window - 1` tokens before it (Child et al. 2019, section
    4). On a CPU with an unpadded batch, time and memory of such a layer grow with the window, not with the length.
    """

    norm = "pre"
    normalizes_embeddings = False

    def __init__(self, config: CtxGpt3Config) -> None:
        super().__init__(config)
        banded = MaskSpec(causal=True, window=config.window)
        layers: list[Any] = list(self.layers)
        for layer, attention_type in zip(layers, config.attention_types, strict=True):
            layer.mask_spec = banded if attention_type == "banded" else CAUSAL

    def mask_specs(self) -> list[MaskSpec]:
        """The attention pattern of each layer; layers may have been removed from the model."""
        layers: list[Any] = list(self.layers)
        return [layer.mask_spec for layer in layers]


class CtxGpt3HeadModel(DecoderHeadModel, CtxGpt3PreTrainedModel):
    """Base class of the GPT-3 models with a head."""

    encoder_class = CtxGpt3Model


class CtxGpt3ForCausalLM(heads.ForCausalLM, CtxGpt3HeadModel, GenerationMixin):
    """GPT-3 language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt3.word_embeddings.weight"}


class CtxGpt3ForSequenceClassification(DecoderForSequenceClassification, CtxGpt3HeadModel):
    """GPT-3 with a classifier or regressor on the last token's state."""

    classifier_bias = False


class CtxGpt3ForMultipleChoice(heads.ForMultipleChoice, CtxGpt3HeadModel):
    """GPT-3 with a multiple-choice classifier on the last token's state and an auxiliary language modeling loss."""

    _tied_weights_keys = {"lm_head.weight": "gpt3.word_embeddings.weight"}
    has_auxiliary_lm_loss = True
    output_layer_name = "lm_head"


class CtxGpt3ForTokenClassification(heads.ForTokenClassification, CtxGpt3HeadModel):
    """GPT-3 with a token classifier."""


class CtxGpt3ForQuestionAnswering(heads.ForQuestionAnswering, CtxGpt3HeadModel):
    """GPT-3 with a span classifier for extractive question answering."""
