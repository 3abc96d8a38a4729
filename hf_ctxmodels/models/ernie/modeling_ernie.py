"""ERNIE 1.0 (Sun et al. 2019, arXiv 1904.09223) and 2.0 (Sun et al. 2020, arXiv 1907.12412): BERT's network, pretrained
on masked units (words, phrases, entities), and in 2.0 on a growing set of tasks, with an embedding of the task."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder, build_embeddings
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import ItemCounts
from hf_ctxmodels.layers.transformer import TokenPositionTypeEmbeddings
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.ernie.configuration_ernie import SEQUENCE_TASKS, TASKS, TOKEN_TASKS, CtxErnieConfig

TIED_WEIGHTS = {"mlm_head.decoder.weight": "ernie.embeddings.word_embeddings.weight"}


class TaskEmbeddings(TokenPositionTypeEmbeddings):
    """BERT's input embeddings plus embeddings of the pretraining task (Sun et al. 2020, "Task Embedding"), unless
    `num_tasks` is None; for the other arguments see `TokenPositionTypeEmbeddings`."""

    def __init__(self, num_tasks: int | None, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        width = self.word_embeddings.embedding_dim
        self.task_type_embeddings = None if num_tasks is None else nn.Embedding(num_tasks, width)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        token_type_ids: Tensor | None,
        task_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Embed the inputs as in `TokenPositionTypeEmbeddings`; `task_type_ids` are (...), None for task 0."""
        if self.task_type_embeddings is None:
            if task_type_ids is not None:
                raise CtxError(
                    "The model has no task embeddings.", hint="set config.use_task_id, or remove task_type_ids."
                )
            return super().forward(tokens, position_ids, token_type_ids)
        embedded = tokens if tokens.is_floating_point() else self.word_embeddings(tokens)
        tasks = torch.zeros_like(position_ids) if task_type_ids is None else task_type_ids
        return super().forward(embedded + self.task_type_embeddings(tasks), position_ids, token_type_ids)


class CtxErniePreTrainedModel(bert.CtxBertPreTrainedModel):
    """Base class of the ERNIE models."""

    config: CtxErnieConfig
    base_model_prefix = "ernie"
    reference_model_type = "ernie"
    # other heads of the family, and a buffer of old checkpoints
    _keys_to_ignore_on_load_unexpected = [r"^\w+_head\.", r"pooler\.", r"position_ids$"]


class CtxErnieModel(TransformerEncoder, CtxErniePreTrainedModel):
    """The ERNIE encoder without a head."""

    extra_input_ids = {"task_type_ids": "task_type_vocab_size"}

    def build_embeddings(self, config: CtxErnieConfig) -> TokenPositionTypeEmbeddings:
        """Create the embeddings, with task embeddings if `config.use_task_id`."""
        num_tasks = config.task_type_vocab_size if config.use_task_id else None
        return build_embeddings(config, width=config.hidden_size, embeddings_class=partial(TaskEmbeddings, num_tasks))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch. Other arguments as in `TransformerEncoder.forward`.

        Args:
            task_type_ids: (batch, length) indices of the tasks, if `config.use_task_id`; None for the first task.
        """
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            task_type_ids=task_type_ids,
            **kwargs,
        )


class CtxErnieHeadModel(heads.HeadModel, CtxErniePreTrainedModel):
    """Base class of the ERNIE models with a head, which take `task_type_ids` as `CtxErnieModel` does."""

    encoder_class = CtxErnieModel


class CtxErnieForMaskedLM(heads.ForMaskedLM, CtxErnieHeadModel):
    """ERNIE with a masked-LM head; the decoder is tied to the word embeddings."""

    _tied_weights_keys = TIED_WEIGHTS


class CtxErnieForMaskedLMWithPair(CtxErniePreTrainedModel, bert.CtxBertForPreTraining):
    """ERNIE 1.0's pretraining heads, masked LM and pairs: ErnieForPreTraining in transformers."""

    encoder_class = CtxErnieModel
    reference_architecture = "ErnieForPreTraining"
    _tied_weights_keys = TIED_WEIGHTS


@dataclass
class CtxErnieForPreTrainingOutput(ModelOutput):
    """Output of `CtxErnieForPreTraining`. Fields of tasks that the model lacks are None.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary).
        next_sentence_logits, ..., query_title_logits: (batch, classes) of the tasks on pairs and texts.
        capitalization_logits, token_document_logits: (batch, length, classes). Logits of tokens are None with targets
            of tokens, unless `needs_all_logits`.
        mlm_loss, ..., token_document_loss: Cross-entropy in nats per target, detached; None without targets.
        metrics: "<task>_accuracy" of the tasks with targets, see `heads.accuracy_counts`; None without targets.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    next_sentence_logits: Tensor | None = None
    sentence_reordering_logits: Tensor | None = None
    sentence_distance_logits: Tensor | None = None
    discourse_relation_logits: Tensor | None = None
    query_title_logits: Tensor | None = None
    capitalization_logits: Tensor | None = None
    token_document_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    next_sentence_loss: Tensor | None = None
    sentence_reordering_loss: Tensor | None = None
    sentence_distance_loss: Tensor | None = None
    discourse_relation_loss: Tensor | None = None
    query_title_loss: Tensor | None = None
    capitalization_loss: Tensor | None = None
    token_document_loss: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxErnieForPreTraining(CtxErnieHeadModel):
    """Masked units, and the tasks of `config.pretraining_tasks`, each a linear classifier of the token states or of the
    pooled output (Sun et al. 2020, "Pre-training Tasks"). The examples of a batch may belong to several tasks."""

    uses_pooled_output = True
    accepts_loss_kwargs = False  # a single number of targets cannot describe several losses
    output_layer_name = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", *(f"{task}_labels" for task in TASKS))
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", *(f"{task}_loss" for task in TASKS))
    _tied_weights_keys = TIED_WEIGHTS

    def build_head(self, config: CtxErnieConfig) -> None:
        """Create the masked-LM head, and a classifier for each task."""
        self.mlm_head = heads.build_mlm_head(config, config.hidden_size)
        for task in self.active_tasks:
            setattr(self, _head_name(task), nn.Linear(config.hidden_size, config.tasks[task]))

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the weights and config.json of a `transformers.ErnieForMaskedLM`; see `bert.export_masked_lm`."""
        bert.export_masked_lm(self, CtxErnieForMaskedLM, save_directory)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
        sentence_reordering_labels: Tensor | None = None,
        sentence_distance_labels: Tensor | None = None,
        discourse_relation_labels: Tensor | None = None,
        query_title_labels: Tensor | None = None,
        capitalization_labels: Tensor | None = None,
        token_document_labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        task_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CtxErnieForPreTrainingOutput:
        """Compute the logits of all tasks, and the loss; -100 is ignored in all targets. Other arguments as in the
        encoder's forward.

        Args:
            labels: (batch, length) ids of the masked tokens.
            next_sentence_labels: (batch,) 0 if the second segment continues the first, else 1.
            sentence_reordering_labels: (batch,) the permutation of a text's segments.
            sentence_distance_labels: (batch,) 0 for adjacent sentences, 1 for other sentences of one document, 2 for
                sentences of two documents.
            discourse_relation_labels, query_title_labels: (batch,) the class of a pair.
            capitalization_labels: (batch, length) 1 where the word is capitalized, else 0.
            token_document_labels: (batch, length) 1 where the token occurs elsewhere in the document, else 0.

        Raises:
            CtxError: There are targets of a task that is not among `config.pretraining_tasks`.
        """
        sequence_targets = {
            "next_sentence": next_sentence_labels,
            "sentence_reordering": sentence_reordering_labels,
            "sentence_distance": sentence_distance_labels,
            "discourse_relation": discourse_relation_labels,
            "query_title": query_title_labels,
        }
        token_targets = {"capitalization": capitalization_labels, "token_document": token_document_labels}
        for task, targets in token_targets.items():
            token_targets[task] = self.validate_token_targets(targets, f"{task}_labels", input_ids, inputs_embeds)
        active_tasks = self.active_tasks
        for task, targets in (sequence_targets | token_targets).items():
            if targets is not None:
                heads.validate_targets(targets, f"{task}_labels")
            if task not in active_tasks and heads.has_targets(targets):
                raise CtxError(
                    f"{task}_labels has targets, but the model has no task {task!r}.",
                    hint=f"add it to config.pretraining_tasks, which has {', '.join(active_tasks) or 'none'}.",
                )
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        active_token_targets = {task: token_targets[task] for task in TOKEN_TASKS if task in active_tasks}
        output_mask = self.target_output_mask(return_logits, labels, *active_token_targets.values())
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=output_mask,
            **self.extra_ids(task_type_ids=task_type_ids),
            **kwargs,
        )
        states = outputs.last_hidden_state
        losses: dict[str, Tensor | None] = {}
        logits: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if output_mask is None:
            logits["prediction"] = self.mlm_head(states)
        losses["mlm"] = heads.masked_lm_loss(
            self.mlm_head, states, labels, num_items_in_batch, logits=logits.get("prediction"), output_mask=output_mask
        )
        for task in SEQUENCE_TASKS:
            if task in active_tasks:
                logits[task] = self.get_submodule(_head_name(task))(outputs.pooler_output)
                losses[task], accuracy = heads.sequence_classification_loss(
                    logits[task], sequence_targets[task], f"{task}_labels", num_items_in_batch
                )
                if accuracy is not None:
                    metrics[f"{task}_accuracy"] = accuracy
        for task, targets in active_token_targets.items():
            classifier = self.get_submodule(_head_name(task))
            losses[task] = None
            if output_mask is None:
                logits[task] = target_logits = classifier(states)
            elif targets is not None:
                target_logits = classifier(heads.select_states(states, targets, output_mask))
                targets = heads.labeled_targets(targets)
            if targets is not None:
                losses[task] = heads.cross_entropy_over_targets(
                    target_logits, targets, f"{task}_labels", num_items_in_batch
                )
                metrics[f"{task}_accuracy"] = heads.accuracy_counts(target_logits.detach(), targets)
        targets_by_term = {"mlm": labels, **sequence_targets, **token_targets}
        return CtxErnieForPreTrainingOutput(
            loss=self.total_loss(*losses.values()),
            metrics=metrics or None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{f"{name}_logits": task_logits for name, task_logits in logits.items()},
            **{f"{name}_loss": heads.detached_loss(loss, targets_by_term[name]) for name, loss in losses.items()},
        )

    @property
    def active_tasks(self) -> list[str]:
        """The tasks of `config.pretraining_tasks` in the order of the heads."""
        return [task for task in TASKS if task in self.config.tasks]


def _head_name(task: str) -> str:
    return "nsp_head" if task == "next_sentence" else f"{task}_head"  # as in BERT


class CtxErnieForNextSentencePrediction(CtxErniePreTrainedModel, bert.CtxBertForNextSentencePrediction):
    """ERNIE with a next-sentence classifier."""

    encoder_class = CtxErnieModel


class CtxErnieForSequenceClassification(heads.ForSequenceClassification, CtxErnieHeadModel):
    """ERNIE with a classifier or regressor on the pooled output."""


class CtxErnieForTokenClassification(heads.ForTokenClassification, CtxErnieHeadModel):
    """ERNIE with a token classifier."""


class CtxErnieForQuestionAnswering(heads.ForQuestionAnswering, CtxErnieHeadModel):
    """ERNIE with a span classifier for extractive question answering."""


class CtxErnieForMultipleChoice(heads.ForMultipleChoice, CtxErnieHeadModel):
    """ERNIE with a multiple-choice classifier."""
