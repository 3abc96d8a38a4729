"""Heads of Transformer encoder-decoders: conditional generation, and the base class of task heads."""

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderOutput,
    reject_segments,
    resize_token_embeddings,
)
from hf_ctxmodels.architectures.transformer_decoder import extend_languages
from hf_ctxmodels.core.caches import PreallocatedCache, SharedSourceCache
from hf_ctxmodels.core.host_copies import needs_static_sizes, on_host, select_true
from hf_ctxmodels.core.inputs import check_aligned, check_source_mask, sequence_starts
from hf_ctxmodels.heads.base import (
    HeadModel,
    ItemCounts,
    loss_from_logits,
    mask_of_targets,
    validate_targets,
)
from hf_ctxmodels.heads.seq2seq import ConditionalGenerationOutput, Seq2SeqHead, as_model_output
from hf_ctxmodels.layers.pooling import build_token_mask, last_token_columns, mask_until_last_target, states_at

# read here, because `torch.compile` does not trace `fields`
_ENCODER_FIELDS = tuple(field.name for field in fields(EncoderDecoderOutput) if field.name != "last_hidden_state")


class EncoderDecoderHeadModel(HeadModel):
    """A head on an encoder-decoder, which has no pooler.

    Heads on a sequence read the decoder's state at the last end token of a row, as in BART; in a row without an end
    token, and with `inputs_embeds`, at the last token.
    """

    encoder_class: ClassVar[type[EncoderDecoder]]  # type: ignore[misc]
    supports_reentrant_checkpointing = False
    _resize_token_embeddings = resize_token_embeddings

    def build_encoder(self, config: Any) -> EncoderDecoder:
        """Create the encoder-decoder."""
        return self.encoder_class(config)

    def encoder_fields(self, outputs: Any) -> dict[str, Any]:
        """Return the fields of the encoder-decoder's output that the output of a task head contains."""
        return {name: getattr(outputs, name, None) for name in _ENCODER_FIELDS}

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the encoder-decoder; for heads on a sequence, `pooler_output` is the input of the head."""
        ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
        is_invalid = self.input_shape(ids, embeddings) is None or (ids is not None and embeddings is not None)
        if not self.uses_pooled_output or self.pooling is not None or is_invalid:  # the encoder raises the error
            return super().encode(attention_mask=attention_mask, **inputs)
        tokens: Any = embeddings if ids is None else ids
        is_padding_mask = isinstance(attention_mask, Tensor) and attention_mask.shape == tokens.shape[:2]
        token_mask = build_token_mask(tokens, attention_mask if is_padding_mask else None, inputs.get("sequence_ids"))
        columns = self._end_token_columns(ids, token_mask)
        needs_all_states = (
            needs_static_sizes(tokens)
            or self.layer_mix is not None
            or self.feature_lookup is not None
            or self.config.returns_hidden_states(inputs.get("output_hidden_states"))
            or (attention_mask is not None and not is_padding_mask)
        )
        output_mask = None
        if not needs_all_states:
            length = tokens.shape[1]
            output_mask = on_host(lambda ends: torch.arange(length, device=ends.device) == ends[:, None], columns)
        outputs = super().encode(attention_mask=attention_mask, output_mask=output_mask, **inputs)
        states = outputs.last_hidden_state
        outputs.pooler_output = states_at(states, columns) if output_mask is None else states
        return outputs

    def _end_token_columns(self, input_ids: Tensor | None, token_mask: Tensor) -> Tensor:
        """(batch,) column of the last end token, or of the last token in rows without an end token."""
        end_ids = self.config.eos_token_id
        if input_ids is None or end_ids is None:
            return on_host(lambda mask: last_token_columns(mask, mask), token_mask)
        end_ids = [end_ids] if isinstance(end_ids, int) else end_ids

        def end_columns(ids: Tensor, mask: Tensor) -> Tensor:
            is_end = torch.stack([ids == end_id for end_id in end_ids]).any(0) & mask
            return torch.where(is_end.any(1), last_token_columns(ids, is_end), last_token_columns(ids, mask))

        return on_host(end_columns, input_ids, token_mask)


class TransformerForConditionalGeneration(Seq2SeqHead, EncoderDecoderHeadModel):
    """Generates a target from a source, with an output layer without bias.

    With `labels` and without a `decoder_attention_mask` the decoder computes up to the last label of each row only,
    since no earlier state depends on later ones. With `sequence_ids` and `decoder_sequence_ids` a row has several
    pairs: each target is generated from the source with the same index in its row.
    """

    output_layer_name = "lm_head"
    _is_stateful = False

    def build_head(self, config: Any) -> None:
        """Create the output layer."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The encoder, run once by `generate`."""
        return self.base_model.get_encoder()

    @can_return_tuple
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
        cross_attention_mask: Tensor | None = None,
        langs: Tensor | None = None,
        decoder_langs: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """Compute logits, or the loss with `labels`.

        `labels`, `encoder_outputs` and `use_cache` are described in
        `heads.RecurrentForConditionalGeneration.forward`, the other arguments in `EncoderDecoder.forward`; the target
        may have another language than the source, so that `langs` is no default of `decoder_langs`. Without
        `decoder_input_ids` (batch, steps) or `decoder_inputs_embeds` (batch, steps, hidden), the decoder's input is
        `labels` shifted to the right, after `config.decoder_start_token_id`.
        """
        if not self.encoder_class.has_segments:
            reject_segments(kwargs)
        labels = None if labels is None else validate_targets(labels, "labels")
        output_flags = self.config.resolve_output_flags(kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                sequence_ids=sequence_ids,
                return_dict=True,
                **self.extra_ids(langs=langs),
                **kwargs,
            )
        else:
            encoder_outputs = as_model_output(encoder_outputs)
            check_source_mask(attention_mask, encoder_outputs.last_hidden_state)
        ids = self.resolve_decoder_input_ids(
            encoder_outputs.last_hidden_state.shape[0], decoder_input_ids, labels, decoder_inputs_embeds
        )
        if decoder_input_ids is None and ids is not None and decoder_sequence_ids is not None:
            check_aligned({"decoder_sequence_ids": decoder_sequence_ids}, *ids.shape)
            start_id = self.config.decoder_start_token_id or 0
            ids = on_host(
                lambda tokens, numbers: tokens.masked_fill(sequence_starts(numbers), start_id),
                ids,
                decoder_sequence_ids,
            )
        is_recording = any(value is not None and value is not False for value in output_flags.values())
        computes_logits = labels is None or bool(use_cache) or self.needs_all_logits(return_logits)
        needs_all_states, output_mask = computes_logits or is_recording, None
        if labels is not None and self.config.unpad and not (needs_all_states or needs_static_sizes(labels)):
            output_mask = mask_of_targets(labels)
            is_padded = decoder_attention_mask is not None or past_key_values is not None
            if not is_padded and decoder_sequence_ids is None:  # a sequence without a label has a source, too
                decoder_attention_mask = mask_until_last_target(output_mask)
        outputs = self.base_model(
            attention_mask=attention_mask,
            sequence_ids=sequence_ids,
            decoder_input_ids=ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_inputs_embeds=decoder_inputs_embeds if ids is None else None,
            decoder_position_ids=decoder_position_ids,
            decoder_sequence_ids=decoder_sequence_ids,
            cross_attention_mask=cross_attention_mask,
            decoder_langs=decoder_langs,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_mask=output_mask,
            return_dict=True,
            **output_flags,
        )
        states, loss, logits = outputs.last_hidden_state, None, None
        if labels is None or needs_all_states:
            logits = self.token_logits(states)
            loss = None if labels is None else loss_from_logits(logits, labels, num_items_in_batch)
        else:
            states = select_true(states, mask_of_targets(labels)) if output_mask is None else states
            loss = self.token_loss(states, labels, num_items_in_batch)
        return ConditionalGenerationOutput(
            loss=loss,
            logits=logits if computes_logits else None,
            past_key_values=outputs.past_key_values if use_cache else None,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, decoder_langs: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as in transformers; new tokens have the last language of `decoder_langs`."""
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if decoder_langs is not None:
            end, steps = input_ids.shape[1], inputs["decoder_input_ids"].shape[1]
            inputs["decoder_langs"] = extend_languages(decoder_langs, end)[:, end - steps :]
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """The decoder's padding mask, unchanged: the layouts create masks for all caches."""
        return attention_mask

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        caches: Any = model_kwargs.get("past_key_values")
        if not isinstance(caches, EncoderDecoderCache) or hasattr(caches, "_is_user_defined"):
            return
        self_cache, cross_cache = caches.self_attention_cache, caches.cross_attention_cache
        config = self.config.get_text_config(decoder=True)
        if type(self_cache) is DynamicCache and not self_cache.offloading:
            self_cache = PreallocatedCache(config=config)
        if type(cross_cache) is DynamicCache and not cross_cache.offloading:
            targets_per_source = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            cross_cache = SharedSourceCache(config=config, targets_per_source=targets_per_source)
        model_kwargs["past_key_values"] = EncoderDecoderCache(self_cache, cross_cache)
