"""XLNet (Yang et al. 2019, arXiv 1906.08237): a Transformer-XL trained to predict tokens in random orders.

Its own here: the permutation language model, which also generates text, and the summary that task heads read. The
encoder is in `encoder_xlnet`; everything else comes from `hf_ctxmodels.layers` and `hf_ctxmodels.heads`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.layers.cpu.linear import MAX_PREPACKED_BYTES, linear, prepacked_weights
from hf_ctxmodels.layers.pooling import first_token_columns, last_token_columns, states_at
from hf_ctxmodels.models.xlnet.beam_search_head import ForBeamSearchQuestionAnswering
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.conversion_xlnet import XLNET_SUMMARY_EXPORT
from hf_ctxmodels.models.xlnet.encoder_xlnet import CtxXLNetModel, CtxXLNetPreTrainedModel
from hf_ctxmodels.models.xlnet.input_validation import check_target_labels

_RECOMPUTED = 2  # known tokens that a step of generation computes anew, as the reference does

__all__ = [
    "CtxXLNetForMultipleChoice",
    "CtxXLNetForPreTraining",
    "CtxXLNetForQuestionAnswering",
    "CtxXLNetForQuestionAnsweringSimple",
    "CtxXLNetForSequenceClassification",
    "CtxXLNetForTokenClassification",
    "CtxXLNetModel",
]


class CtxXLNetSummary(nn.Module):
    """What the sequence and choice heads read: one state of a row's tokens, by default the last (<cls>), projected."""

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__()
        self.kind = config.summary_type
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.summary_use_proj else nn.Identity()
        self.activation = ACT2FN[config.summary_activation] if config.summary_activation else nn.Identity()

    def forward(self, states: Tensor, tokens: Tensor | None) -> Tensor:
        """(batch, length, hidden), and where (batch, length) the tokens are -> (batch, hidden)."""
        if self.kind == "mean":
            weights = torch.ones_like(states[..., :1]) if tokens is None else tokens[..., None].to(states.dtype)
            summary = (states * weights).sum(1) / weights.sum(1)
        else:
            columns = first_token_columns if self.kind == "first" else last_token_columns
            summary = states_at(states, columns(states, tokens))
        return self.activation(self.dense(summary))


@dataclass
class CtxXLNetForPreTrainingOutput(ModelOutput):
    """Output of `CtxXLNetForPreTraining`.

    Attributes:
        loss: Cross-entropy in nats per target.
        logits: (batch, targets, vocabulary), or (batch, length, vocabulary) without targets; with `labels`, only if
            `returns_logits`.
        mems, hidden_states, attentions: See `CtxXLNetModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


class CtxXLNetHeadModel(heads.HeadModel, CtxXLNetPreTrainedModel):
    """Binds the generic heads to XLNet's encoder, with a summary for heads on a sequence."""

    encoder_class = CtxXLNetModel

    def build_encoder(self, config: CtxXLNetConfig) -> CtxXLNetModel:
        """Create the encoder, and the summary if the head reads it."""
        if self.uses_pooler:
            self.summary = CtxXLNetSummary(config)
        return CtxXLNetModel(config)

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the encoder; returns a model output, without memory unless `use_mems`."""
        outputs = super().encode(attention_mask=attention_mask, **{"use_mems": False, **inputs})
        if self.uses_pooler:
            tokens = None if attention_mask is None else attention_mask != 0
            outputs.pooler_output = self.summary(outputs.last_hidden_state, tokens)
        return outputs

    def encoder_fields(self, outputs: Any) -> dict[str, Any]:
        """The fields of a task head's output that are those of the encoder's output, with the memory."""
        return super().encoder_fields(outputs) | {"mems": outputs.mems}


@dataclass
class CtxXLNetForSequenceClassificationOutput(SequenceClassifierOutput):
    """`SequenceClassifierOutput`, and `mems` as in `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForTokenClassificationOutput(TokenClassifierOutput):
    """`TokenClassifierOutput`, and `mems` as in `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForQuestionAnsweringSimpleOutput(QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput`, and `mems` as in `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForMultipleChoiceOutput(MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput`, and `mems` as in `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


class CtxXLNetForPreTraining(CtxXLNetHeadModel, GenerationMixin):
    """XLNet's language model: predicts tokens from those before them in a random order (section 2.2), and generates.

    The decoder is tied to the word embeddings. For generation every prompt is followed by one unknown token, whose
    query row is decoded; earlier text comes from the memory.

    Logits without targets are no left-to-right predictions, though the Auto class is `AutoModelForCausalLM`: a row of
    the content stream sees the whole text, itself too. `hf_ctxmodels.inference.score` scores a text by targets.
    """

    reference_architecture = "XLNetLMHeadModel"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    state_outputs: ClassVar[tuple[str, ...]] = ("mems",)
    output_layer = "lm_head"
    prepacked_bytes: int = MAX_PREPACKED_BYTES  # as in `heads.ForCausalLM`
    _tied_weights_keys = {"lm_head.weight": "xlnet.word_embeddings.weight"}

    def build_head(self, config: CtxXLNetConfig) -> None:
        """The decoder."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        permutation_order: Tensor | None = None,
        target_positions: Tensor | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_mems: bool | None = None,
        num_items_in_batch: heads.ItemCounts = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxXLNetForPreTrainingOutput:
        """Logits at the targets, or the loss; arguments as in `CtxXLNetModel.forward`.

        Args:
            labels: (batch, targets) token ids, -100 is ignored; without targets (batch, length), for the content
                stream, each the target of its own position.
            logits_to_keep: As in transformers: of the last so many targets (or positions), 0 for all; or their indices.
            return_logits: See `returns_logits`.
            kwargs: Further arguments of the encoder; and `shift_labels`, which are `labels`: nothing is shifted here.
        """
        labels = kwargs.pop("shift_labels", labels)
        two_streams = target_positions is not None or target_mapping is not None
        targets = (target_positions, target_mapping) if two_streams else None
        labels = self._checked_labels(labels, targets, input_ids, inputs_embeds)
        target_mask = None if labels is None else labels != heads.IGNORE_INDEX
        everywhere = labels is None or self.returns_logits(return_logits)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            mems=mems,
            permutation_order=permutation_order,
            target_positions=target_positions,
            perm_mask=perm_mask,
            target_mapping=target_mapping,
            inputs_embeds=inputs_embeds,
            output_mask=None if two_streams or everywhere else target_mask,
            use_mems=use_mems,
            **kwargs,
        )
        loss, states = None, self.decoder_input(outputs.last_hidden_state)
        logits = linear(self.lm_head, slice_logits_to_keep(states, logits_to_keep)) if everywhere else None
        if labels is not None:
            states = states[target_mask] if two_streams or everywhere else states
            loss = heads.language_modeling_loss(self.lm_head, states, labels, num_items_in_batch)
        return CtxXLNetForPreTrainingOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _checked_labels(
        self, labels: Any, targets: tuple[Tensor | None, Tensor | None] | None, input_ids: Any, inputs_embeds: Any
    ) -> Tensor | None:
        """Labels of the targets, which are positions or a mapping, or of the tokens."""
        if labels is None or targets is None:
            return self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        labels = heads.validate_targets(labels, "labels")
        check_target_labels(labels, *targets)
        return labels

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as in transformers, with weights prepacked for oneDNN on a CPU."""
        with prepacked_weights(self.prepacked_bytes):
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        use_mems: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The text so far (after the first step its last two tokens, the memory holding the others) and one unknown.

        The two are what the reference computes anew at every step. Unlike there, padding of the prompt is not seen.
        """
        tail = slice(-_RECOMPUTED if past_key_values else None, None)
        input_ids = F.pad(input_ids[:, tail], (0, 1))
        order = torch.full_like(input_ids, -1)
        order[:, -1] = 0
        recorded = ("output_hidden_states", "output_attentions", "return_dict", "logits_to_keep")
        inputs: dict[str, Any] = {
            **{name: kwargs[name] for name in recorded if name in kwargs},
            "input_ids": input_ids,
            "permutation_order": order,
            "target_positions": torch.full_like(input_ids[:, :1], input_ids.shape[1] - 1),
            "use_mems": use_mems,
        }
        if attention_mask is not None:
            inputs["attention_mask"] = F.pad(attention_mask[:, tail], (0, 1), value=1)
        if token_type_ids is not None:
            inputs["token_type_ids"] = F.pad(token_type_ids[:, tail].float(), (0, 1), "replicate").long()
        if past_key_values:
            inputs["mems"] = tuple(memory[:, :-_RECOMPUTED] for memory in past_key_values)
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the memory is states, not keys and values

    @staticmethod
    def _reorder_cache(past_key_values: Sequence[Tensor], beam_idx: Tensor) -> tuple[Tensor, ...]:
        """The memory of the beams that go on."""
        return tuple(memory.index_select(0, beam_idx.to(memory.device)) for memory in past_key_values)


class CtxXLNetForSequenceClassification(heads.ForSequenceClassification, CtxXLNetHeadModel):
    """XLNet that classifies a sequence, or regresses a number on it, from the summary."""

    export_conversion = XLNET_SUMMARY_EXPORT
    output_class = CtxXLNetForSequenceClassificationOutput


class CtxXLNetForTokenClassification(heads.ForTokenClassification, CtxXLNetHeadModel):
    """XLNet that classifies each token, without dropout before the classifier beyond the encoder's."""

    output_class = CtxXLNetForTokenClassificationOutput

    def build_head(self, config: CtxXLNetConfig) -> None:
        """A linear classifier of every token's state."""
        self.dropout = nn.Identity()
        self.classifier = nn.Linear(config.head_input_size, config.num_labels)


class CtxXLNetForQuestionAnsweringSimple(heads.ForQuestionAnswering, CtxXLNetHeadModel):
    """XLNet that predicts the start and the end of an answer span."""

    output_class = CtxXLNetForQuestionAnsweringSimpleOutput


class CtxXLNetForQuestionAnswering(ForBeamSearchQuestionAnswering, CtxXLNetHeadModel):
    """XLNet that predicts an answer's end given its start, and whether there is an answer at all."""


class CtxXLNetForMultipleChoice(heads.ForMultipleChoice, CtxXLNetHeadModel):
    """XLNet that chooses one of several continuations, from the summary of each."""

    export_conversion = XLNET_SUMMARY_EXPORT
    output_class = CtxXLNetForMultipleChoiceOutput
