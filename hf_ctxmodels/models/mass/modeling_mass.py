"""MASS (Song et al. 2019, arXiv 1905.02450): an encoder-decoder for one or several languages, pretrained to generate a
masked segment of its source."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder, TransformerStack
from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.xlm.modeling_xlm import language_ids


class CtxMassPreTrainedModel(CtxPreTrainedModel):
    """Base class of the MASS models."""

    config: CtxMassConfig
    base_model_prefix = "mass"
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"decoder\.word_embeddings\."]


class MassStack(TransformerStack):
    """Encoder or decoder of MASS: post-norm layers, and embeddings of words, positions and languages."""

    def build_embeddings(self, config: CtxMassConfig) -> None:
        """Create the position and language embeddings."""
        super().build_embeddings(config)
        if config.embeds_languages:
            self.language_embeddings = nn.Embedding(config.n_langs, config.hidden_size)

    def extra_embedding_ids(self, tokens: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The language ids, if the model has language embeddings."""
        name = "decoder_langs" if self.is_decoder else "langs"
        langs = language_ids(self.config, tokens, kwargs.pop("langs", None), name)
        return {} if langs is None else {"langs": langs}

    def embed(self, embeddings: Tensor, position_ids: Tensor, langs: Tensor | None = None) -> Tensor:
        """(..., hidden) word embeddings, (...) positions and languages -> (..., hidden)."""
        return super().embed(
            embeddings if langs is None else embeddings + self.language_embeddings(langs), position_ids
        )


class CtxMassModel(EncoderDecoder, CtxMassPreTrainedModel):
    """The MASS encoder-decoder without a head."""

    stack_class = MassStack
    extra_input_ids = {"langs": "n_langs"}


class CtxMassForConditionalGeneration(TransformerForConditionalGeneration, CtxMassPreTrainedModel, GenerationMixin):
    """MASS with a language modeling head, for pretraining, translation and summarization; the output layer is tied to
    the word embeddings.

    In pretraining the decoder's input is the segment, shifted by one token: `decoder_input_ids` with their positions in
    the text, `decoder_position_ids`. `cross_attention_mask` is 0 at the mask tokens (section 3.2).
    """

    encoder_class = CtxMassModel
    _tied_weights_keys = {"lm_head.weight": "mass.encoder.word_embeddings.weight"}

    def build_head(self, config: CtxMassConfig) -> None:
        """Create the output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)
