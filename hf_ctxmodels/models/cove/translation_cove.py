"""CoVe's pretraining: an attentional translation model (McCann et al. 2017, section 3)."""

from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.core.recurrent_cache import RecurrentCache
from hf_ctxmodels.layers.decoder_output import DecoderOutput
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.recurrent.attentional_decoder import AttentionalDecoder
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.modeling_cove import CtxCoveHeadModel, CtxCoveModel, CtxCoveModelOutput


class CtxCoveForConditionalGeneration(heads.ForConditionalGeneration, CtxCoveHeadModel, GenerationMixin):
    """The translation model (section 3). The decoder's initial states are the encoder's final ones."""

    is_task_head = False
    required_encoder_outputs = ("last_hidden_state", "final_hidden", "final_cell")
    decoder: AttentionalDecoder

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """Create the encoder."""
        encoder = CtxCoveModel(config)
        encoder.returns_final_states = True
        return encoder

    def build_head(self, config: CtxCoveConfig) -> None:
        """The decoder, and the linear map to logits."""
        self.decoder = AttentionalDecoder(
            config.target_vocab_size,
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            dropout=config.hidden_dropout_prob,
            use_attention=config.decoder_attention,
            padding_idx=config.pad_token_id,
        )
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)

    def start(self, encoded: CtxCoveModelOutput) -> RecurrentCache:
        """The encoder's final states."""
        assert encoded.final_hidden is not None  # both are of `required_encoder_outputs`
        assert encoded.final_cell is not None
        return self.decoder.start(encoded.final_hidden, encoded.final_cell)

    def decode(self, ids: Tensor, target_mask: Tensor | None, given: heads.DecoderInputs) -> DecoderOutput:
        """See `ForConditionalGeneration.decode`."""
        states = given.encoded.last_hidden_state
        memory, tokens = states[..., self.config.embedding_size :], token_mask(states, given.attention_mask)
        if target_mask is None:
            return self.decoder(ids, memory, tokens, given.cache, given.record)
        return DecoderOutput(self.decoder.target_states(ids, target_mask, memory, tokens, given.cache))
