"""ERNIE configuration (Sun et al. 2019, section 4.1; Sun et al. 2020; the released models)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

# Tasks of `CtxErnieForPreTraining` in addition to knowledge masking. The targets are `<task>_labels`, (batch, length)
# for token tasks and (batch,) for sequence tasks.
TOKEN_TASKS = ("capitalization", "token_document")
SEQUENCE_TASKS = ("next_sentence", "sentence_reordering", "sentence_distance", "discourse_relation", "query_title")
TASKS = (*SEQUENCE_TASKS, *TOKEN_TASKS)


@strict
class CtxErnieConfig(CtxBertConfig):
    """Configuration of ERNIE; the defaults are the released ERNIE 1.0 for Chinese. See `CtxBertConfig` for the other
    arguments.

    Args:
        use_task_id: Whether to add task embeddings to the input (ERNIE 2.0).
        task_type_vocab_size: Number of task embeddings.
        pretraining_tasks: Number of classes of each task of `CtxErnieForPreTraining` in addition to knowledge masking,
            by names in `TOKEN_TASKS` and `SEQUENCE_TASKS`. None means ERNIE 1.0's {"next_sentence": 2}.
    """

    model_type = "ctx-ernie"
    reference_model_types: ClassVar[tuple[str, ...]] = ("ernie",)

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
            if name not in TASKS:
                raise ValueError(f"pretraining_tasks has the unknown task {name!r}; use names in {', '.join(TASKS)}.")
            if classes < 2:
                raise ValueError(f"pretraining_tasks has {classes} classes for {name!r}; expected 2 or more.")

    @property
    def tasks(self) -> dict[str, int]:
        """Task -> number of classes: `pretraining_tasks`, or ERNIE 1.0's tasks if None."""
        return {"next_sentence": 2} if self.pretraining_tasks is None else self.pretraining_tasks
