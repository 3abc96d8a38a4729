"""Pretraining of ERNIE by tasks: masked units with pairs (1.0), or the tasks of continual learning (2.0)."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels import heads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import IGNORED, ItemCounts
from hf_ctxmodels.heads.masked_lm import pretraining_output_class
from hf_ctxmodels.models.ernie.configuration_ernie import ROW_TASKS, TOKEN_TASKS, CtxErnieConfig
from hf_ctxmodels.models.ernie.modeling_ernie import CtxErnieForMaskedLM

TASKS = (*ROW_TASKS, *TOKEN_TASKS)


CtxErnieForPreTrainingOutput = pretraining_output_class(
    "CtxErnieForPreTrainingOutput",
    __name__,
    (*(f"{task}_logits" for task in TASKS), "mlm_loss", *(f"{task}_loss" for task in TASKS)),
    """Output of `CtxErnieForPreTraining`.

    Attributes:
        loss: The sum of the terms whose targets are given.
        prediction_logits: (batch, length, vocabulary); with targets of tokens only by `return_logits`.
        <task>_logits: (batch, classes), or (batch, length, classes) of tasks of tokens, then as `prediction_logits`.
        mlm_loss, <task>_loss: The terms, each a mean cross-entropy in nats per target, detached; None without targets.
        metrics: `<task>_accuracy`, see `accuracy_counts`.
        hidden_states, attentions: As requested.
    """,
)


class CtxErnieForPreTraining(CtxErnieForMaskedLM):
    """Masked units, and the tasks of `config.pretraining_tasks`, each a linear classifier of the tokens' states or of
    the pooled output (Sun et al. 2020, section 3.3).

    Rows of a batch may belong to several tasks. The last layer is computed only at tokens with a target of any task.
    """

    pools = True
    accepts_loss_kwargs = False
    loss_targets: ClassVar[tuple[str, ...]] = ("labels", *(f"{task}_labels" for task in TASKS))
    loss_terms: ClassVar[tuple[str, ...]] = ("mlm_loss", *(f"{task}_loss" for task in TASKS))

    def build_head(self, config: CtxErnieConfig) -> None:
        """The masked-LM head, and a classifier for each task."""
        super().build_head(config)
        self.classifiers = {task: f"{task}_head" for task in TASKS if task in config.tasks}
        if "next_sentence" in self.classifiers:
            self.classifiers["next_sentence"] = "nsp_head"  # as in BERT
        for task, name in self.classifiers.items():
            setattr(self, name, nn.Linear(config.hidden_size, config.tasks[task]))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        task_type_ids: Tensor | None = None,
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
        **kwargs: Any,
    ) -> ModelOutput:
        """Logits of all heads, and the loss. In all targets -100 is ignored.

        Args:
            labels: (batch, length) ids of the masked tokens.
            next_sentence_labels: (batch,) 0 if the second segment continues the first, else 1.
            sentence_reordering_labels: (batch,) the permutation of a text's segments.
            sentence_distance_labels: (batch,) 0 for neighbours, 1 for others of one document, 2 for two documents.
            discourse_relation_labels, query_title_labels: (batch,) the class of a pair.
            capitalization_labels: (batch, length) 1 where the word is capitalised, else 0.
            token_document_labels: (batch, length) 1 where the token is elsewhere in the document, too, else 0.
            num_items_in_batch: As in `mean_over_targets`.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the encoder.

        Raises:
            CtxError: Inputs do not match; or a target of a task that the model lacks.
        """
        given = {
            "mlm": labels,
            "next_sentence": next_sentence_labels,
            "sentence_reordering": sentence_reordering_labels,
            "sentence_distance": sentence_distance_labels,
            "discourse_relation": discourse_relation_labels,
            "query_title": query_title_labels,
            "capitalization": capitalization_labels,
            "token_document": token_document_labels,
        }
        targets = self._checked(given, input_ids, inputs_embeds)
        masks = [targets[task] != IGNORED for task in ("mlm", *TOKEN_TASKS) if targets.get(task) is not None]
        wanted = None if not masks or self.returns_logits(return_logits) else torch.stack(masks).any(0)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            task_type_ids=task_type_ids,
            inputs_embeds=inputs_embeds,
            output_mask=wanted,
            **kwargs,
        )
        return self._output(outputs, targets, wanted, num_items_in_batch)

    def _output(
        self, outputs: Any, targets: dict[str, Tensor], wanted: Tensor | None, counts: ItemCounts
    ) -> ModelOutput:
        """All predictions and the sum of their losses; arguments as in `_predict`."""
        predictions = {
            task: self._predict(task, outputs, targets.get(task), wanted, counts) for task in ("mlm", *self.classifiers)
        }
        losses = {task: each.loss for task, each in predictions.items() if each.loss is not None}
        return CtxErnieForPreTrainingOutput(
            loss=torch.stack([*losses.values()]).sum() if losses else None,
            prediction_logits=predictions.pop("mlm").logits,
            metrics={f"{task}_accuracy": each.right for task, each in predictions.items() if each.right is not None},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{f"{task}_logits": each.logits for task, each in predictions.items()},
            **{f"{task}_loss": loss.detach() for task, loss in losses.items() if heads.has_targets(targets[task])},
        )

    def _checked(self, given: dict[str, Any], input_ids: Any, inputs_embeds: Any) -> dict[str, Tensor]:
        """The targets that are given, by task.

        Raises:
            CtxError: A target of a task without a head, or of another shape than the tokens.
        """
        targets = {}
        for task, tensor in given.items():
            name = "labels" if task == "mlm" else f"{task}_labels"
            if task in ("mlm", *TOKEN_TASKS):
                tensor = self.token_targets(tensor, name, input_ids, inputs_embeds)
            elif tensor is not None:
                tensor = heads.as_targets(tensor, name)
            if task not in ("mlm", *self.classifiers):
                if heads.has_targets(tensor):
                    raise CtxError(
                        f"{name} are given, but the model has no task {task!r}.",
                        hint=f"add it to config.pretraining_tasks, which has {', '.join(self.classifiers) or 'none'}.",
                    )
            elif tensor is not None:
                targets[task] = tensor
        return targets

    def _predict(
        self, task: str, outputs: Any, targets: Tensor | None, wanted: Tensor | None, counts: ItemCounts
    ) -> "_Prediction":
        """A task's loss, and its logits of all rows or tokens; None for what is not there.

        Args:
            outputs: The encoder's; the states of `wanted` tokens only, unless None.
            targets: Of the task.
            counts: See `mean_over_targets`.
        """
        name = "labels" if task == "mlm" else f"{task}_labels"
        states = outputs.pooler_output if task in ROW_TASKS else outputs.last_hidden_state
        partial = wanted is not None and task not in ROW_TASKS
        if partial and targets is None:
            return _Prediction()
        if wanted is not None and targets is not None and partial:
            states = states[(targets != IGNORED)[wanted]]
        if task == "mlm":
            return _Prediction(*self.masked_lm(states, targets, counts, not partial))
        logits = getattr(self, self.classifiers[task])(states)
        if targets is None:
            return _Prediction(logits=logits)
        if task in ROW_TASKS:
            targets = heads.row_targets(targets, name, len(logits))
        elif partial:
            targets = targets[targets != IGNORED]
        loss = heads.cross_entropy_over_targets(logits, targets, name, counts)
        return _Prediction(loss, None if partial else logits, heads.accuracy_counts(logits.detach(), targets))


class _Prediction(NamedTuple):
    """A task's loss, logits and `accuracy_counts`."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    right: Tensor | None = None
