"""XLNet (Yang et al. 2019, arXiv 1906.08237): a Transformer-XL pretrained by permutation language modelling.

This module has the model heads; the encoder is in `encoder_xlnet`.
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
from hf_ctxmodels.models.xlnet.encoder_inputs import check_target_labels
from hf_ctxmodels.models.xlnet.encoder_xlnet import CtxXLNetModel, CtxXLNetPreTrainedModel

_RECOMPUTED_TOKENS = 2  # recomputed at each generation step, as in transformers

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
    """Pooling of the sequence and choice heads: a state of the sequence, by default the last (<cls>), projected."""

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__()
        self.summary_type = config.summary_type
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.summary_use_proj else nn.Identity()
        self.activation = ACT2FN[config.summary_activation] if config.summary_activation else nn.Identity()

    def forward(self, states: Tensor, tokens: Tensor | None) -> Tensor:
        """States (batch, length, hidden) and token mask (batch, length) -> (batch, hidden)."""
        if self.summary_type == "mean":
            weights = torch.ones_like(states[..., :1]) if tokens is None else tokens[..., None].to(states.dtype)
            summary = (states * weights).sum(1) / weights.sum(1)
        else:
            token_columns = first_token_columns if self.summary_type == "first" else last_token_columns
            summary = states_at(states, token_columns(states, tokens))
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
    """Base class of the XLNet models with a head; sequence heads have a summary."""

    encoder_class = CtxXLNetModel

    def build_encoder(self, config: CtxXLNetConfig) -> CtxXLNetModel:
        """Create the encoder, and the summary for sequence heads."""
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
        """The fields of the encoder output that a task head returns, including the memory."""
        return super().encoder_fields(outputs) | {"mems": outputs.mems}


@dataclass
class CtxXLNetForSequenceClassificationOutput(SequenceClassifierOutput):
    """`SequenceClassifierOutput` with `mems`, see `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForTokenClassificationOutput(TokenClassifierOutput):
    """`TokenClassifierOutput` with `mems`, see `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForQuestionAnsweringSimpleOutput(QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with `mems`, see `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


@dataclass
class CtxXLNetForMultipleChoiceOutput(MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with `mems`, see `CtxXLNetModelOutput`."""

    mems: tuple[Tensor, ...] | None = None


class CtxXLNetForPreTraining(CtxXLNetHeadModel, GenerationMixin):
    """XLNet with a language modelling head: predicts tokens in a random factorisation order (section 2.2).

    The output layer is tied to the word embeddings. In generation an unknown token is appended to the text, whose query
    state predicts the next token; the memory holds earlier tokens.

    Logits without targets are not left-to-right predictions, although the Auto class is `AutoModelForCausalLM`: the
    content stream attends to the whole text. `hf_ctxmodels.inference.score` scores a text with targets.
    """

    reference_architecture = "XLNetLMHeadModel"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    state_outputs: ClassVar[tuple[str, ...]] = ("mems",)
    output_layer = "lm_head"
    prepacked_bytes: int = MAX_PREPACKED_BYTES  # as in `heads.ForCausalLM`
    _tied_weights_keys = {"lm_head.weight": "xlnet.word_embeddings.weight"}

    def build_head(self, config: CtxXLNetConfig) -> None:
        """Create the output layer."""
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
        """Compute the logits of the targets, or the loss. Other arguments as in `CtxXLNetModel.forward`.

        Args:
            labels: (batch, targets) token ids; -100 is ignored. Without targets (batch, length), predicted by the
                content stream at the same position.
            logits_to_keep: As in transformers: number of last targets (or positions), 0 for all; or their indices.
            return_logits: See `returns_logits`.
            kwargs: Other arguments of the encoder, and `shift_labels`, which replace `labels`: labels are not shifted.
        """
        labels = kwargs.pop("shift_labels", labels)
        has_query_stream = target_positions is not None or target_mapping is not None
        if labels is None or not has_query_stream:
            labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        else:
            labels = heads.validate_targets(labels, "labels")
            check_target_labels(labels, target_positions, target_mapping)
        target_mask = None if labels is None else labels != heads.IGNORE_INDEX
        computes_logits = labels is None or self.returns_logits(return_logits)
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
            output_mask=None if has_query_stream or computes_logits else target_mask,
            use_mems=use_mems,
            **kwargs,
        )
        states = self.decoder_input(outputs.last_hidden_state)
        loss = logits = None
        if computes_logits:
            logits = linear(self.lm_head, slice_logits_to_keep(states, logits_to_keep))
        if labels is not None:
            states = states[target_mask] if has_query_stream or computes_logits else states
            loss = heads.language_modeling_loss(self.lm_head, states, labels, num_items_in_batch)
        return CtxXLNetForPreTrainingOutput(
            loss=loss,
            logits=logits,
            mems=outputs.mems,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

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
        """Append an unknown token to the text; after the first step only the last two tokens, with the memory.

        transformers also recomputes two tokens at each step. Unlike there, padding of the prompt is masked.
        """
        tail = slice(-_RECOMPUTED_TOKENS if past_key_values else None, None)
        input_ids = F.pad(input_ids[:, tail], (0, 1))
        order = torch.full_like(input_ids, -1)
        order[:, -1] = 0
        passed_arguments = ("output_hidden_states", "output_attentions", "return_dict", "logits_to_keep")
        inputs: dict[str, Any] = {
            **{name: kwargs[name] for name in passed_arguments if name in kwargs},
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
            inputs["mems"] = tuple(memory[:, :-_RECOMPUTED_TOKENS] for memory in past_key_values)
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the memory is states, not keys and values

    @staticmethod
    def _reorder_cache(past_key_values: Sequence[Tensor], beam_idx: Tensor) -> tuple[Tensor, ...]:
        """The memory of the selected beams."""
        return tuple(memory.index_select(0, beam_idx.to(memory.device)) for memory in past_key_values)


class CtxXLNetForSequenceClassification(heads.ForSequenceClassification, CtxXLNetHeadModel):
    """XLNet with a classifier or regressor on the summary of the sequence."""

    export_conversion = XLNET_SUMMARY_EXPORT
    output_class = CtxXLNetForSequenceClassificationOutput


class CtxXLNetForTokenClassification(heads.ForTokenClassification, CtxXLNetHeadModel):
    """XLNet with a token classifier, without dropout before it."""

    output_class = CtxXLNetForTokenClassificationOutput

    def build_head(self, config: CtxXLNetConfig) -> None:
        """Create a linear classifier."""
        self.dropout = nn.Identity()
        self.classifier = nn.Linear(config.head_input_size, config.num_labels)


class CtxXLNetForQuestionAnsweringSimple(heads.ForQuestionAnswering, CtxXLNetHeadModel):
    """XLNet with a span classifier for extractive question answering."""

    output_class = CtxXLNetForQuestionAnsweringSimpleOutput


class CtxXLNetForQuestionAnswering(ForBeamSearchQuestionAnswering, CtxXLNetHeadModel):
    """XLNet with beam search over spans and answerability for extractive question answering."""


class CtxXLNetForMultipleChoice(heads.ForMultipleChoice, CtxXLNetHeadModel):
    """XLNet with a multiple-choice classifier on the summary of each choice."""

    export_conversion = XLNET_SUMMARY_EXPORT
    output_class = CtxXLNetForMultipleChoiceOutput
