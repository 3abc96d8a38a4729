"""LASER (Artetxe & Schwenk 2019, arXiv 1812.10464): a multilingual sentence encoder, trained by translation."""

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.sentence_encoder import RecurrentSentenceEncoder
from hf_ctxmodels.core.caches import RecurrentCache
from hf_ctxmodels.core.host_copies import is_traced
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.common import RecurrentDecoderOutput
from hf_ctxmodels.layers.recurrent.decoders import SentenceDecoder
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig


class CtxLaserPreTrainedModel(CtxPreTrainedModel):
    """Base class of the LASER models."""

    config: CtxLaserConfig
    supports_gradient_checkpointing = False  # the recurrence stores little more than its outputs
    base_model_prefix = "laser"


class CtxLaserModel(RecurrentSentenceEncoder, CtxLaserPreTrainedModel):
    """The LASER encoder; its input does not include the language."""


class CtxLaserHeadModel(heads.HeadModel, CtxLaserPreTrainedModel):
    """Base class of the LASER models with a head."""

    encoder_class = CtxLaserModel


class CtxLaserForConditionalGeneration(heads.RecurrentForConditionalGeneration, CtxLaserHeadModel, GenerationMixin):
    """The translation model; the decoder depends on the source only through the sentence embedding."""

    uses_pooled_output = True
    has_target_languages = True
    required_encoder_outputs = ("last_hidden_state", "pooler_output")
    decoder: SentenceDecoder

    def build_head(self, config: CtxLaserConfig) -> None:
        """Create the decoder and the output layer."""
        self.decoder = SentenceDecoder(
            config.target_vocab_size,
            config.embedding_size,
            config.hidden_size,
            config.num_languages,
            config.language_size,
            config.decoder_size,
            config.num_decoder_layers,
            dropout=config.hidden_dropout_prob,
            padding_idx=config.pad_token_id,
        )
        self.prediction = nn.Linear(config.decoder_size, config.target_vocab_size)

    def start(self, encoder_outputs: BaseModelOutputWithPooling) -> RecurrentCache:
        """The decoder's initial state: linear projections of the sentence embedding."""
        return self.decoder.start(encoder_outputs.pooler_output)

    def decode(
        self, decoder_input_ids: Tensor, target_mask: Tensor | None, inputs: heads.RecurrentDecoderInputs
    ) -> RecurrentDecoderOutput:
        """Run the decoder on target ids, see `RecurrentForConditionalGeneration.decode`."""
        languages = inputs.target_languages
        if languages is None:
            languages = decoder_input_ids.new_zeros(decoder_input_ids.shape[0])
        vectors = self.decoder.step_vectors(inputs.encoder_outputs.pooler_output, languages)
        if target_mask is None:
            unpad = self.config.unpad and not is_traced(decoder_input_ids)
            return self.decoder(decoder_input_ids, vectors, inputs.cache, unpad=unpad, record=inputs.is_recording)
        return RecurrentDecoderOutput(self.decoder.target_states(decoder_input_ids, target_mask, vectors, inputs.cache))


class CtxLaserForSequenceClassification(heads.ForSequenceClassification, CtxLaserHeadModel):
    """A linear classifier of the sentence embedding, in any language (section 4.2)."""
