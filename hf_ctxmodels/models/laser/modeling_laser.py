"""LASER (Artetxe & Schwenk 2019, arXiv 1812.10464): one sentence encoder for all languages, trained by translation."""

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.recurrent import RecurrentPreTrainedModel
from hf_ctxmodels.architectures.recurrent_sentence_encoder import RecurrentSentenceEncoder
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.core.recurrent_cache import RecurrentCache
from hf_ctxmodels.layers.decoder_output import DecoderOutput
from hf_ctxmodels.layers.recurrent.sentence_decoder import SentenceDecoder
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig


class CtxLaserPreTrainedModel(RecurrentPreTrainedModel):
    """LASER's part of the model base."""

    config: CtxLaserConfig
    base_model_prefix = "laser"
    _input_embed_layer = "embeddings"


class CtxLaserModel(RecurrentSentenceEncoder, CtxLaserPreTrainedModel):
    """The encoder, which is not given the language."""


class CtxLaserHeadModel(heads.HeadModel, CtxLaserPreTrainedModel):
    """Binds the generic heads to the encoder."""

    encoder_class = CtxLaserModel


class CtxLaserForConditionalGeneration(heads.ForConditionalGeneration, CtxLaserHeadModel, GenerationMixin):
    """The translation model; its decoder has only the sentence vector as the source."""

    pools = True
    has_target_languages = True
    required_encoder_outputs = ("last_hidden_state", "pooler_output")
    decoder: SentenceDecoder

    def build_head(self, config: CtxLaserConfig) -> None:
        """The decoder, and the linear map to logits."""
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

    def start(self, encoded: BaseModelOutputWithPooling) -> RecurrentCache:
        """Linear maps of the sentence vector."""
        return self.decoder.start(encoded.pooler_output)

    def decode(self, ids: Tensor, target_mask: Tensor | None, given: heads.DecoderInputs) -> DecoderOutput:
        """See `ForConditionalGeneration.decode`."""
        languages = given.languages
        if languages is None:
            languages = ids.new_zeros(ids.shape[0])
        vectors = self.decoder.step_vectors(given.encoded.pooler_output, languages)
        if target_mask is None:
            unpad = self.config.unpad and not is_traced(ids)
            return self.decoder(ids, vectors, given.cache, unpad=unpad, record=given.record)
        return DecoderOutput(self.decoder.target_states(ids, target_mask, vectors, given.cache))


class CtxLaserForSequenceClassification(heads.ForSequenceClassification, CtxLaserHeadModel):
    """A linear classifier of a text's vector, in any language (section 4.2)."""
