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
    """The translation model (section 3). The decoder starts from the encoder's final states."""

    is_task_head = False
    required_encoder_outputs = ("last_hidden_state", "final_hidden", "final_cell")
    decoder: AttentionalDecoder

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """Create the encoder."""
        encoder = CtxCoveModel(config)
        encoder.returns_final_states = True
        return encoder

    def build_head(self, config: CtxCoveConfig) -> None:
        """Create the decoder and the output layer."""
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
        """The decoder's initial state: the encoder's final states."""
        assert encoded.final_hidden is not None  # both are in `required_encoder_outputs`
        assert encoded.final_cell is not None
        return self.decoder.start(encoded.final_hidden, encoded.final_cell)

    def decode(self, ids: Tensor, target_mask: Tensor | None, inputs: heads.DecoderInputs) -> DecoderOutput:
        """Run the decoder on target ids, see `ForConditionalGeneration.decode`."""
        encoded = inputs.encoded.last_hidden_state
        memory, tokens = encoded[..., self.config.embedding_size :], token_mask(encoded, inputs.attention_mask)
        if target_mask is None:
            return self.decoder(ids, memory, tokens, inputs.cache, inputs.record)
        return DecoderOutput(self.decoder.target_states(ids, target_mask, memory, tokens, inputs.cache))
