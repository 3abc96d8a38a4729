"""CoVe's pretraining: a translator with attention on the encoder (McCann et al. 2017, section 3)."""

from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.attentional_decoder import AttentionalDecoder, DecoderState
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.modeling_base import is_traced
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.modeling_cove import CtxCoveHeadModel, CtxCoveModel, CtxCoveModelOutput
from hf_ctxmodels.translation import ForTranslation


class CtxCoveForConditionalGeneration(CtxCoveHeadModel, ForTranslation, GenerationMixin):
    """The translation model (section 3). The decoder starts from the encoder's last states."""

    for_tasks = False
    decoder: AttentionalDecoder

    def build_encoder(self, config: CtxCoveConfig) -> CtxCoveModel:
        """The encoder; `generate` runs it by itself."""
        encoder = CtxCoveModel(config)
        encoder.gives_states = True
        return encoder

    def build_head(self, config: CtxCoveConfig) -> None:
        """The decoder, and the softmax's weights."""
        self.decoder = AttentionalDecoder(
            config.target_vocab_size,
            config.embedding_size,
            config.hidden_size,
            config.num_hidden_layers,
            dropout=config.hidden_dropout_prob,
            attends=config.decoder_attention,
            padding_idx=config.pad_token_id,
        )
        self.prediction = nn.Linear(config.hidden_size, config.target_vocab_size)

    def write(
        self,
        encoded: CtxCoveModelOutput,
        attention_mask: Tensor | None,
        ids: Tensor,
        asked: Tensor | None,
        remembered: DecoderState | None,
    ) -> tuple[Tensor, DecoderState | None]:
        """Run the decoder, see `ForTranslation.write`."""
        read, state = encoded.last_hidden_state, remembered
        if state is None:
            if encoded.final_hidden is None or encoded.final_cell is None:
                raise CtxError("encoder_outputs have no states to start from.", mend="run it with use_states=True.")
            state = self.decoder.start(encoded.final_hidden, encoded.final_cell)
        memory, tokens = read[..., self.config.embedding_size :], token_mask(read, attention_mask)
        if asked is None or is_traced(ids) or not self.config.unpad:
            states, state = self.decoder(ids, memory, tokens, state)
            return states if asked is None else states[asked], state
        return self.decoder.asked_states(ids, asked, memory, tokens, state), None
