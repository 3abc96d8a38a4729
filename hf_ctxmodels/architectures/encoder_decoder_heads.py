"""Heads of Transformer encoder-decoders: the language model of targets, and tasks on the decoder's states."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
)

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder, ResizesBothTables, refuse_segments
from hf_ctxmodels.architectures.transformer_stack import Source
from hf_ctxmodels.core.generation_cache import BeamSearchCache, PreallocatedCache, SharedSourceCache
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.heads.base import HeadModel, with_named_argument
from hf_ctxmodels.heads.downstream import SequenceHead
from hf_ctxmodels.heads.seq2seq import DecoderInputs, ForConditionalGeneration
from hf_ctxmodels.layers.decoder_output import DecoderOutput
from hf_ctxmodels.layers.pooling import last_token_columns, mask_until_last_target, states_at, token_mask

_OUTPUTS: dict[type, type] = {
    SequenceClassifierOutput: Seq2SeqSequenceClassifierOutput,
    QuestionAnsweringModelOutput: Seq2SeqQuestionAnsweringModelOutput,
}


class EncoderDecoderHeadModel(ResizesBothTables, HeadModel):
    """A head on an encoder-decoder, which has no pooler."""

    encoder_class: ClassVar[type[EncoderDecoder]]  # type: ignore[misc]
    supports_reentrant_checkpointing = False

    def build_encoder(self, config: Any) -> EncoderDecoder:
        """Create the encoder-decoder."""
        return self.encoder_class(config)

    def build_output(self, kind: type, encoded: Any, **found: Any) -> Any:
        """The output of a task's head: of transformers' kind for encoder-decoders."""
        if kind not in _OUTPUTS:
            return super().build_output(kind, encoded, **found)
        names: tuple[str, ...] = ("decoder_hidden_states", "decoder_attentions", "cross_attentions")
        names += ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions", "past_key_values")
        return _OUTPUTS[kind](**found, **{name: getattr(encoded, name, None) for name in names})


class TransformerForConditionalGeneration(ForConditionalGeneration):
    """The language model of targets; the output layer has no bias.

    With `labels` and without a `decoder_attention_mask` the decoder computes up to each row's last label only, which
    no earlier state depends on. With `sequence_ids` and `decoder_sequence_ids` a row holds several pairs: each target
    is written from the source of the same place in its row.
    """

    output_layer = "lm_head"
    decoder_arguments: ClassVar[tuple[str, ...]] = (
        "decoder_attention_mask",
        "decoder_inputs_embeds",
        "decoder_position_ids",
        "decoder_sequence_ids",
    )
    _is_stateful = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name `sequence_ids` and the `decoder_arguments` in the signature of `forward`, read by Trainer."""
        super().__init_subclass__(**kwargs)
        for name in ("sequence_ids", *cls.decoder_arguments):
            cls.forward = with_named_argument(cls.forward, name)  # type: ignore[method-assign]

    def build_head(self, config: Any) -> None:
        """The output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, run once by `generate`."""
        return self.base_model.get_encoder()

    @property
    def prediction(self) -> nn.Linear:  # type: ignore[override]
        """The output layer."""
        return self.lm_head

    def start(self, encoded: Any) -> EncoderDecoderCache:
        """An empty cache."""
        return self.base_model.new_cache()

    def first_state(self, encoded: Any, use_cache: bool | None) -> EncoderDecoderCache | None:
        """An empty cache with `use_cache`, else none."""
        return self.start(encoded) if use_cache else None

    def encode_source(self, token_type_ids: Tensor | None = None, **inputs: Any) -> Any:
        """Run the encoder."""
        refuse_segments({"token_type_ids": token_type_ids})
        return self.get_encoder()(return_dict=True, **inputs)

    def source(self, given: DecoderInputs) -> Source:
        """What the decoder attends to."""
        return Source(given.encoded.last_hidden_state, given.attention_mask, given.sequence_ids)

    def decode(self, ids: Tensor | None, target_mask: Tensor | None, given: DecoderInputs) -> DecoderOutput:
        """See `ForConditionalGeneration.decode`."""
        own = {name: value for name, value in given.further.items() if name.startswith("decoder_")}
        written = {name.removeprefix("decoder_"): value for name, value in own.items()}
        written["inputs_embeds"] = written["inputs_embeds"] if ids is None else None
        whole = written["sequence_ids"] is not None  # a sequence without a label has its own source
        if target_mask is not None and written["attention_mask"] is None and given.cache is None and not whole:
            written["attention_mask"] = mask_until_last_target(target_mask)
        decoded = self.base_model.decode(
            self.source(given),
            input_ids=ids,
            past_key_values=given.cache,
            output_mask=target_mask,
            **written,
            **given.recorded,
        )
        return DecoderOutput(
            decoded.last_hidden_state,
            decoded.past_key_values,
            decoded.hidden_states,
            decoded.cross_attentions,
            decoded.attentions,
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The decoder's padding mask as it is: each layout makes its own masks, for a cache of fixed length too."""
        return attention_mask

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        caches: Any = model_kwargs.get("past_key_values")
        if not isinstance(caches, EncoderDecoderCache) or hasattr(caches, "_is_user_defined"):
            return
        own, cross = caches.self_attention_cache, caches.cross_attention_cache
        config = self.config.get_text_config(decoder=True)
        if _is_plain(own):
            own = PreallocatedCache(config=config)
        if _is_plain(cross):
            targets_per_source = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            cross = SharedSourceCache(config=config, targets_per_source=targets_per_source)
        model_kwargs["past_key_values"] = BeamSearchCache(own, cross)


def _is_plain(cache: Cache) -> bool:
    return type(cache) is DynamicCache and not cache.offloading


class EndTokenHead(SequenceHead):
    """A head on the decoder's state at a row's last end token; in a row without one, and with `inputs_embeds`, at its
    last token."""

    def encode(self, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the encoder-decoder; `pooler_output` is the head's input."""
        if self.pooling is not None:
            return super().encode(attention_mask=attention_mask, **kwargs)
        ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if self.input_shape(ids, embeddings) is None or (ids is not None and embeddings is not None):
            return HeadModel.encode(self, attention_mask=attention_mask, **kwargs)  # which says what is wrong
        given: Any = embeddings if ids is None else ids
        fits = isinstance(attention_mask, Tensor) and attention_mask.shape == given.shape[:2]
        columns = self.read_columns(given, ids, attention_mask if fits else None)
        places = torch.arange(given.shape[1], device=given.device) == columns[:, None]
        recorded = self.config.resolve_output_flags(kwargs)["output_hidden_states"]
        everywhere = is_traced(given) or self.layer_mix is not None or self.feature_lookup is not None
        everywhere = everywhere or (recorded is not None and recorded is not False)
        output_mask = None if everywhere or (not fits and attention_mask is not None) else places
        outputs = HeadModel.encode(self, attention_mask=attention_mask, output_mask=output_mask, **kwargs)
        states = outputs.last_hidden_state
        outputs.pooler_output = states if output_mask is not None else states_at(states, columns)
        return outputs

    def read_columns(self, given: Tensor, ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """(batch,) column of the state that is read.

        Args:
            given: (batch, length, ...) the input.
            ids: (batch, length), None with embeddings.
            attention_mask: (batch, length), 0 at padding, or None.
        """
        tokens = token_mask(given, attention_mask)
        last, known = last_token_columns(given, tokens), self.config.eos_token_id
        if ids is None or known is None:
            return last
        ends = torch.stack([ids == end for end in ([known] if isinstance(known, int) else known)]).any(0) & tokens
        return torch.where(ends.any(1), last_token_columns(given, ends), last)
