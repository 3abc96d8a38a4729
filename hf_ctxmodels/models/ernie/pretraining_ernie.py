"""Multi-task pretraining of ERNIE: knowledge masking with sentence pairs (1.0), or continual multi-task learning
(2.0)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts
from hf_ctxmodels.models.ernie.configuration_ernie import SEQUENCE_TASKS, TOKEN_TASKS, CtxErnieConfig
from hf_ctxmodels.models.ernie.modeling_ernie import TIED_WEIGHTS, CtxErnieHeadModel


@dataclass
class CtxErnieForPreTrainingOutput(ModelOutput):
    """Output of `CtxErnieForPreTraining`. Fields of tasks that the model lacks are None.

    Attributes:
        loss: The sum of the losses that have targets.
        prediction_logits: (batch, length, vocabulary).
        next_sentence_logits, ..., query_title_logits: (batch, classes) of the tasks on pairs and texts.
        capitalization_logits, token_document_logits: (batch, length, classes). Logits of tokens are None with targets
            of tokens, unless `returns_logits`.
        mlm_loss, ..., token_document_loss: Cross-entropy in nats per target, detached; None without targets.
        metrics: "<task>_accuracy" of the tasks with targets, see `heads.accuracy_counts`; None without targets.
        hidden_states, attentions: Hidden states and attention weights of the encoder; None unless requested.
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
    pooled output (Sun et al. 2020, section 3.3). The examples of a batch may belong to several tasks."""

    uses_pooled_output = True
    accepts_loss_kwargs = False  # a single number of targets cannot describe several losses
    output_layer = "mlm_head.decoder"
    loss_targets: ClassVar[tuple[str, ...]] = (
        "labels",
        *(f"{task}_labels" for task in (*SEQUENCE_TASKS, *TOKEN_TASKS)),
    )
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", *(f"{task}_loss" for task in (*SEQUENCE_TASKS, *TOKEN_TASKS)))
    _tied_weights_keys = TIED_WEIGHTS

    def build_head(self, config: CtxErnieConfig) -> None:
        """Create the masked-LM head, and a classifier for each task."""
        self.mlm_head = heads.build_mlm_head(config, config.hidden_size)
        for task in self._active_tasks(*SEQUENCE_TASKS, *TOKEN_TASKS):
            setattr(self, _head_name(task), nn.Linear(config.hidden_size, config.tasks[task]))

    def _active_tasks(self, *tasks: str) -> list[str]:
        """The tasks that are among `config.pretraining_tasks`."""
        return [task for task in tasks if task in self.config.tasks]

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
            capitalization_labels: (batch, length) 1 where the word is capitalised, else 0.
            token_document_labels: (batch, length) 1 where the token occurs elsewhere in the document, else 0.
            num_items_in_batch: Numbers of targets by argument, see `heads.mean_over_targets`.
            return_logits: See `returns_logits`.

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
        self._check_tasks(sequence_targets | token_targets)
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        token_tasks = self._active_tasks(*TOKEN_TASKS)
        target_masks = [
            targets != IGNORE_INDEX
            for targets in (labels, *(token_targets[task] for task in token_tasks))
            if targets is not None
        ]
        computes_logits = not target_masks or self.returns_logits(return_logits)
        output_mask = None if computes_logits else torch.stack(target_masks).any(0)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            task_type_ids=task_type_ids,
            output_mask=output_mask,
            **kwargs,
        )
        states = outputs.last_hidden_state
        losses: dict[str, Tensor | None] = {"mlm": None}
        logits: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if computes_logits:
            logits["prediction"] = self.mlm_head(states)
        if labels is not None and computes_logits:
            losses["mlm"] = heads.loss_from_logits(logits["prediction"], labels, num_items_in_batch)
        elif labels is not None:
            mlm_states = heads.select_states(states, labels, output_mask)
            losses["mlm"] = heads.masked_lm_loss(self.mlm_head, mlm_states, labels, num_items_in_batch)
        for task in self._active_tasks(*SEQUENCE_TASKS):
            logits[task] = self.get_submodule(_head_name(task))(outputs.pooler_output)
            targets = sequence_targets[task]
            if targets is not None:
                targets = heads.validate_sequence_targets(targets, f"{task}_labels", len(logits[task]))
            losses[task] = self._task_loss(task, logits[task], targets, num_items_in_batch, metrics)
        for task in token_tasks:
            targets, classifier = token_targets[task], self.get_submodule(_head_name(task))
            if computes_logits:
                logits[task] = classifier(states)
                losses[task] = self._task_loss(task, logits[task], targets, num_items_in_batch, metrics)
            elif targets is None:
                losses[task] = None
            else:
                task_logits = classifier(heads.select_states(states, targets, output_mask))
                selected = targets[targets != IGNORE_INDEX]
                losses[task] = self._task_loss(task, task_logits, selected, num_items_in_batch, metrics)
        targets_by_term = {"mlm": labels, **sequence_targets, **token_targets}
        return CtxErnieForPreTrainingOutput(
            loss=self.total_loss(*losses.values()),
            metrics=metrics or None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{f"{name}_logits": task_logits for name, task_logits in logits.items()},
            **{f"{name}_loss": heads.detached_loss(loss, targets_by_term[name]) for name, loss in losses.items()},
        )

    def _check_tasks(self, targets: dict[str, Tensor | None]) -> None:
        """Raise CtxError for targets, by task, of a task that the model lacks."""
        active_tasks = self._active_tasks(*targets)
        for task, task_targets in targets.items():
            if task_targets is not None:
                heads.validate_targets(task_targets, f"{task}_labels")
            if task not in active_tasks and heads.has_targets(task_targets):
                raise CtxError(
                    f"{task}_labels has targets, but the model has no task {task!r}.",
                    hint=f"add it to config.pretraining_tasks, which has {', '.join(active_tasks) or 'none'}.",
                )

    def _task_loss(
        self, task: str, logits: Tensor, targets: Tensor | None, num_items: ItemCounts, metrics: dict[str, Tensor]
    ) -> Tensor | None:
        """The loss of a task, None without targets; adds its accuracy to the metrics."""
        if targets is None:
            return None
        metrics[f"{task}_accuracy"] = heads.accuracy_counts(logits.detach(), targets)
        return heads.cross_entropy_over_targets(logits, targets, f"{task}_labels", num_items)


def _head_name(task: str) -> str:
    return "nsp_head" if task == "next_sentence" else f"{task}_head"  # as in BERT
