"""MASS (Song et al. 2019, arXiv 1905.02450): an encoder-decoder for one or several languages, pretrained to generate a
masked segment of its source."""

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
    """Base class of the MASS models."""

    config: CtxMassConfig
    base_model_prefix = "mass"
    _no_split_modules = ["TransformerBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"decoder\.word_embeddings\."]


class MassStack(TransformerStack):
    """Encoder or decoder of MASS: post-norm layers, and embeddings of words, positions and languages."""

    def build_words(self, config: CtxMassConfig) -> nn.Embedding:
        """Create the word embeddings."""
        embedding_class = ScaledEmbedding if config.scale_embedding else nn.Embedding
        return embedding_class(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_embeddings(self, config: CtxMassConfig) -> None:
        """Create the position and language embeddings."""
        super().build_embeddings(config)
        if config.embeds_languages:
            self.language_embeddings = nn.Embedding(config.n_langs, config.hidden_size)

    def extra_embedding_ids(self, words: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """The language ids, if the model has language embeddings."""
        name = "decoder_langs" if self.is_decoder else "langs"
        langs = language_ids(self.config, words, given.pop("langs", None), name)
        return {} if langs is None else {"langs": langs}

    def embed(self, words: Tensor, position_ids: Tensor, langs: Tensor | None = None, **beside: Tensor) -> Tensor:
        """(..., hidden) word embeddings, (...) positions and languages -> (..., hidden)."""
        return super().embed(words if langs is None else words + self.language_embeddings(langs), position_ids)


class CtxMassModel(EncoderDecoder, CtxMassPreTrainedModel):
    """The encoder-decoder.

    `forward` takes the language ids `langs` (batch, length) and `decoder_langs` (batch, steps), which defaults to
    `langs`.
    """

    stack_class = MassStack
    extra_input_ids = {"langs": "n_langs"}

    def decoder_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those that the decoder takes, by their names there."""
        langs = given.get("decoder_langs")
        others = {name: value for name, value in given.items() if name != "decoder_langs"}
        return others | {"langs": given.get("langs") if langs is None else langs}


class CtxMassHeadModel(EncoderDecoderHeadModel, CtxMassPreTrainedModel):
    """Base class of the MASS models with a head."""

    encoder_class = CtxMassModel


class CtxMassForConditionalGeneration(TransformerForConditionalGeneration, CtxMassHeadModel, GenerationMixin):
    """MASS with a language modelling head, for pretraining, translation and summarization; the output layer is tied to
    the word embeddings.

    In pretraining the decoder's input is the segment, shifted by one token: `decoder_input_ids` with their positions in
    the text, `decoder_position_ids`. `cross_attention_mask` (batch, length) is 0 at mask tokens, to which the decoder
    of the translation model does not attend (section 3.1).
    """

    _tied_weights_keys = {"lm_head.weight": "mass.encoder.word_embeddings.weight"}
    decoder_arguments: ClassVar[tuple[str, ...]] = (
        *TransformerForConditionalGeneration.decoder_arguments,
        "decoder_langs",
        "cross_attention_mask",
    )

    def build_head(self, config: CtxMassConfig) -> None:
        """Create the output layer."""
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
        """As in transformers; new tokens have the last language of `decoder_langs`."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if decoder_langs is not None:
            end, steps = input_ids.shape[1], inputs["decoder_input_ids"].shape[1]
            inputs["decoder_langs"] = extend_languages(decoder_langs, end)[:, end - steps :]
        return inputs
