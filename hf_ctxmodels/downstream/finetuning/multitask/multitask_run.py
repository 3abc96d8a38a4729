"""Multi-task fine-tuning: tasks are trained together and saved as one model (Liu et al. 2019, "MT-DNN")."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.console import format_next_commands, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.data.document_sources import describe_content
from hf_ctxmodels.downstream.finetuning.multitask.batches import TaskCollator, add_task_name, make_mixture, mean
from hf_ctxmodels.downstream.finetuning.multitask.evaluation import MEAN, BestModel, MultitaskEvaluation
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.multitask import CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.downstream.multitask.configuration import check_task_name, task_entry
from hf_ctxmodels.downstream.tasks import Encoded, Task, TaskArguments
from hf_ctxmodels.downstream.tasks.task_list import ListedTask, TaskList, read_task_list
from hf_ctxmodels.tokenizers.base import CtxTokenizer, check_tokenizer_matches_model
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import publish_files, temporary_path
from hf_ctxmodels.training.freezing import check_layerwise_flags, freeze_encoder
from hf_ctxmodels.training.loop import TrainingResult, global_batch_size, make_accelerator, train
from hf_ctxmodels.training.model_loading import require_trainable
from hf_ctxmodels.training.recipe import find_packaged


@dataclass
class MultitaskArguments:
    """Tasks."""

    tasks: str = flag(REQUIRED, "YAML file that lists tasks and their files, or the name of a list of the package.")
    tasks_folder: str | None = flag(None, "Directory that relative paths in the list of tasks start from.")
    only: list[str] = flag((), "Train only these tasks of the list.")
    keep: Literal["last", "best"] = flag(
        "last", "Model to save: the last, or the one with the best mean of the main metrics in an evaluation."
    )
    freeze: Literal["encoder"] | None = flag(None, "Train only the heads.")


@dataclass(frozen=True)
class StartingModel:
    """The model that multi-task fine-tuning starts from.

    Attributes:
        load_config_and_tokenizer: Task -> configuration and tokenizer.
        open_model: Task, its configuration and the tokenizer -> a model with its head.
        source: Location of the model, for errors.
        is_frozen: Whether the encoder is frozen.
    """

    load_config_and_tokenizer: Callable[[Task[Any]], tuple[PreTrainedConfig, PreTrainedTokenizerBase]]
    open_model: Callable[[Task[Any], PreTrainedConfig, PreTrainedTokenizerBase], PreTrainedModel]
    source: str
    is_frozen: bool = False


@dataclass
class TaskRun:
    """One task of the run.

    Attributes:
        listed: Its entry in the list of tasks.
        task: The task, after `configure`.
        training, validation: Its examples.
        config: The encoder's configuration with the task's labels and options.
        baseline: Metrics of `Task.baseline`, the main metric first; after `encode`.
    """

    listed: ListedTask
    task: Task[Any]
    training: list[Any]
    validation: list[Any]
    config: CtxConfig = field(default_factory=CtxConfig)
    baseline: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, listed: ListedTask) -> "TaskRun":
        """Create a run with the examples of the training and validation files.

        Raises:
            CtxError: They cannot be read, or the task's name is invalid; the message names the task.
        """
        check_task_name(listed.name, listed.location)
        task = listed.make()
        try:
            files = task.read(listed.train_file, "train"), task.read(listed.validation_file, "validation")
        except CtxError as error:
            raise _with_task_name(listed, error) from error
        return cls(listed, task, *files)

    def configure(self, config: PreTrainedConfig) -> None:
        """Set the task's labels and options in a copy of the encoder's configuration.

        Raises:
            CtxError: The labels are unusable, or the family has no such option.
        """
        self.config = deepcopy(config)
        options = {
            self.config.head_dropout_field: self.listed.head_dropout,
            "answer_steps": self.listed.answer_steps or None,
            "answer_dropout": self.listed.answer_dropout,
        }
        for name, value in options.items():
            if value is None:
                continue
            if not hasattr(self.config, name):
                raise CtxError(
                    f"{type(config).__name__} has no {name}.", location=self.listed.location, hint="remove it."
                )
            setattr(self.config, name, value)
        try:
            self.config.validate()
            self.task.configure(self.config, self.training, self.validation)
        except StrictDataclassError as error:
            raise CtxError(
                f"The task {self.listed.name}: {error.__cause__}",
                location=self.listed.location,
                hint="remove the option.",
            ) from error
        except CtxError as error:
            raise _with_task_name(self.listed, error) from error

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoded, Encoded]:
        """Encode training and validation examples, and compute the baseline."""
        name = self.listed.name
        try:
            training = add_task_name(name, self.task.encode(self.training, tokenizer))
            validation = add_task_name(name, self.task.encode(self.validation, tokenizer))
        except CtxError as error:
            raise _with_task_name(self.listed, error) from error
        self.baseline = self.task.score(self.validation, self.task.baseline(self.training, self.validation))
        metric = self.main_metric[0]
        if metric not in self.baseline:
            raise CtxError(
                f"The task {self.listed.name} has no metric {metric!r}.",
                location=self.listed.location,
                hint=f"use one of {', '.join(self.baseline)}.",
            )
        self.baseline = {metric: self.baseline[metric], **self.baseline}
        return training, validation

    @property
    def main_metric(self) -> tuple[str, float]:
        """The main metric and its maximum; after `encode`."""
        return self.listed.metric or next(iter(self.baseline)), 100.0 if self.task.is_percentage else 1.0

    @property
    def entry(self) -> dict[str, Any]:
        """The task's entry in the model's configuration."""
        return task_entry(self.task.auto_class, self.config, self.listed.weight)

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal when the run is resumed; files are compared by content."""
        files = {name: describe_content(getattr(self.listed, name)) for name in ("train_file", "validation_file")}
        fields = {name: value for name, value in asdict(self.listed).items() if name != "location"}
        return {**fields, **files, "where": None}


def _with_task_name(listed: ListedTask, error: CtxError) -> CtxError:
    """The error with the task's name and its location in the list."""
    location = f"{error.location}; {listed.location}" if error.location else listed.location
    return CtxError(f"The task {listed.name}: {error.message}", location=location, hint=error.hint)


@dataclass(frozen=True)
class MultitaskResult:
    """Result of multi-task fine-tuning.

    Attributes:
        runs: Task name -> the task.
        accelerator: The run's Accelerator.
        result: The result of the training loop.
        metrics: Metrics of the saved model.
    """

    runs: dict[str, TaskRun]
    accelerator: Accelerator
    result: TrainingResult
    metrics: dict[str, float]

    def save_summary(self) -> None:
        """Write `TrainingSummary` into the output directory, with the baselines of all tasks."""
        baselines = {
            f"{name}_{metric}": value for name, run in self.runs.items() for metric, value in run.baseline.items()
        }
        self.result.metrics = {
            **self.metrics,
            **{f"baseline_{name}": value for name, value in {**baselines, "mean": self.mean_baseline}.items()},
        }
        summary = self.result.summary(
            task=", ".join(f"{name} ({run.listed.kind})" for name, run in self.runs.items()),
            dataset=", ".join(Path(run.listed.train_file).name for run in self.runs.values()),
            max_length=max(run.listed.arguments.max_length for run in self.runs.values()),
        )
        summary.save(self.result.arguments.output_dir)

    @property
    def mean_baseline(self) -> float:
        """The mean of the baselines' main metrics."""
        return mean(run.baseline[run.main_metric[0]] / run.main_metric[1] for run in self.runs.values())

    def table(self) -> str:
        """A table of each task's metrics and baselines, the main metric first, and the mean of the main metrics."""
        width = max(16, *(len(name) + 2 for name in self.runs))
        rows = [f"{'task':<{width}}{'metric':<24}{'model':>10}{'baseline':>10}"]
        for name, run in self.runs.items():
            for index, (metric, baseline) in enumerate(run.baseline.items()):
                value = self.metrics[f"eval_{name}_{metric}"]
                rows.append(f"{name if index == 0 else '':<{width}}{metric:<24}{value:>10.4f}{baseline:>10.4f}")
        rows.append(f"{'mean':<{width}}{'main metrics':<24}{self.metrics[MEAN]:>10.4f}{self.mean_baseline:>10.4f}")
        return "\n".join(rows)


def finetune_tasks(
    arguments: MultitaskArguments, defaults: TaskArguments, loop: LoopArguments, start: StartingModel
) -> MultitaskResult:
    """Fine-tune a model on all tasks of a list, evaluate it, and save it.

    Raises:
        CtxError: Files, model, tokenizer and flags do not match each other.
    """
    if start.is_frozen:
        check_layerwise_flags(loop)
    listed = read_task_list(
        find_packaged(str(arguments.tasks), "tasks", "list of tasks", "--tasks"), defaults, arguments.tasks_folder
    )
    runs = {task.name: TaskRun.load(task) for task in _select_tasks(listed, arguments.only)}
    # a tokenizer that splits words for tagging also reads plain text, but not the other way round
    first = min(runs.values(), key=lambda run: not run.task.split_words)
    config, tokenizer = start.load_config_and_tokenizer(first.task)
    for run in runs.values():
        check_tokenizer_matches_model(tokenizer, config, run.listed.arguments.max_length, location=start.source)
        run.configure(config)
    if isinstance(tokenizer, CtxTokenizer):
        tokenizer.prepare_for_tasks()
    accelerator = make_accelerator(loop, unused_parameters=True)
    sizes = ", ".join(f"{name} {len(run.training):,}" for name, run in runs.items())
    print_status(f"tokenizing the training examples of {len(runs)} tasks: {sizes}", accelerator.is_main_process)
    encoded = {name: run.encode(tokenizer) for name, run in runs.items()}

    model = _new_model(config, tokenizer, runs, start)
    collate = TaskCollator({name: run.task.collator(tokenizer) for name, run in runs.items()})
    size = loop.per_device_batch_size
    evaluations = {
        name: TaskEvaluation(run.task, run.validation, encoded[name][1], collate, size) for name, run in runs.items()
    }
    best = BestModel(loop.output_dir, loop.resume) if arguments.keep == "best" else None
    features_by_task = [training.features for training, _ in encoded.values()]
    result = train(
        model,
        make_mixture(listed, features_by_task, global_batch_size(loop, accelerator), loop.num_train_epochs),
        collate,
        loop,
        accelerator,
        tokenizer=tokenizer,
        evaluate=MultitaskEvaluation(evaluations, {name: run.main_metric for name, run in runs.items()}, best),
        identity={
            "tasks": [run.identity for run in runs.values()],
            "sampling": listed.sampling,
            "temperature": listed.temperature,
            "freeze": start.is_frozen,
        },
    )
    if best is not None and best.metrics:
        _publish(best, model, tokenizer, accelerator, loop.output_dir)
    return MultitaskResult(runs, accelerator, result, best.metrics if best is not None else result.metrics)


def _select_tasks(listed: TaskList, only: Sequence[str]) -> list[ListedTask]:
    """The tasks with the given names, or all; raises CtxError for a name that is not in the list."""
    names = [task.name for task in listed.tasks]
    if unknown := [name for name in only if name not in names]:
        raise CtxError(
            f"The list has no task {unknown[0]}.", location=f"--only {unknown[0]}", hint=f"use {', '.join(names)}."
        )
    return [task for task in listed.tasks if not only or task.name in only]


def _new_model(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, runs: dict[str, TaskRun], start: StartingModel
) -> CtxMultiTaskModel:
    """A multi-task model with new heads and the encoder of the starting model."""
    config.name_or_path = ""  # the location is not part of the model
    entries = {name: run.entry for name, run in runs.items()}
    heads = {name: CtxMultiTaskConfig(encoder=config, tasks=entries).head_class(name) for name in runs}
    for name, run in runs.items():
        if run.listed.arguments.both_orders and not getattr(heads[name], "accepts_both_orders", False):
            raise CtxError(
                f"{heads[name].__name__} does not support reading a pair in both orders.",
                location=run.listed.location,
                hint="remove both_orders.",
            )
    # an encoder with a pooler, if a head reads it
    pooled_task = max(
        runs, key=lambda name: getattr(heads[name], "pools", False) and not runs[name].listed.answer_steps
    )
    initial_model = start.open_model(runs[pooled_task].task, runs[pooled_task].config, tokenizer)
    require_trainable(initial_model)
    if (
        hasattr(initial_model.config, "vocab_size") and initial_model.config.vocab_size != config.vocab_size
    ):  # new tokens
        config.vocab_size = initial_model.config.vocab_size
    model = CtxMultiTaskModel(CtxMultiTaskConfig(encoder=config, tasks=entries))
    for head in model.heads.values():
        head.load_pretrained_components()
    model.copy_encoder_weights(initial_model)
    if start.is_frozen:
        freeze_encoder(model)
    return model


def _publish(
    best: BestModel,
    model: CtxMultiTaskModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    output_dir: str,
) -> None:
    """Replace the last model in the output directory by the best one."""
    if accelerator.is_main_process:
        temporary = temporary_path(Path(output_dir) / "model")
        temporary.mkdir()
        model.save_pretrained(temporary, state_dict=best.weights(), max_shard_size="1000GB")
        tokenizer.save_pretrained(temporary)
        publish_files(temporary, Path(output_dir))
    accelerator.wait_for_everyone()


def report(tuned: MultitaskResult) -> None:
    """Save the summary; print the table and the next commands."""
    if not tuned.accelerator.is_main_process:
        return
    tuned.save_summary()
    output, name = tuned.result.arguments.output_dir, next(iter(tuned.runs))
    print(tuned.table())
    print(f"model, tokenizer, log and summary saved in {output}")
    files = ("--train_file", "FILE", "--validation_file", "FILE", "--output_dir", "DIRECTORY")
    again = ("finetune", tuned.runs[name].listed.kind, "--model", output, "--task_name", name, *files)
    print(format_next_commands(again, ("push", "--model", output, "--repo_id", "ORGANISATION/NAME")))
