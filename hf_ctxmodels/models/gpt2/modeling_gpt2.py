"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners): a causal pre-norm Transformer,
pretrained by language modeling."""

from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.core_model_loading import WeightRenaming

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_decoder import (
    DecoderForSequenceClassification,
    DecoderHeadModel,
    TransformerDecoder,
)
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.weights import gpt_conversions
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.transformer import FeedForward
from hf_ctxmodels.models.gpt2.configuration_gpt2 import CtxGpt2Config

GPT2_EXPORT, GPT2_SEQUENCE_EXPORT, GPT2_CHOICE_EXPORT, GPT2_CONVERSION = gpt_conversions(
    [
        WeightRenaming(r"^transformer\.", r"gpt2."),
        WeightRenaming(r"wte\.", r"word_embeddings."),
        WeightRenaming(r"wpe\.", r"position_embeddings."),
        WeightRenaming(r"ln_f\.", r"final_norm."),
    ]
)


def init_residual_projections(module: nn.Module, config: CtxGpt2Config) -> None:
    """Initialize the linear layers before the residual stream with a standard deviation scaled by
    1 / sqrt(residual sub-layers) (Radford et al. 2019, section 2.3)."""
    std = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
    if isinstance(module, SelfAttention):
        init.normal_(module.out_proj.weight, std=std)
    elif isinstance(module, FeedForward):
        init.normal_(module.down_proj.weight, std=std)


class CtxGpt2PreTrainedModel(CtxPreTrainedModel):
    """Base class of the GPT-2 models."""

    config: CtxGpt2Config
    base_model_prefix = "gpt2"
    reference_model_type = "gpt2"
    export_conversion = GPT2_EXPORT
    # the output layer, and buffers of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"attn\.(masked_)?bias$"]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module, see `init_residual_projections`."""
        super()._init_weights(module)
        init_residual_projections(module, self.config)


class CtxGpt2Model(TransformerDecoder, CtxGpt2PreTrainedModel):
    """The GPT-2 decoder without the output layer."""

    reference_architecture = "GPT2Model"
    norm = "pre"
    normalizes_embeddings = False


class CtxGpt2HeadModel(DecoderHeadModel, CtxGpt2PreTrainedModel):
    """Base class of the GPT-2 models with a head."""

    encoder_class = CtxGpt2Model


class CtxGpt2ForCausalLM(heads.ForCausalLM, CtxGpt2HeadModel, GenerationMixin):
    """GPT-2 language model; the output layer is tied to the word embeddings."""

    _tied_weights_keys = {"lm_head.weight": "gpt2.word_embeddings.weight"}
    reference_architecture = "GPT2LMHeadModel"


class CtxGpt2ForSequenceClassification(DecoderForSequenceClassification, CtxGpt2HeadModel):
    """GPT-2 with a classifier or regressor on the last token's state."""

    reference_architecture = "GPT2ForSequenceClassification"
    export_conversion = GPT2_SEQUENCE_EXPORT
    classifier_bias = False


class CtxGpt2ForMultipleChoice(heads.ForMultipleChoice, CtxGpt2HeadModel):
    """GPT-2 with a multiple-choice classifier on the last token's state and an auxiliary language modeling loss, as in
    GPT (Radford et al. 2018, section 3)."""

    _tied_weights_keys = {"lm_head.weight": "gpt2.word_embeddings.weight"}
    reference_architecture = "GPT2DoubleHeadsModel"
    export_conversion = GPT2_CHOICE_EXPORT
    has_auxiliary_lm_loss = True
    output_layer_name = "lm_head"


class CtxGpt2ForTokenClassification(heads.ForTokenClassification, CtxGpt2HeadModel):
    """GPT-2 with a token classifier."""

    reference_architecture = "GPT2ForTokenClassification"


class CtxGpt2ForQuestionAnswering(heads.ForQuestionAnswering, CtxGpt2HeadModel):
    """GPT-2 with a span classifier for extractive question answering."""

    reference_architecture = "GPT2ForQuestionAnswering"
