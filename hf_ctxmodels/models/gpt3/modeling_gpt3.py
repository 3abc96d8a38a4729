"""GPT-3 (Brown et al. 2020, arXiv 2005.14165): GPT-2 with alternating dense and locally banded attention layers."""

from typing import ClassVar

from transformers import GenerationMixin
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.layers.attention.masks import CAUSAL, MaskSpec
from hf_ctxmodels.models.gpt2 import modeling_gpt2 as gpt2
from hf_ctxmodels.models.gpt3.configuration_gpt3 import CtxGpt3Config


class CtxGpt3PreTrainedModel(gpt2.CtxGpt2PreTrainedModel):
    """Base class of the GPT-3 models, which transformers does not have."""

    config: CtxGpt3Config
    base_model_prefix = "gpt3"
    reference_model_type: ClassVar[str | None] = None
    export_conversion: ClassVar[list[WeightTransform]] = []


class CtxGpt3Model(CtxGpt3PreTrainedModel, gpt2.CtxGpt2Model):
    """The decoder without the output layer.

    In a banded layer a token attends to itself and the `config.window - 1` tokens before it (Child et al. 2019, section
    4). On a CPU with an unpadded batch, time and memory of such a layer grow with the window, not with the length.
    """

    def __init__(self, config: CtxGpt3Config) -> None:
        super().__init__(config)
        banded = MaskSpec(causal=True, window=config.window)
        self.masks = [banded if attention_type == "banded" else CAUSAL for attention_type in config.attention_types]


class CtxGpt3HeadModel(CtxGpt3PreTrainedModel):
    """Base class of the GPT-3 models with a head."""

    encoder_class = CtxGpt3Model


class CtxGpt3ForCausalLM(CtxGpt3HeadModel, gpt2.CtxGpt2ForCausalLM, GenerationMixin):
    """GPT-3 language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt3.word_embeddings.weight"}


class CtxGpt3ForSequenceClassification(CtxGpt3HeadModel, gpt2.CtxGpt2ForSequenceClassification):
    """GPT-3 with a classifier or regressor on the last token's state."""


class CtxGpt3ForMultipleChoice(CtxGpt3HeadModel, gpt2.CtxGpt2ForMultipleChoice):
    """GPT-3 with a multiple-choice classifier on the last token's state and an auxiliary language modelling loss."""

    _tied_weights_keys = {"lm_head.weight": "gpt3.word_embeddings.weight"}


class CtxGpt3ForTokenClassification(CtxGpt3HeadModel, gpt2.CtxGpt2ForTokenClassification):
    """GPT-3 with a token classifier."""


class CtxGpt3ForQuestionAnswering(CtxGpt3HeadModel, gpt2.CtxGpt2ForQuestionAnswering):
    """GPT-3 with a span classifier for extractive question answering."""
