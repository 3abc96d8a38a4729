"""MASS (Song et al. 2019, arXiv 1905.02450): an encoder-decoder of one or several languages, pretrained to write a
segment that its source lacks."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.architectures.encoder_decoder_heads import (
    EncoderDecoderHeadModel,
    TransformerForConditionalGeneration,
)
from hf_ctxmodels.architectures.transformer_stack import Source, TransformerStack
from hf_ctxmodels.core.inputs import check_aligned, check_padding_mask
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.transformer import ScaledEmbedding
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.xlm.languages import extend_languages, language_ids


class CtxMassPreTrainedModel(CtxPreTrainedModel):
    """MASS's part of the model base."""

    config: CtxMassConfig
    base_model_prefix = "mass"
    _no_split_modules = ["TransformerBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"decoder\.word_embeddings\."]


class MassStack(TransformerStack):
    """MASS's encoder or decoder: BART's layers, with embeddings of the tokens' languages."""

    def build_words(self, config: CtxMassConfig) -> nn.Embedding:
        """Create the table of words."""
        kind = ScaledEmbedding if config.scale_embedding else nn.Embedding
        return kind(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_embeddings(self, config: CtxMassConfig) -> None:
        """Create the tables of positions and languages."""
        super().build_embeddings(config)
        if config.embeds_languages:
            self.language_embeddings = nn.Embedding(config.n_langs, config.hidden_size)

    def extra_embedding_ids(self, words: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """The tokens' languages, if the model has embeddings of them."""
        name = "decoder_langs" if self.is_decoder else "langs"
        langs = language_ids(self.config, words, given.pop("langs", None), name)
        return {} if langs is None else {"langs": langs}

    def embed(self, words: Tensor, position_ids: Tensor, langs: Tensor | None = None, **beside: Tensor) -> Tensor:
        """(..., hidden) word embeddings, (...) positions and languages -> (..., hidden)."""
        return super().embed(words if langs is None else words + self.language_embeddings(langs), position_ids)


class CtxMassModel(EncoderDecoder, CtxMassPreTrainedModel):
    """The encoder-decoder.

    `forward` takes `langs` and `decoder_langs`, (batch, length) and (batch, steps) numbers of the tokens' languages;
    the latter are the former where the decoder's input is made of the encoder's.
    """

    stack_class = MassStack
    extra_input_ids = {"langs": "n_langs"}

    def decoder_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those that the decoder takes, by their names there."""
        langs = given.get("decoder_langs")
        others = {name: value for name, value in given.items() if name != "decoder_langs"}
        return others | {"langs": given.get("langs") if langs is None else langs}


class CtxMassHeadModel(EncoderDecoderHeadModel, CtxMassPreTrainedModel):
    """Binds the generic heads to MASS."""

    encoder_class = CtxMassModel


class CtxMassForConditionalGeneration(TransformerForConditionalGeneration, CtxMassHeadModel, GenerationMixin):
    """The language model of the segment, or of translations and summaries; the output layer is tied to the word
    embeddings.

    In pretraining the decoder is given the segment alone: `decoder_input_ids` are the tokens before each of its tokens,
    `decoder_position_ids` their positions in the text, and `cross_attention_mask` (batch, length) is 0 at mask
    tokens, which the decoder of the translation model does not see (section 3.1).
    """

    _tied_weights_keys = {"lm_head.weight": "mass.encoder.word_embeddings.weight"}
    decoder_arguments: ClassVar[tuple[str, ...]] = (
        *TransformerForConditionalGeneration.decoder_arguments,
        "decoder_langs",
        "cross_attention_mask",
    )

    def build_head(self, config: CtxMassConfig) -> None:
        """The output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)

    def source(self, given: heads.DecoderInputs) -> Source:
        """The encoder's states, without those that `cross_attention_mask` hides."""
        states, mask = given.encoded.last_hidden_state, given.further.get("cross_attention_mask")
        if mask is None:
            return super().source(given)
        check_aligned({"cross_attention_mask": mask}, *states.shape[:2])
        check_padding_mask(mask, "cross_attention_mask")
        padding = given.attention_mask
        seen = mask if padding is None else (mask != 0) & (padding != 0)
        return Source(states, seen, given.sequence_ids)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, decoder_langs: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers; new tokens are in the language of the last one of `decoder_langs`."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if decoder_langs is not None:
            end, steps = input_ids.shape[1], inputs["decoder_input_ids"].shape[1]
            inputs["decoder_langs"] = extend_languages(decoder_langs, end)[:, end - steps :]
        return inputs
