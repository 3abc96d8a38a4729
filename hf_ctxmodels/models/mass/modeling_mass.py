"""MASS (Song et al. 2019, arXiv 1905.02450): an encoder-decoder for one or several languages, pretrained to generate a
masked segment of its source."""

from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.encoder_decoder import EncodedSource, EncoderDecoder, TransformerStack
from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.core.inputs import check_aligned, check_padding_mask
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.transformer import ScaledEmbedding
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.xlm.modeling_xlm import extend_languages, language_ids


class CtxMassPreTrainedModel(CtxPreTrainedModel):
    """Base class of the MASS models."""

    config: CtxMassConfig
    base_model_prefix = "mass"
    _no_split_modules = ["TransformerBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"decoder\.word_embeddings\."]


class MassStack(TransformerStack):
    """Encoder or decoder of MASS: post-norm layers, and embeddings of words, positions and languages."""

    def build_word_embeddings(self, config: CtxMassConfig) -> nn.Embedding:
        """Create the word embeddings."""
        embedding_class = ScaledEmbedding if config.scale_embedding else nn.Embedding
        return embedding_class(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)

    def build_embeddings(self, config: CtxMassConfig) -> None:
        """Create the position and language embeddings."""
        super().build_embeddings(config)
        if config.embeds_languages:
            self.language_embeddings = nn.Embedding(config.n_langs, config.hidden_size)

    def extra_embedding_ids(self, words: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The language ids, if the model has language embeddings."""
        name = "decoder_langs" if self.is_decoder else "langs"
        langs = language_ids(self.config, words, kwargs.pop("langs", None), name)
        return {} if langs is None else {"langs": langs}

    def embed(self, words: Tensor, position_ids: Tensor, langs: Tensor | None = None, **extra_ids: Tensor) -> Tensor:
        """(..., hidden) word embeddings, (...) positions and languages -> (..., hidden)."""
        return super().embed(words if langs is None else words + self.language_embeddings(langs), position_ids)


class CtxMassModel(EncoderDecoder, CtxMassPreTrainedModel):
    """The MASS encoder-decoder without a head.

    `forward` takes the language ids `langs` (batch, length) and `decoder_langs` (batch, steps), which defaults to
    `langs`.
    """

    stack_class = MassStack
    extra_input_ids = {"langs": "n_langs"}

    def split_kwargs(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the additional keyword arguments of `forward` into arguments of the encoder and of the decoder."""
        encoder_kwargs, decoder_kwargs = super().split_kwargs(kwargs)
        langs = kwargs.get("decoder_langs")
        langs = kwargs.get("langs") if langs is None else langs
        decoder_kwargs = {name: value for name, value in decoder_kwargs.items() if name != "decoder_langs"}
        return encoder_kwargs, decoder_kwargs | {"langs": langs}


class CtxMassForConditionalGeneration(TransformerForConditionalGeneration, CtxMassPreTrainedModel, GenerationMixin):
    """MASS with a language modelling head, for pretraining, translation and summarization; the output layer is tied to
    the word embeddings.

    In pretraining the decoder's input is the segment, shifted by one token: `decoder_input_ids` with their positions in
    the text, `decoder_position_ids` (section 3.1).
    """

    encoder_class = CtxMassModel
    decoder_only_arguments = ("cross_attention_mask",)
    _tied_weights_keys = {"lm_head.weight": "mass.encoder.word_embeddings.weight"}

    def build_head(self, config: CtxMassConfig) -> None:
        """Create the output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.output_bias)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        decoder_sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        return_logits: bool | None = None,
        langs: Tensor | None = None,
        decoder_langs: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> heads.ConditionalGenerationOutput:
        """Compute logits, or the loss with `labels`. Other arguments as in `TransformerForConditionalGeneration`.

        Args:
            langs, decoder_langs: (batch, length) and (batch, steps) indices of the languages of the tokens; None for
                `config.default_lang`.
            cross_attention_mask: (batch, length), 0 at tokens that are hidden from the decoder: in pretraining the mask
                tokens (section 3.1).
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            decoder_sequence_ids=decoder_sequence_ids,
            labels=labels,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            num_items_in_batch=num_items_in_batch,
            return_logits=return_logits,
            langs=langs,
            decoder_langs=decoder_langs,
            cross_attention_mask=cross_attention_mask,
            **kwargs,
        )

    def split_kwargs(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the additional keyword arguments of `forward` into arguments of the encoder and of the decoder."""
        decoder_kwargs = {"langs": kwargs["decoder_langs"], "cross_attention_mask": kwargs["cross_attention_mask"]}
        names = ("decoder_langs", "cross_attention_mask")
        return {name: value for name, value in kwargs.items() if name not in names}, decoder_kwargs

    def encoded_source(
        self,
        states: Tensor,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
        decoder_kwargs: dict[str, Any],
    ) -> EncodedSource:
        """The encoder's output, without the positions that `cross_attention_mask` hides."""
        mask = decoder_kwargs.pop("cross_attention_mask")
        if mask is None:
            return EncodedSource(states, attention_mask, sequence_ids)
        check_aligned({"cross_attention_mask": mask}, *states.shape[:2])
        check_padding_mask(mask, "cross_attention_mask")
        visible = mask if attention_mask is None else (mask != 0) & (attention_mask != 0)
        return EncodedSource(states, visible, sequence_ids)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, decoder_langs: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as in transformers; new tokens have the last language of `decoder_langs`."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if decoder_langs is not None:
            end, steps = input_ids.shape[1], inputs["decoder_input_ids"].shape[1]
            inputs["decoder_langs"] = extend_languages(decoder_langs, end)[:, end - steps :]
        return inputs
