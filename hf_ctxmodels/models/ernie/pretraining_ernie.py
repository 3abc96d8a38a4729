"""Pretraining of ERNIE by tasks: masked units with pairs (1.0), or the tasks of continual learning (2.0)."""

from torch import nn

from hf_ctxmodels import heads
from hf_ctxmodels.models.ernie.configuration_ernie import SEQUENCE_TASKS, TOKEN_TASKS, CtxErnieConfig
from hf_ctxmodels.models.ernie.modeling_ernie import CtxErnieForMaskedLM


def _task(name: str) -> heads.PretrainingTask:
    head = "nsp_head" if name == "next_sentence" else f"{name}_head"  # as in BERT
    return heads.PretrainingTask(name, f"{name}_labels", head, f"{name}_logits", of_tokens=name in TOKEN_TASKS)


class CtxErnieForPreTraining(heads.ForMaskedLMWithTasks, CtxErnieForMaskedLM):
    """Masked units, and the tasks of `config.pretraining_tasks`, each a linear classifier of the tokens' states or of
    the pooled output (Sun et al. 2020, section 3.3). Rows of a batch may belong to several tasks.

    Targets beside `labels`:
        next_sentence_labels: (batch,) 0 if the second segment continues the first, else 1.
        sentence_reordering_labels: (batch,) the permutation of a text's segments.
        sentence_distance_labels: (batch,) 0 for neighbours, 1 for others of one document, 2 for two documents.
        discourse_relation_labels, query_title_labels: (batch,) the class of a pair.
        capitalization_labels: (batch, length) 1 where the word is capitalised, else 0.
        token_document_labels: (batch, length) 1 where the token is elsewhere in the document, too, else 0.
    """

    tasks = tuple(_task(name) for name in (*SEQUENCE_TASKS, *TOKEN_TASKS))

    def build_head(self, config: CtxErnieConfig) -> None:
        """The masked-LM head, and a classifier for each task."""
        super().build_head(config)
        for task in filter(self.has_task, self.tasks):
            assert task.head is not None
            setattr(self, task.head, nn.Linear(config.hidden_size, config.tasks[task.name]))

    def has_task(self, task: heads.PretrainingTask) -> bool:
        """Whether it is among `config.pretraining_tasks`; masked units always are."""
        return task.head is None or task.name in self.config.tasks


CtxErnieForPreTrainingOutput = CtxErnieForPreTraining.output_class
