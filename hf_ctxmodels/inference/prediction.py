"""Predictions of fine-tuned models for unlabeled examples."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, Self

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.sentence_encoder import read_saved_json
from hf_ctxmodels.core.adapter_support import suppress_adapter_notice
from hf_ctxmodels.core.console import format_count, print_status
from hf_ctxmodels.core.constants import MULTITASK_MODEL_TYPE
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import add_saved_adapters
from hf_ctxmodels.downstream.adapters.management import set_active_adapters
from hf_ctxmodels.downstream.finetuning.arguments import StartingModelArguments
from hf_ctxmodels.downstream.finetuning.finetuning_run import (
    has_several_tasks,
    load_config_and_tokenizer,
    load_multitask_model,
    open_model,
)
from hf_ctxmodels.downstream.tasks import TASKS, Task, TaskArguments
from hf_ctxmodels.downstream.tasks.base import COLUMN_FLAGS, check_unused_arguments, default_max_length
from hf_ctxmodels.downstream.tasks.sequence_classification import (
    MultiLabelClassification,
    Regression,
    SequenceClassification,
)
from hf_ctxmodels.inference.task_heads import run_head
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.training_state import saved_identity


class FilePredictions(NamedTuple):
    """Predictions for the examples of a file.

    Attributes:
        results: JSON object of each example.
        scores: Metric -> value; empty without labels.
    """

    results: list[dict[str, Any]]
    scores: dict[str, float]


@dataclass(frozen=True)
class Predictor:
    """A fine-tuned model, its tokenizer, and its task with the labels of the model.

    Attributes:
        columns: `TaskArguments.saved_columns` of the training file, for files that have them.

    Example:
        >>> predictor = Predictor.open("runs/reviews-classifier")
        >>> predictor.predict(predictor.task.read_unlabeled("new_reviews.txt"))
    """

    task: Task[Any]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        source: str,
        arguments: TaskArguments | None = None,
        *,
        task: str | None = None,
        task_name: str | None = None,
        max_length: int | None = None,
        multitask_model: PreTrainedModel | None = None,
    ) -> Self:
        """Open a model with its saved adapters.

        Args:
            source: Directory or Hub id.
            arguments: Columns of the files; by default the columns of the training file, see `predict_file`.
            task: Key of `TASKS`; by default the task of fine-tuning, or if it is unknown of the model's head.
            task_name: Task of a multi-task model.
            max_length: Longest input in tokens; by default the length of fine-tuning, or if it is unknown 128 or the
                model's limit.
            multitask_model: The multi-task model of `source`, if it is already loaded.

        Raises:
            CtxError: The model cannot be opened, or has no head of the task.
        """
        config = load_config(source)
        task_adapters = None
        if has_several_tasks(config, task_name, source):
            task_adapters = (config.task_adapters or {}).get(task_name)
        summary = finetuning_summary(source)
        config, head_task = _saved_task(config, task_name, source, summary, preferred=task)
        if task not in (None, head_task):
            raise CtxError(
                f"The model's head is for the task {head_task}.", location=f"--task {task}", hint="remove --task."
            )
        length = max_length
        if length is None and summary is not None:
            length = summary.task_max_lengths.get(task_name or "", summary.max_length)
        length = length or default_max_length(config)
        model_task = TASKS[head_task](replace(arguments or TaskArguments(), max_length=length))
        model_source = StartingModelArguments(model=source, task_name=task_name)
        config, tokenizer = load_config_and_tokenizer(model_source, model_task)
        check_tokenizer_matches_model(tokenizer, config, length, location=source)
        model_task.load_labels(config)
        with suppress_adapter_notice():
            model = open_model(model_source, model_task, config, tokenizer, multitask_model, require_head=True)
        columns = {} if summary is None else summary.task_columns.get(task_name or "", summary.columns)
        add_saved_adapters(model, source)
        if task_adapters is not None:
            set_active_adapters(model, task_adapters)
        return cls(model_task, model.eval(), tokenizer, columns)

    @classmethod
    def open_tasks(
        cls, source: str, arguments: TaskArguments | None = None, *, max_length: int | None = None
    ) -> Iterator[tuple[str, Self]]:
        """Yield name and predictor of each task of a multi-task model, which is loaded once; arguments as for `open`.

        Raises:
            CtxError: The model cannot be opened, is not a multi-task model, or none of its tasks uses an argument.
        """
        kinds = saved_kinds(source)
        if arguments is not None:
            argument_names = {name for kind in kinds.values() for name in TASKS[kind].argument_names}
            check_unused_arguments(arguments, argument_names, "No task of the model uses it.")
        with suppress_adapter_notice():
            model = load_multitask_model(source)
        for name in kinds:
            yield name, cls.open(source, arguments, task_name=name, max_length=max_length, multitask_model=model)

    def predict(self, examples: Sequence[Any], batch_size: int = 32, progress: bool = False) -> list[dict[str, Any]]:
        """The results (`Task.results`) of examples from `Task.read_unlabeled`, in their order."""
        if not len(examples):
            return []
        encoded = self.task.encode(examples, self.tokenizer)
        outputs = run_head(self.model, self.tokenizer, self.task, encoded, batch_size, progress)
        return self.task.results(examples, encoded, outputs)

    def predict_file(self, file: str, batch_size: int = 32, progress: bool = False) -> FilePredictions:
        """The results of all examples of a file, and their scores if the file has labels. Columns that the task's
        arguments do not select are the columns of the training file, if the file has them.

        Raises:
            CtxError: The examples cannot be read without labels, or `label_column` is given and the labels are invalid.
        """
        task = self.task.for_file(file, self.columns)
        examples = task.read_unlabeled(file)
        print_status(f"{type(self.model).__name__} predicts {format_count(len(examples), 'example')}", progress)
        encoded = task.encode(examples, self.tokenizer)
        outputs = run_head(self.model, self.tokenizer, task, encoded, batch_size, progress)
        scores: dict[str, float] = {}
        reason = "the file has no labels"
        try:
            if task.has_labels(file):
                labeled = task.read_file(file)  # the same inputs as the examples
                is_scored = [*map(task.is_labeled, labeled)]
                predictions = task.decode(labeled, encoded, outputs)
                scores = task.score([*compress(labeled, is_scored)], [*compress(predictions, is_scored)])
        except CtxError as error:
            if self.task.arguments.label_column is not None:
                raise
            reason = invalid_label_reason(error)
        print_status(f"no score: {reason}", progress and not scores)
        return FilePredictions(task.results(examples, encoded, outputs), scores)


def invalid_label_reason(error: CtxError) -> str:
    """Why predictions have no score, from the error of reading labels."""
    return error.message if error.location is None else f"{error.message} ({error.location})"


def finetuning_summary(source: str | Path) -> TrainingSummary | None:
    """The summary of the fine-tuning of a model (directory or Hub id), or of the run that a checkpoint belongs to; None
    without. The summary of an unfinished run has no results."""
    folder = Path(source).resolve()
    summary: TrainingSummary | None = None
    if not folder.is_dir():
        fields = read_saved_json(str(source), SUMMARY_FILE, download=True)
        summary = None if fields is None else TrainingSummary.from_json(fields, f"{source}/{SUMMARY_FILE}")
    elif (folder / SUMMARY_FILE).is_file():
        summary = TrainingSummary.load(folder)
    elif folder.name.startswith("checkpoint-"):
        is_finished = (folder.parent / SUMMARY_FILE).is_file()
        summary = TrainingSummary.load(folder.parent) if is_finished else _unfinished_summary(folder)
    return None if summary is None or summary.task == "pretraining" else summary


def _unfinished_summary(checkpoint: Path) -> TrainingSummary | None:
    """The summary of a run until a checkpoint, from the flags with which it is resumed; None if it is no fine-tuning on
    a task of `TASKS`."""
    identity = saved_identity(checkpoint)
    listed = [entry for entry in identity.get("tasks") or () if isinstance(entry, dict) and "kind" in entry]
    if identity.get("task") in TASKS:
        task, arguments, files = identity["task"], [identity], identity["train_file"]
    elif listed:
        task = ", ".join(f"{entry['name']} ({entry['kind']})" for entry in listed)
        arguments, files = [entry["arguments"] for entry in listed], [entry["train_file"] for entry in listed]
    else:
        return None
    return TrainingSummary(
        task=task,
        model_class=identity["model_class"],
        model_type=identity["config.model_type"],
        dataset=", ".join(file.partition(" (")[0] for file in files),
        seed=identity["seed"],
        parameters=0,
        steps=int(checkpoint.name.rpartition("-")[2]),
        global_batch_size=identity["global_micro_batch"] * identity["gradient_accumulation_steps"],
        max_length=max(fields["max_length"] for fields in arguments),
        task_max_lengths={entry["name"]: entry["arguments"]["max_length"] for entry in listed},
        columns=_saved_columns(identity),
        task_columns={entry["name"]: _saved_columns(entry["arguments"]) for entry in listed},
        command="",
    )


def _saved_columns(arguments: Mapping[str, Any]) -> dict[str, str]:
    """`TaskArguments.saved_columns` of saved arguments; a run on several tasks has none."""
    columns: dict[str, Any] = {name: arguments.get(name) for name in (*COLUMN_FLAGS, "label_delimiter")}
    return TaskArguments(**columns).saved_columns()


def saved_kinds(source: str) -> dict[str, str]:
    """Task of a multi-task model -> its kind, a key of `TASKS`; raises CtxError for other models."""
    config, summary = load_config(source), finetuning_summary(source)
    if config.model_type != MULTITASK_MODEL_TYPE:
        raise CtxError(
            "The model was not trained on several tasks.",
            location=source,
            hint="remove --all_tasks (use Predictor.open), or use a directory written by `finetune multitask`.",
        )
    return {task_name: _saved_task(config, task_name, source, summary)[1] for task_name in config.tasks}


def _saved_task(
    config: PreTrainedConfig,
    task_name: str | None,
    source: str,
    summary: TrainingSummary | None,
    preferred: str | None = None,
) -> tuple[PreTrainedConfig, str]:
    """The configuration of a model, or of a task of a multi-task model, and the kind of the task: of its fine-tuning or
    `preferred`, if its head suits it."""
    if task_name is not None:
        config, auto_class = config.task_config(task_name), config.tasks[task_name]["auto_class"]
    else:
        auto_class = "AutoModelFor" + (config.architectures or [""])[0].partition("For")[2]
    if preferred is None and summary is not None:  # of a multi-task model: "rte (sequence-classification), ..."
        preferred = dict(re.findall(r"(\S+) \(([\w-]+)\)", summary.task)).get(task_name, summary.task)
    return config, _task_of_head(config, auto_class, source, preferred)


def _task_of_head(config: PreTrainedConfig, auto_class: str, source: str, preferred: str | None) -> str:
    """The task of a head by its Auto class: `preferred` if the head suits it; raises CtxError for other heads."""
    tasks = [name for name, task in TASKS.items() if auto_class.startswith(task.auto_class)]
    if SequenceClassification.name in tasks:
        is_regression = config.problem_type == "regression" or config.num_labels == 1
        task = Regression if is_regression else SequenceClassification
        tasks = [(MultiLabelClassification if config.problem_type == "multi_label_classification" else task).name]
    if preferred in tasks:
        return str(preferred)
    if not tasks:
        architecture = (config.architectures or ["model without a head"])[0]
        can_generate = auto_class.endswith(("ForConditionalGeneration", "ForCausalLM"))
        command = "use `hf-ctxmodels generate`" if can_generate else "fine-tune it: `hf-ctxmodels finetune`"
        raise CtxError(
            f"The model has no head of a fine-tuning task; it is a {architecture}.",
            location=source,
            hint=f"{command}.",
        )
    return tasks[0]
