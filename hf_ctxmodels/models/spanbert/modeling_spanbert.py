"""SpanBERT (Joshi et al. 2020, arXiv 1907.10529): BERT's network, pretrained by predicting masked spans from their
context and from their boundaries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host, to_device, true_indices
from hf_ctxmodels.core.inputs import span_boundaries
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts
from hf_ctxmodels.layers.common import HookPoint, get_activation
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION
from hf_ctxmodels.models.spanbert.configuration_spanbert import CtxSpanBertConfig

_BOUNDARY_HEAD = {
    r"mlp_layer_norm\.linear1\.": "first_dense.",
    r"mlp_layer_norm\.layer_norm1\.": "first_norm.",
    r"mlp_layer_norm\.linear2\.": "second_dense.",
    r"mlp_layer_norm\.layer_norm2\.": "second_norm.",
    r"position_embeddings\.": "position_embeddings.",
    r"decoder\.weight": "decoder.weight",
    r"bias": "decoder.bias",
}
SPANBERT_CONVERSION: list[WeightTransform] = [
    WeightRenaming(r"^decoder\.(bert|cls)\.", r"\1."),  # prefix of fairseq's pretraining checkpoints
    WeightRenaming(r"(layer_norm[12])\.gamma", r"\1.weight"),
    WeightRenaming(r"(layer_norm[12])\.beta", r"\1.bias"),
    *(
        WeightRenaming(rf"cls\.pair_target_predictions\.{released_name}", f"sbo_head.{name}")
        for released_name, name in _BOUNDARY_HEAD.items()
    ),
    *BERT_CONVERSION,
]


class CtxSpanBertPreTrainedModel(bert.CtxBertPreTrainedModel):
    """Base class of the SpanBERT models, with BERT's weight names in the encoder."""

    config: CtxSpanBertConfig


class CtxSpanBertModel(TransformerEncoder, CtxSpanBertPreTrainedModel):
    """The SpanBERT encoder; pretraining does not train its pooler."""


class CtxSpanBertHeadModel(heads.HeadModel, CtxSpanBertPreTrainedModel):
    """Base class of the SpanBERT models with a head."""

    encoder_class = CtxSpanBertModel


class CtxSpanBertForMaskedLM(heads.ForMaskedLM, CtxSpanBertHeadModel):
    """SpanBERT with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = bert.TIED_WEIGHTS


class SpanBoundaryHead(nn.Module):
    """Predicts a masked token from the tokens before and after its span and its position in the span (section 3.2): two
    linear layers, each with activation and LayerNorm, and an output layer with a separate bias."""

    def __init__(self, config: CtxSpanBertConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.position_embeddings = nn.Embedding(config.max_pair_targets, config.pair_position_size)
        self.first_dense = nn.Linear(2 * width + config.pair_position_size, width)
        self.first_norm = nn.LayerNorm(width, eps=eps)
        self.second_dense = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width, eps=eps)
        self.activation = get_activation(config.hidden_act)
        self.output_layer_input = HookPoint()
        self.decoder = nn.Linear(width, config.vocab_size)

    def summed_loss(self, before: Tensor, after: Tensor, offsets: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of (targets,) token ids, from the (targets, hidden) encoder output at the
        boundaries of their spans, and their (targets,) positions in the span, from 0."""
        inputs = torch.cat([before, after, self.position_embeddings(offsets).to(before.dtype)], -1)
        states = self.first_norm(self.activation(linear(self.first_dense, inputs)))
        states = self.second_norm(self.activation(linear(self.second_dense, states)))
        return summed_cross_entropy(self.decoder, self.output_layer_input(states), targets)


@dataclass
class CtxSpanBertForPreTrainingOutput(ModelOutput):
    """Output of `CtxSpanBertForPreTraining`.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary); with targets, only if `needs_all_logits`.
        mlm_loss: Cross-entropy in nats per target, detached; None without targets.
        sbo_loss: Loss of the span boundary objective, detached; None without targets.
        metrics: "sbo_share", the share of masked tokens with a boundary target, see `heads.accuracy_counts`; None
            without `boundary_labels`.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    sbo_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxSpanBertForPreTraining(CtxSpanBertHeadModel):
    """Model for both pretraining objectives: the masked-LM head on spans, and the span boundary head (section 3.2).

    The loss of the span boundary objective is a sum over targets divided by their number plus one, which every process
    adds. Both decoders are tied to the word embeddings; each has its own bias. The encoder's last layer is computed at
    the targets and at the boundaries only. transformers has no such head: `export_reference` writes the masked-LM
    model.
    """

    reference_model_type: ClassVar[str | None] = None
    accepts_loss_kwargs = False  # a single number of targets cannot describe two losses
    output_layer_name = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "boundary_labels")
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", "sbo_loss")
    _tied_weights_keys = {
        **bert.TIED_WEIGHTS,
        "sbo_head.decoder.weight": "bert.embeddings.word_embeddings.weight",
    }

    def build_head(self, config: CtxSpanBertConfig) -> None:
        """Create the masked-LM head and the span boundary head."""
        self.mlm_head = heads.build_mlm_head(config, config.hidden_size)
        self.sbo_head = SpanBoundaryHead(config)

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the weights and config.json of a `transformers.BertForMaskedLM`; see `bert.export_masked_lm`."""
        bert.export_masked_lm(self, CtxSpanBertForMaskedLM, save_directory)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        boundary_labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxSpanBertForPreTrainingOutput:
        """Compute the logits of the masked-LM head, and the loss. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens; -100 is ignored. A run of labels is a span.
            boundary_labels: (batch, length) the labels that the span boundary head predicts, -100 elsewhere: they are
                among the first `config.max_pair_targets` tokens of a span with a token before and after it.
        """
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        boundary_labels = self.validate_token_targets(boundary_labels, "boundary_labels", input_ids, inputs_embeds)
        boundaries = None
        if boundary_labels is not None:
            if labels is None:
                raise CtxError("boundary_labels needs labels, whose runs are the spans.", hint="pass both.")
            heads.check_classes(boundary_labels, self.config.vocab_size, "boundary_labels", "vocab_size")
            boundaries = _Boundaries(labels, boundary_labels, self.config.max_pair_targets)
        output_mask = self.target_output_mask(return_logits, labels)
        if output_mask is not None and boundaries is not None:
            output_mask = on_host(torch.logical_or, output_mask, boundaries.positions)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=output_mask,
            **kwargs,
        )
        states = outputs.last_hidden_state
        prediction_logits = self.mlm_head(states) if output_mask is None else None
        mlm_loss = heads.masked_lm_loss(
            self.mlm_head, states, labels, num_items_in_batch, logits=prediction_logits, output_mask=output_mask
        )
        sbo_loss = metrics = None
        if labels is not None and boundary_labels is not None and boundaries is not None:
            before, after = boundaries.states(states, output_mask)
            targets = heads.labeled_targets(boundary_labels)
            total = self.sbo_head.summed_loss(before, after, boundaries.offsets, targets)
            sbo_loss = total / (heads.number_of_targets(boundary_labels, "boundary_labels", num_items_in_batch) + 1)
            is_target = torch.stack([boundary_labels != IGNORE_INDEX, labels != IGNORE_INDEX])
            metrics = {"sbo_share": is_target.sum((1, 2)).float()}
        return CtxSpanBertForPreTrainingOutput(
            loss=self.total_loss(mlm_loss, sbo_loss),
            prediction_logits=prediction_logits,
            mlm_loss=heads.detached_loss(mlm_loss, labels),
            sbo_loss=heads.detached_loss(sbo_loss, boundary_labels),
            metrics=metrics,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class _Boundaries:
    """Positions of the span boundaries of (batch, length) `boundary_labels`; a span is a run of labeled positions.

    Attributes:
        positions: (batch, length) bool, True at the boundaries.
        offsets: (targets,) position of the target in its span, from 0.

    Raises:
        CtxError: A target is outside the spans, beyond their first `max_targets` tokens, or in a span at the beginning
            or the end of the sequence.
    """

    def __init__(self, labels: Tensor, boundary_labels: Tensor, max_targets: int) -> None:
        length, device = labels.shape[1], labels.device
        labels, boundary_labels = host_copy(labels), host_copy(boundary_labels)
        targets = true_indices(boundary_labels != IGNORE_INDEX)
        rows, columns = targets // length, targets % length
        before, after = (ends.flatten()[targets] for ends in span_boundaries(labels != IGNORE_INDEX))
        offsets = columns - before - 1
        is_invalid = (before < 0) | (after >= length) | (offsets < 0) | (offsets >= max_targets)
        if not is_traced(labels) and bool(is_invalid.any()):
            index = [int(rows[is_invalid][0]), int(columns[is_invalid][0])]
            raise CtxError(
                f"boundary_labels has an invalid target at {index}: expected one of the first {max_targets} tokens "
                "of a span (a run of labels other than -100) with a token before and after it.",
                hint="create labels and boundary_labels with DataCollatorForSpanBoundary and the model's "
                f"max_pair_targets={max_targets}.",
            )
        before, after = rows * length + before, rows * length + after
        positions = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
        positions[before] = True
        positions[after] = True
        self.positions = to_device(positions.view(labels.shape), device)
        self.offsets = to_device(offsets, device)
        self.before, self.after = to_device(before, device), to_device(after, device)

    def states(self, states: Tensor, output_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(targets, hidden) states before and after the span of each target; arguments as in `heads.select_states`."""
        if output_mask is None:
            states, before, after = states.flatten(0, 1), self.before, self.after
        else:
            output_index = output_mask.flatten().cumsum(0) - 1
            before, after = output_index[self.before], output_index[self.after]
        return states[before], states[after]


class CtxSpanBertForSequenceClassification(heads.ForSequenceClassification, CtxSpanBertHeadModel):
    """SpanBERT with a classifier or regressor on the pooled output."""


class CtxSpanBertForTokenClassification(heads.ForTokenClassification, CtxSpanBertHeadModel):
    """SpanBERT with a token classifier."""


class CtxSpanBertForQuestionAnswering(heads.ForQuestionAnswering, CtxSpanBertHeadModel):
    """SpanBERT with a span classifier for extractive question answering."""


class CtxSpanBertForMultipleChoice(heads.ForMultipleChoice, CtxSpanBertHeadModel):
    """SpanBERT with a multiple-choice classifier."""
