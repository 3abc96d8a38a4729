"""BART (Lewis et al. 2020, arXiv 1910.13461): an encoder-decoder pretrained to reconstruct corrupted text."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.core_model_loading import WeightTransform
from transformers.modeling_outputs import Seq2SeqQuestionAnsweringModelOutput, Seq2SeqSequenceClassifierOutput

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder, TransformerStack
from hf_ctxmodels.architectures.encoder_decoder_heads import (
    EncoderDecoderHeadModel,
    TransformerForConditionalGeneration,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.models.bart.configuration_bart import CtxBartConfig
from hf_ctxmodels.models.bart.conversion_bart import BART_CONVERSION, BART_EXPORT, BART_UNTIED_EXPORT

_POSITION_OFFSET = 2  # positions start at padding_idx + 1 in the released code
_LAYER_NORM_EPS = 1e-5  # in transformers, which has no field for it


class CtxBartPreTrainedModel(CtxPreTrainedModel):
    """Base class of the BART models."""

    config: CtxBartConfig
    base_model_prefix = "bart"
    reference_model_type = "bart"
    _keys_to_ignore_on_load_missing = [r"^lm_head\.bias$"]  # zero, as in transformers
    # the output layer, copies of the shared word embeddings, and buffers of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"decoder\.word_embeddings\.", r"\.version$"]

    @property
    def export_conversion(self) -> list[WeightTransform]:  # type: ignore[override]
        """The weight conversion for the tying of the word embeddings."""
        if self.config.tie_word_embeddings:
            return BART_EXPORT
        return BART_UNTIED_EXPORT if self.config.shares_word_embeddings else BART_CONVERSION

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers; raise CtxError for an unsupported `layer_norm_eps`."""
        if self.config.layer_norm_eps != _LAYER_NORM_EPS:
            raise CtxError(
                f"transformers' BART has layer_norm_eps={_LAYER_NORM_EPS}, this model {self.config.layer_norm_eps}.",
                hint="use save_pretrained.",
            )
        # exported in any case, since BART has three labels by default in transformers
        labels = {name: getattr(self.config, name) for name in ("id2label", "label2id")}
        return super().reference_config() | labels


class BartStack(TransformerStack):
    """Encoder or decoder of BART."""

    def build_embeddings(self, config: CtxBartConfig) -> None:
        """Create the position embeddings, of which the first are unused."""
        self.position_embeddings = nn.Embedding(config.max_position_embeddings + _POSITION_OFFSET, config.hidden_size)

    def embed(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """(..., hidden) word embeddings and (...) positions -> (..., hidden)."""
        return super().embed(embeddings, position_ids + _POSITION_OFFSET)


class CtxBartModel(EncoderDecoder, CtxBartPreTrainedModel):
    """The BART encoder-decoder without a head."""

    stack_class = BartStack


class CtxBartHeadModel(EncoderDecoderHeadModel, CtxBartPreTrainedModel):
    """Base class of the BART models with a head."""

    encoder_class = CtxBartModel


class CtxBartForConditionalGeneration(TransformerForConditionalGeneration, CtxBartPreTrainedModel, GenerationMixin):
    """BART with a language modeling head, for pretraining and for summaries, answers and translations.

    The output layer is tied to the word embeddings. Its bias is `final_logits_bias` of transformers: a buffer of zeros
    in new and released models that is not trained.
    """

    encoder_class = CtxBartModel
    _tied_weights_keys = {"lm_head.weight": "bart.encoder.word_embeddings.weight"}

    def build_head(self, config: CtxBartConfig) -> None:
        """Create the output layer."""
        super().build_head(config)
        self.set_output_embeddings(self.lm_head)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer and convert its bias to a buffer."""
        super().set_output_embeddings(new_embeddings)
        layer: Any = new_embeddings
        bias = layer._parameters.pop("bias", None)
        if bias is not None or "bias" not in layer._buffers:
            buffer = layer.weight.new_zeros(len(layer.weight)) if bias is None else bias.detach()
            layer.register_buffer("bias", buffer)


class CtxBartForSequenceClassification(heads.ForSequenceClassification, CtxBartHeadModel):
    """BART with a classifier or regressor on the decoder's state at the last </s> (section 3.1)."""

    classifier_activation = "tanh"
    output_class = Seq2SeqSequenceClassifierOutput


class CtxBartForQuestionAnswering(heads.ForQuestionAnswering, CtxBartHeadModel):
    """BART with a span classifier on the decoder's states for extractive question answering."""

    output_class = Seq2SeqQuestionAnsweringModelOutput
