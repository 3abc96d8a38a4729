"""ERNIE configuration (Sun et al. 2019, section 4.1; Sun et al. 2020, section 4.1; the released models)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

# Tasks of `CtxErnieForPreTraining` beside masked units. The target of a token task is `<task>_labels` (batch, length),
# that of a row task `<task>_label` (batch,).
TOKEN_TASKS = ("capitalization", "token_document")
SEQUENCE_TASKS = ("next_sentence", "sentence_reordering", "sentence_distance", "discourse_relation", "query_title")


@strict
class CtxErnieConfig(CtxBertConfig):
    """Shape and regularisation of an ERNIE encoder; the defaults are the released ERNIE 1.0 for Chinese.

    Args: those of `CtxBertConfig`, of which differ `vocab_size`, `hidden_act` and `max_position_embeddings`, and
        use_task_id: Add an embedding of the task to the input (ERNIE 2.0).
        task_type_vocab_size: Rows of its table.
        pretraining_tasks: Tasks of `CtxErnieForPreTraining` beside masked units -> number of classes; names of
            `TOKEN_TASKS` and `SEQUENCE_TASKS`. None is ERNIE 1.0's, {"next_sentence": 2}.
    """

    model_type = "ctx-ernie"

    vocab_size: int = 18000
    hidden_act: str = "relu"
    max_position_embeddings: int = 513
    use_task_id: bool = False
    task_type_vocab_size: int = 3
    pretraining_tasks: dict[str, int] | None = None

    non_reference_fields: ClassVar[tuple[str, ...]] = (*CtxBertConfig.non_reference_fields, "pretraining_tasks")

    def validate_architecture(self) -> None:
        """Check the tasks' names and numbers of classes (called at construction)."""
        super().validate_architecture()
        for name, classes in self.tasks.items():
            if name not in (*TOKEN_TASKS, *SEQUENCE_TASKS):
                known = ", ".join((*TOKEN_TASKS, *SEQUENCE_TASKS))
                raise ValueError(f"pretraining_tasks has {name!r}, which is no task; use some of {known}.")
            if classes < 2:
                raise ValueError(f"pretraining_tasks has {classes} classes for {name!r}; a task needs 2 or more.")

    @property
    def tasks(self) -> dict[str, int]:
        """`pretraining_tasks`, or ERNIE 1.0's."""
        return {"next_sentence": 2} if self.pretraining_tasks is None else self.pretraining_tasks
