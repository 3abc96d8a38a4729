"""Writing with an encoder: source, target and query tokens in one stack (Dong et al. 2019, section 2.4; Xiao et al.
2020, section 3.1).

Training attends over source, target and queries in one call, with the target given. `generate` feeds two tokens a
step, the last one and a query, whose keys are not kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, GenerationMixin
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.query_encoding import (
    SourceReader,
    Words,
    begun_cache,
    joined,
    kept_source,
    read_source,
    run_rows,
)
from hf_ctxmodels.architectures.query_tokens import Queries, kept_before, target_rows
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import (
    check_ids,
    check_padding_mask,
    check_source_mask,
    check_tensors,
    reject_unused_tensors,
)
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.heads.base import IGNORE_INDEX, language_modeling_loss, validate_targets
from hf_ctxmodels.heads.masked_lm import build_mlm_head
from hf_ctxmodels.heads.seq2seq import ConditionalGenerationOutput
from hf_ctxmodels.layers.transformer import StackOutput


class Given(NamedTuple):
    """The target side of a batch.

    Attributes:
        ids: (batch, steps) the token before each to be predicted; or the target, masked.
        labels: (batch, steps) targets, or None.
        counts: As in `mean_over_targets`.
        everywhere: Whether logits of all steps are computed.
        logits_to_keep: Of how many last steps they are returned; 0 for all.
        recorded: Outputs to record, as in `run_stack`.
    """

    ids: Tensor
    labels: Tensor | None
    counts: ItemCounts
    everywhere: bool
    logits_to_keep: int
    recorded: dict[str, Any]

    @property
    def wanted(self) -> Tensor:
        """(batch, steps) bool, True where something is predicted."""
        if self.everywhere or self.labels is None:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return self.labels != IGNORE_INDEX


def _check_arguments(
    attention_mask: Tensor | None, unread: dict[str, Any], masked: Any, spans: Any, read: dict[str, Any], ids: Any
) -> None:
    """Raise CtxError for a wrong mask, arguments that are not read, or those that others leave without use."""
    check_tensors(attention_mask=attention_mask)
    check_padding_mask(attention_mask)
    reject_unused_tensors(**unread)
    if masked is not None:
        beside = {"decoder_input_ids": ids, "span_ids": spans, **read}
        _refuse(beside, "masked_target_ids is the whole target, without spans, read in one pass with the source.")
    if spans is not None:
        _refuse(read, "span_ids belong to a target that is read in one pass with the source.")


def _refuse(given: dict[str, Any], why: str) -> None:
    """Raise CtxError for arguments that others leave without use."""
    for name, value in given.items():
        if value is not None:
            raise CtxError(why, location=name, hint=f"leave it out, or {why.split()[0]}.")


class QueryForConditionalGeneration(heads.Seq2SeqHead):
    """Predicts each token of a target from the source, the target before it, and a query token in its place.

    `decoder_input_ids` are the tokens before each to be predicted, as of every encoder-decoder of transformers; the
    first is `config.decoder_start_token_id`. The head is the masked-LM head, `mlm_head`. A family's class derives from
    its masked-LM model as well, and from `GenerationMixin` directly. Attention weights of the target on itself are not
    returned.

    Attributes:
        source_type: Segment of the source; None for that of `token_type_ids`.
        target_type: Segment of the target and of query tokens.
    """

    source_type: ClassVar[int | None] = None
    target_type: ClassVar[int]
    output_layer = "mlm_head.decoder"

    def build_head(self, config: Any) -> None:
        """Create the masked-LM head."""
        self.mlm_head = build_mlm_head(config, config.hidden_size)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """What `generate` reads the source with."""
        return SourceReader(self, self.source_type)

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
        logits_to_keep: int = 0,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ConditionalGenerationOutput:
        """The loss with `labels`, else logits.

        Args:
            input_ids, attention_mask, token_type_ids, inputs_embeds: The source, (batch, length), with its special
                tokens. `token_type_ids` are its segments, unless the family has one for all of it.
            decoder_input_ids: (batch, steps) target ids, each the token before the one to be predicted, which may have
                been replaced; None for `labels` shifted to the right, after `config.decoder_start_token_id`. With
                `past_key_values`, all tokens so far.
            labels: (batch, steps) target ids, the end included; -100 is ignored.
            masked_target_ids: (batch, steps) the target itself, some tokens replaced by the mask token; padded with
                `config.pad_token_id`. Then `labels` are the originals in their places, -100 elsewhere, and there are no
                query tokens.
            span_ids: (batch, steps) numbers of the targets' spans: a second set of queries predicts whole spans, each
                from what is before it. The loss is the mean of both, weighted by `config.span_loss_weight`.
            encoder_outputs: What `get_encoder()` gave, in place of the source; not with the two above.
            past_key_values: The cache of source and target, returned by an earlier forward; extended in place.
            use_cache: Return `past_key_values`; without labels.
            logits_to_keep: As in transformers: how many of the last steps have logits, 0 for all.
            return_logits: See `returns_logits`.
        """
        read = {"encoder_outputs": encoder_outputs, "past_key_values": past_key_values}
        _check_arguments(attention_mask, kwargs, masked_target_ids, span_ids, read, decoder_input_ids)
        known = any(each is not None for each in read.values())
        labels = None if labels is None else validate_targets(labels, "labels")
        recorded = self.config.resolve_output_flags(kwargs)
        everywhere = labels is None or self.returns_logits(return_logits) or any(recorded.values())
        source = (input_ids, attention_mask, token_type_ids, inputs_embeds)
        rest = (labels, num_items_in_batch, everywhere, logits_to_keep, recorded)
        if masked_target_ids is None and (known or (use_cache and labels is None)):
            if not known:
                encoder_outputs = self.get_encoder()(*source, **recorded)
            rows = None if encoder_outputs is None else len(kept_source(encoder_outputs))
            given = Given(self.resolve_decoder_input_ids(rows, decoder_input_ids, labels), *rest)._replace(
                everywhere=True
            )
            return self.step(encoder_outputs, attention_mask, past_key_values, given, use_cache)
        shape = self.input_shape(input_ids, inputs_embeds)
        if shape is not None and masked_target_ids is None:
            decoder_input_ids = self.resolve_decoder_input_ids(shape[0], decoder_input_ids, labels)
        words = read_source(self, input_ids, inputs_embeds, attention_mask, token_type_ids, self.source_type)
        if masked_target_ids is not None:
            return self.predict_masked(words, Given(masked_target_ids, *rest))
        assert decoder_input_ids is not None
        return self.predict_all(words, Given(decoder_input_ids, *rest), span_ids)

    def predict_all(self, source: Words, given: Given, span_ids: Tensor | None) -> ConditionalGenerationOutput:
        """Logits or the loss of all steps, in one pass over source, target and queries."""
        wanted, lengths = given.wanted, source.rows.tokens.sum(1, keepdim=True)
        known = wanted if given.labels is None else given.labels != IGNORE_INDEX
        target, offset = self._read_target(given.ids)
        kept = kept_before(wanted, target.shape[1], offset)
        steps = torch.arange(given.ids.shape[1], device=given.ids.device).expand_as(given.ids)
        queries = self._queries(steps, wanted, lengths + offset, lengths + kept.sum(1, keepdim=True))
        streams = [target_rows(target, kept, lengths, self.target_type), queries.one_by_one()]
        if span_ids is not None:
            spans = validate_targets(span_ids, "span_ids", given.ids.shape)
            before = queries.before + wanted.sum(1, keepdim=True)
            streams.append(replace(queries, wanted=known, before=before).by_span(spans))  # that see each other
        words, count = joined(self, source, streams), len(streams) - 1
        predicted = torch.cat([wanted] * count, 1)
        first = words.rows.width - predicted.shape[1]
        read = F.pad(predicted, (first, 0), value=False)
        needed = [source.rows.tokens, kept_before(known, target.shape[1], offset), *[known] * count]
        read_from = None if given.everywhere else read
        outputs = run_rows(self, words, read_from, checked=torch.cat(needed, 1), **given.recorded)
        states = outputs.last_hidden_state
        if given.everywhere:
            flows = [*states[:, first:].chunk(count, 1)]
        else:
            numbers = torch.arange(count, device=states.device).repeat_interleave(wanted.shape[1])
            number = numbers.expand_as(predicted)[predicted]
            flows = [states[number == flow] for flow in range(count)]
        places = slice(first, first + wanted.shape[1])
        return self._predicted(given, flows, self._recorded(outputs, source.rows.width, places))

    def predict_masked(self, source: Words, given: Given) -> ConditionalGenerationOutput:
        """Logits or the loss of masked tokens of the target."""
        ids, rows = given.ids, source.rows.tokens.shape[0]
        check_ids("masked_target_ids", ids, self.config.vocab_size, "vocab_size")
        if ids.dim() != 2 or ids.shape[0] != rows or not ids.shape[1]:
            raise CtxError(f"masked_target_ids is {tuple(ids.shape)}, expected ({rows}, steps).")
        real = torch.ones_like(ids, dtype=torch.bool)
        if (padding := self.config.pad_token_id) is not None:
            real = ids != padding
        if given.labels is not None:
            real = real | (validate_targets(given.labels, "labels", ids.shape) != IGNORE_INDEX)
        real = real.flip(1).cummax(1).values.flip(1)
        words = joined(
            self, source, [target_rows(ids, real, source.rows.tokens.sum(1, keepdim=True), self.target_type)]
        )
        read = F.pad(given.wanted, (source.rows.width, 0), value=False)
        outputs = run_rows(self, words, None if given.everywhere else read, **given.recorded)
        states = outputs.last_hidden_state
        states = states[:, source.rows.width :] if given.everywhere else states
        places = slice(source.rows.width, words.rows.width)
        return self._predicted(given, [states], self._recorded(outputs, source.rows.width, places))

    def step(
        self, encoded: Any, attention_mask: Tensor | None, cache: Cache | None, given: Given, use_cache: bool
    ) -> ConditionalGenerationOutput:
        """Logits of the last steps, after what the cache holds; arguments as in `forward`."""
        if encoded is not None:
            check_source_mask(attention_mask, encoded.last_hidden_state)
        cache = begun_cache(encoded, self.config) if cache is None else cache
        ids, tokens = given.ids, None if attention_mask is None else attention_mask != 0
        if tokens is None:
            width = cache.get_seq_length() if encoded is None else encoded.last_hidden_state.shape[1]
            tokens = torch.ones(ids.shape[0], width, dtype=torch.bool, device=ids.device)
        target, offset = self._read_target(ids)
        done, lengths = cache.get_seq_length() - tokens.shape[1], tokens.sum(1, keepdim=True)
        if done > target.shape[1]:
            raise CtxError(
                f"past_key_values holds {done} tokens of the target, decoder_input_ids {target.shape[1]}.",
                hint="give all tokens of the target so far.",
            )
        new = target[:, done:]
        content = target_rows(new, torch.ones_like(new, dtype=torch.bool), lengths + done, self.target_type)
        steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[:, -given.logits_to_keep :]
        wanted = torch.ones_like(steps, dtype=torch.bool)
        queries = self._queries(steps, wanted, lengths + offset, lengths + target.shape[1])
        rows = content.beside(queries.one_by_one())
        keys = torch.cat([tokens, tokens.new_ones(ids.shape[0], done + rows.width)], 1)
        outputs = run_rows(self, Words(rows), cache=cache, tokens=keys, **given.recorded)
        cache.crop(-steps.shape[1])  # the keys of queries
        found = self._recorded(outputs, tokens.shape[1], slice(content.width, None), encoded)
        found["past_key_values"] = cache if use_cache else None
        return self._predicted(given, [outputs.last_hidden_state[:, content.width :]], found)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """All tokens of the target so far, (batch, steps) `input_ids`: the forward leaves out what the cache holds."""
        return GenerationMixin.prepare_inputs_for_generation(self, input_ids, **kwargs)  # type: ignore[arg-type]

    def summed_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of (targets, hidden) states; in training of smoothed targets."""
        if not (self.training and self.config.label_smoothing):
            return self.mlm_head.summed_loss(states, targets)
        logits = self.mlm_head(states).float()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.config.label_smoothing)

    def _predicted(self, given: Given, flows: Sequence[Tensor], found: dict[str, Any]) -> ConditionalGenerationOutput:
        """The output of one or two flows: (batch, steps, hidden) states, or (targets, hidden)."""
        loss, labels = None, given.labels
        if labels is not None:
            decoder, weight = self.mlm_head.decoder, self.config.span_loss_weight if len(flows) > 1 else 0.0
            terms = [
                language_modeling_loss(
                    decoder,
                    states[labels != IGNORE_INDEX] if given.everywhere else states,
                    labels,
                    given.counts,
                    summed_loss=self.summed_loss,
                )
                for states in flows
            ]
            loss = terms[0] if len(terms) == 1 else (1 - weight) * terms[0] + weight * terms[1]
        logits = None
        if given.everywhere:
            logits = self.mlm_head(flows[0][:, -given.logits_to_keep :])
        return ConditionalGenerationOutput(loss=loss, logits=logits, **found)

    def _recorded(self, outputs: StackOutput, source: int, places: slice, encoded: Any = None) -> dict[str, Any]:
        """What was recorded of steps, the columns `places`, and of the source, the first columns unless it is
        `encoded`."""
        states, weights = outputs.hidden_states, outputs.attentions
        if encoded is None:
            own = None if states is None else tuple(each[:, :source] for each in states if each is not None)
            seen = None if weights is None else tuple(each[:, :, :source, :source] for each in weights)
        else:
            own, seen = encoded.hidden_states, encoded.attentions
        return {
            "decoder_hidden_states": None
            if states is None
            else tuple(each[:, places] for each in states if each is not None),
            "cross_attentions": None if weights is None else tuple(each[:, :, places, :source] for each in weights),
            "encoder_hidden_states": own,
            "encoder_attentions": seen,
        }

    def _queries(self, steps: Tensor, wanted: Tensor, origin: Tensor, before: Tensor) -> Queries:
        token = self.config.query_token_id
        if token is None or not 0 <= token < self.config.vocab_size:
            raise CtxError(
                f"config.query_token_id={token} is no token of the vocabulary of {self.config.vocab_size}.",
                hint="set it to the id of the token that predicts: tokenizer.mask_token_id, or that of [ATTN].",
            )
        return Queries(token, self.target_type, steps, wanted, origin, before)

    def _read_target(self, ids: Tensor) -> tuple[Tensor, int]:
        """(batch, ...) tokens of the target that are read, and how many of them the first step depends on."""
        return (ids, 1) if self.config.feeds_start_token else (ids[:, 1:], 0)
