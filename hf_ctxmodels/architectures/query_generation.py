"""Generation with an encoder: source, target and query tokens in one stack (Dong et al. 2019, section 2.5; Xiao et al.
2020, section 3.1).

Training encodes the source, the target and the query tokens in one pass. `generate` encodes the source once, and
then two tokens per step, the last target token and a query token; the query's keys and values are not kept.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.query_encoding import (
    QueryTokens,
    SourceEncoder,
    TokenColumns,
    append_columns,
    encode_columns,
    prepare_source,
    required_target_tokens,
    target_columns,
)
from hf_ctxmodels.core.caches import PreallocatedCache
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, select_true, to_device, true_indices
from hf_ctxmodels.core.inputs import (
    check_ids,
    check_padding_mask,
    check_source_mask,
    check_tensors,
    reject_unused_tensors,
)
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.heads.base import IGNORE_INDEX, language_modeling_loss, mask_of_targets, validate_targets
from hf_ctxmodels.heads.masked_lm import build_mlm_head
from hf_ctxmodels.heads.seq2seq import ConditionalGenerationOutput
from hf_ctxmodels.layers.transformer import StackOutput

Prediction = tuple[list[Tensor], dict[str, Any]]
"""(batch, steps, hidden) states of the token queries, and of the span queries if there are any, (labels, hidden) if no
logits are computed; and other fields of the output."""


class QueryForConditionalGeneration(heads.Seq2SeqHead):
    """Predicts each target token from the source, the preceding target tokens, and a query token at its position.

    As in the encoder-decoders of transformers, `decoder_input_ids` are the tokens before each predicted token, and the
    first is `config.decoder_start_token_id`. The output head is the masked-LM head `mlm_head`. The class of a family
    also derives from its masked-LM model, and from `GenerationMixin` directly. Attention weights between target tokens
    are not returned.

    Attributes:
        source_segment: Segment id of the source; None for `token_type_ids`.
        target_segment: Segment id of the target and of query tokens.
    """

    source_segment: ClassVar[int | None] = None
    target_segment: ClassVar[int]
    output_layer_name = "mlm_head.decoder"

    def build_head(self, config: Any) -> None:
        """Create the masked-LM head."""
        self.mlm_head = build_mlm_head(config, config.hidden_size)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the module with which `generate` encodes the source."""
        return SourceEncoder(self, self.source_segment)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        masked_target_ids: Tensor | None = None,
        span_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """Compute the loss if there are `labels`, else the logits.

        Args:
            input_ids, attention_mask, token_type_ids, inputs_embeds: The source, (batch, length), with its special
                tokens. `token_type_ids` are ignored by families with one segment for the whole source.
            decoder_input_ids: (batch, steps) token before each predicted token, which may have been replaced by noise;
                None for `labels` shifted to the right, after `config.decoder_start_token_id`. With `past_key_values`,
                all target tokens so far.
            labels: (batch, steps) target ids including the end token; -100 is ignored.
            masked_target_ids: (batch, steps) target in which some tokens are replaced by the mask token, padded with
                `config.pad_token_id`. `labels` are then the original ids at the masked positions, -100 elsewhere, and
                there are no query tokens.
            span_ids: (batch, steps) span id of each target token. A second set of queries predicts whole spans, each
                from the tokens before it. The loss is the mean of both, weighted by `config.span_loss_weight`.
            encoder_outputs: An output of `get_encoder()`, which replaces the source; not with `masked_target_ids` or
                `span_ids`.
            past_key_values: The cache of source and target from an earlier forward; extended in place.
            use_cache: Whether to return `past_key_values`; without labels only.
            logits_to_keep: As in transformers: the number of last steps whose logits are returned, 0 for all; or a
                tensor of steps.
            num_items_in_batch: Number of labels in all batches of the step, by which the summed loss is divided.
            return_logits: See `needs_all_logits`.
        """
        check_tensors(attention_mask=attention_mask)
        check_padding_mask(attention_mask)
        reject_unused_tensors(**kwargs)
        decoding_state = {"encoder_outputs": encoder_outputs, "past_key_values": past_key_values}
        if masked_target_ids is not None:
            excluded = {"decoder_input_ids": decoder_input_ids, "span_ids": span_ids, **decoding_state}
            reason = "is the whole target, without spans, encoded in one pass with the source."
            _reject_arguments(excluded, "masked_target_ids", reason)
        elif span_ids is not None:
            reason = "belong to a target that is encoded in one pass with the source."
            _reject_arguments(decoding_state, "span_ids", reason)
        labels = None if labels is None else validate_targets(labels, "labels")
        flags = self.config.resolve_output_flags(kwargs)
        computes_logits = labels is None or self.needs_all_logits(return_logits) or any(flags.values())
        is_source_encoded = encoder_outputs is not None or past_key_values is not None
        if masked_target_ids is None and (is_source_encoded or (use_cache and labels is None)):
            if not is_source_encoded:
                encoder_outputs = self.get_encoder()(input_ids, attention_mask, token_type_ids, inputs_embeds, **flags)
            computes_logits = True
            num_last_steps = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
            states_by_set, recorded = self._predict_with_cache(
                encoder_outputs, attention_mask, past_key_values, decoder_input_ids, labels, num_last_steps, flags
            )
            if not use_cache:
                del recorded["past_key_values"]
        else:
            shape = self.input_shape(input_ids, inputs_embeds)
            if shape is not None and masked_target_ids is None:
                decoder_input_ids = self.resolve_decoder_input_ids(shape[0], decoder_input_ids, labels)
            source = prepare_source(self, input_ids, inputs_embeds, attention_mask, token_type_ids, self.source_segment)
            if masked_target_ids is not None:
                states_by_set, recorded = self._predict_masked_tokens(
                    source, masked_target_ids, labels, computes_logits, flags
                )
            else:
                assert decoder_input_ids is not None
                states_by_set, recorded = self._predict_all_steps(
                    source, decoder_input_ids, labels, span_ids, computes_logits, flags
                )
        loss = logits = None
        if labels is not None:
            losses = [
                language_modeling_loss(
                    self.mlm_head.decoder,
                    select_true(states, mask_of_targets(labels)) if computes_logits else states,
                    labels,
                    num_items_in_batch,
                    summed_loss=self._summed_loss,
                )
                for states in states_by_set
            ]
            weight = self.config.span_loss_weight
            loss = losses[0] if len(losses) == 1 else (1 - weight) * losses[0] + weight * losses[1]
        if computes_logits:
            logits = self.mlm_head(slice_logits_to_keep(states_by_set[0], logits_to_keep))
        return ConditionalGenerationOutput(loss=loss, logits=logits, **recorded)

    def _predict_all_steps(
        self,
        source: TokenColumns,
        target_ids: Tensor,
        labels: Tensor | None,
        span_ids: Tensor | None,
        computes_logits: bool,
        output_flags: Mapping[str, Any],
    ) -> Prediction:
        """Predict all target tokens in one pass over source, target and query tokens; arguments as in `forward`."""
        target_ids = host_copy(target_ids)
        has_label = torch.ones_like(target_ids, dtype=torch.bool)
        if labels is not None:
            has_label = host_copy(labels) != IGNORE_INDEX
        is_predicted = torch.ones_like(has_label) if computes_logits else has_label
        num_steps, device = is_predicted.shape[1], is_predicted.device
        source_lengths = source.is_token.sum(1, keepdim=True)
        ids, first_step_tokens = self._target_tokens(target_ids)
        is_required = required_target_tokens(is_predicted, ids.shape[1], first_step_tokens)
        queries = self._query_tokens(
            steps=torch.arange(num_steps, device=device).expand_as(is_predicted),
            is_selected=is_predicted,
            first_position=source_lengths + first_step_tokens,
            num_previous=source_lengths + is_required.sum(1, keepdim=True),
        )
        query_sets = [queries.attending_to_prefix()]
        if span_ids is not None:
            span_ids = host_copy(validate_targets(span_ids, "span_ids", target_ids.shape))
            num_previous = queries.num_previous + is_predicted.sum(1, keepdim=True)
            span_queries = replace(queries, is_selected=has_label, num_previous=num_previous)
            query_sets.append(span_queries.attending_to_span(span_ids))
        num_sets = len(query_sets)
        target_tokens = target_columns(ids, is_required, source_lengths, self.target_segment)
        columns = append_columns(self, source, [target_tokens, *query_sets])
        is_selected = torch.cat([is_predicted] * num_sets, 1)
        first_query = columns.width - is_selected.shape[1]
        output_mask = None if computes_logits else F.pad(is_selected, (first_query, 0), value=False)
        is_labeled_token = required_target_tokens(has_label, ids.shape[1], first_step_tokens)
        needs_position = torch.cat([source.is_token, is_labeled_token, *[has_label] * num_sets], 1)
        outputs = encode_columns(self, columns, output_mask, needs_position=needs_position, **output_flags)
        states = outputs.last_hidden_state
        if computes_logits:
            states_by_set = [*states[:, first_query:].chunk(num_sets, 1)]
        else:
            set_index = torch.arange(num_sets, device=device).repeat_interleave(num_steps)
            set_of_state = select_true(set_index.expand_as(is_selected), is_selected)
            set_indices = (true_indices(set_of_state == index) for index in range(num_sets))
            states_by_set = [states[to_device(indices, states.device)] for indices in set_indices]
        steps = slice(first_query, first_query + num_steps)
        return states_by_set, _recorded_outputs(outputs, source.width, steps)

    def _predict_masked_tokens(
        self,
        source: TokenColumns,
        ids: Tensor,
        labels: Tensor | None,
        computes_logits: bool,
        output_flags: Mapping[str, Any],
    ) -> Prediction:
        """Predict the masked tokens of the target `ids`, without query tokens; arguments as in `forward`."""
        batch_size = source.is_token.shape[0]
        check_ids("masked_target_ids", ids, self.config.vocab_size, "vocab_size")
        if ids.dim() != 2 or ids.shape[0] != batch_size or not ids.shape[1]:
            raise CtxError(f"masked_target_ids is {tuple(ids.shape)}, expected ({batch_size}, steps).")
        ids = host_copy(ids)
        is_token, padding_id = torch.ones_like(ids, dtype=torch.bool), self.config.pad_token_id
        if padding_id is not None:
            is_token = ids != padding_id
        output_mask = None
        if labels is not None:
            has_label = host_copy(validate_targets(labels, "labels", ids.shape)) != IGNORE_INDEX
            is_token = is_token | has_label
            output_mask = None if computes_logits else F.pad(has_label, (source.width, 0), value=False)
        is_token = is_token.flip(1).cummax(1).values.flip(1)  # all up to the last one
        source_lengths = source.is_token.sum(1, keepdim=True)
        target = target_columns(ids, is_token, source_lengths, self.target_segment)
        columns = append_columns(self, source, [target])
        outputs = encode_columns(self, columns, output_mask, **output_flags)
        states = outputs.last_hidden_state[:, source.width :] if computes_logits else outputs.last_hidden_state
        return [states], _recorded_outputs(outputs, source.width, slice(source.width, columns.width))

    def _predict_with_cache(
        self,
        encoder_outputs: Any,
        attention_mask: Tensor | None,
        cache: Cache | None,
        decoder_input_ids: Tensor | None,
        labels: Tensor | None,
        num_last_steps: int,
        output_flags: Mapping[str, Any],
    ) -> Prediction:
        """Predict the last steps, 0 for all, after the tokens in the cache; other arguments as in `forward`."""
        batch_size = None
        if encoder_outputs is not None:
            if getattr(encoder_outputs, "keys_and_values", None) is None:
                hint = "pass the output of model.get_encoder()."
                raise CtxError("encoder_outputs has no keys_and_values.", hint=hint)
            check_source_mask(attention_mask, encoder_outputs.last_hidden_state)
            batch_size = len(encoder_outputs.keys_and_values)
        ids = self.resolve_decoder_input_ids(batch_size, decoder_input_ids, labels)
        if cache is None:
            cache = PreallocatedCache(config=self.config)
            for layer, states in enumerate(encoder_outputs.keys_and_values.unbind(1)):
                cache.update(states[:, 0], states[:, 1], layer)
        if attention_mask is not None:
            is_source_token = host_copy(attention_mask) != 0
        else:
            from_cache = encoder_outputs is None
            width = cache.get_seq_length() if from_cache else encoder_outputs.last_hidden_state.shape[1]
            is_source_token = torch.ones(ids.shape[0], width, dtype=torch.bool, device=host_copy(ids).device)
        device, ids = ids.device, host_copy(ids)
        source_width, source_lengths = is_source_token.shape[1], is_source_token.sum(1, keepdim=True)
        target_ids, first_step_tokens = self._target_tokens(ids)
        num_cached = cache.get_seq_length() - source_width
        if num_cached > target_ids.shape[1]:
            raise CtxError(
                f"past_key_values has {num_cached} tokens of the target, decoder_input_ids {target_ids.shape[1]}.",
                hint="pass all target tokens so far.",
            )
        new_ids = target_ids[:, num_cached:]
        is_new_token = torch.ones_like(new_ids, dtype=torch.bool)
        new_tokens = target_columns(new_ids, is_new_token, source_lengths + num_cached, self.target_segment, device)
        steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[:, -num_last_steps:]
        queries = self._query_tokens(
            steps=steps,
            is_selected=torch.ones_like(steps, dtype=torch.bool),
            first_position=source_lengths + first_step_tokens,
            num_previous=source_lengths + target_ids.shape[1],
        )
        columns = append_columns(self, new_tokens, [queries.attending_to_prefix()])
        key_mask = F.pad(is_source_token, (0, num_cached + columns.width), value=True)
        outputs = encode_columns(self, columns, cache=cache, key_mask=key_mask, **output_flags)
        cache.crop(-steps.shape[1])  # remove the keys and values of the queries
        recorded = _recorded_outputs(outputs, source_width, slice(new_tokens.width, None), encoder_outputs)
        return [outputs.last_hidden_state[:, new_tokens.width :]], {**recorded, "past_key_values": cache}

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return all (batch, steps) target tokens so far; the forward skips the cached tokens."""
        return GenerationMixin.prepare_inputs_for_generation(self, input_ids, **kwargs)  # type: ignore[arg-type]

    def _summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of (targets, hidden) states, with label smoothing in training mode."""
        if not (self.training and self.config.label_smoothing):
            return self.mlm_head.summed_loss(states, targets)
        logits = self.mlm_head(states).float()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.config.label_smoothing)

    def _query_tokens(self, **fields: Tensor) -> QueryTokens:
        token_id = self.config.query_token_id
        if token_id is None or not 0 <= token_id < self.config.vocab_size:
            raise CtxError(
                f"config.query_token_id={token_id} is not a token of the vocabulary of {self.config.vocab_size}.",
                hint="set it to the id of the query token: tokenizer.mask_token_id, or the id of [ATTN].",
            )
        return QueryTokens(token_id, self.target_segment, **fields)

    def _target_tokens(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return the encoded target tokens, and the number of them on which the first step depends."""
        return (ids, 1) if self.config.feeds_start_token else (ids[:, 1:], 0)


def _reject_arguments(excluded: Mapping[str, Any], argument: str, reason: str) -> None:
    for name, value in excluded.items():
        if value is not None:
            raise CtxError(f"{argument} {reason}", location=name, hint=f"omit it, or omit {argument}.")


def _recorded_outputs(
    outputs: StackOutput, source_width: int, steps: slice, encoder_outputs: Any = None
) -> dict[str, Any]:
    """Split recorded states and attention weights between the columns of the predicted steps and the source.

    The first `source_width` columns are the source, unless it was encoded to `encoder_outputs`.
    """
    states, weights = outputs.hidden_states, outputs.attentions
    if encoder_outputs is not None:
        source_states, source_weights = encoder_outputs.hidden_states, encoder_outputs.attentions
    else:
        source_states = None if states is None else tuple(s[:, :source_width] for s in states if s is not None)
        source_weights = None if weights is None else tuple(w[:, :, :source_width, :source_width] for w in weights)
    return {
        "decoder_hidden_states": None if states is None else tuple(s[:, steps] for s in states if s is not None),
        "cross_attentions": None if weights is None else tuple(w[:, :, steps, :source_width] for w in weights),
        "encoder_hidden_states": source_states,
        "encoder_attentions": source_weights,
    }
