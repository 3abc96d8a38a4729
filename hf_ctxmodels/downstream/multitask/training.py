"""Multi-task fine-tuning: tasks are trained together and saved as one model (Liu et al. 2019, "MT-DNN")."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import safetensors.torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.command_line import find_packaged
from hf_ctxmodels.core.config import CtxConfig, convert_config_errors
from hf_ctxmodels.core.console import format_next_commands, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, ParsedChoices, flag, select_fields
from hf_ctxmodels.data import (
    Mixture,
    ReweightedMixture,
    ShuffledMixture,
    UnlabeledCollator,
    UnlabeledMixture,
    mark_unlabeled,
)
from hf_ctxmodels.data.files import describe_content
from hf_ctxmodels.data.hub_datasets import source_name
from hf_ctxmodels.downstream.adapters.configuration import ADAPTER_CONFIGS, BottleneckConfig
from hf_ctxmodels.downstream.adapters.management import add_adapter, freeze_all_but
from hf_ctxmodels.downstream.finetuning.arguments import StartingModelArguments
from hf_ctxmodels.downstream.finetuning.finetuning_run import load_config_and_tokenizer, open_model, prepare_for_tasks
from hf_ctxmodels.downstream.finetuning.task_evaluation import (
    MEAN,
    BestModel,
    SeveralTasksEvaluation,
    TaskEvaluation,
    learned_baseline_scores,
)
from hf_ctxmodels.downstream.multitask import CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.downstream.multitask.configuration import check_task_name, task_entry
from hf_ctxmodels.downstream.multitask.task_list import ListedTask, TaskList, read_task_list
from hf_ctxmodels.downstream.tasks import TASKS, Encoded, TaskArguments
from hf_ctxmodels.downstream.tasks.base import Collator, Feature
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.accelerator import make_accelerator, restore_determinism
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import check_run_directory, replacing_model
from hf_ctxmodels.training.defaults import finetuning_epochs
from hf_ctxmodels.training.freezing import check_layerwise_flags, freeze_encoder
from hf_ctxmodels.training.loop import TrainingLoop, TrainingResult, global_batch_size
from hf_ctxmodels.training.model_loading import prepare_for_training

TASK = "task"  # key of the task's name in features and batches
_UNLABELED = ""  # value of TASK in unlabeled features; not a valid name of a task
SHARED_ADAPTER = "shared"


@dataclass(frozen=True)
class TaskAdapterOptions(BottleneckConfig):
    """Bottleneck adapters in the frozen encoder; all fields of `BottleneckConfig` are options."""

    sharing: Literal["both", "task", "shared"] = flag(
        "both", "An adapter for each task, one that all tasks share, or both, the shared one below."
    )

    @property
    def config(self) -> BottleneckConfig:
        """The configuration of each adapter."""
        return select_fields(BottleneckConfig, self)

    def stack(self, task: str) -> list[str]:
        """Names of the adapters of a task, from the lowest up; raises CtxError if the task has the name of the shared
        adapter."""
        if self.sharing == "both" and task == SHARED_ADAPTER:
            raise CtxError(
                f"The task {task} has the name of the adapter that all tasks share.",
                location="--adapter",
                hint="rename the task, or use sharing=task or sharing=shared.",
            )
        return {"both": [SHARED_ADAPTER, task], "task": [task], "shared": [SHARED_ADAPTER]}[self.sharing]


@dataclass(frozen=True)
class ProjectedAttentionOptions:
    """Projected attention layers for each task (Stickland and Murray 2019)."""

    size: int = flag(204, "Width of the projected attention.")
    heads: int = flag(12, "Heads of the projected attention.")
    train_encoder: bool = flag(True, "Train the shared encoder, too, as in the paper.")


_ADAPTERS = ("pfeiffer", "houlsby", "parallel")  # without invertible layers at the embeddings


@dataclass
class MultitaskArguments(ParsedChoices):
    """Tasks."""

    tasks: str = flag(REQUIRED, "YAML file that lists tasks and their files, or the name of a list of the package.")
    tasks_folder: str | None = flag(None, "Directory that relative paths in the list of tasks start from.")
    only: list[str] = flag((), "Train only these tasks of the list.")
    keep: Literal["last", "best"] = flag(
        "last", "Model to save: the last, or the one with the best mean of the main metrics in an evaluation."
    )
    freeze: Literal["encoder"] | None = flag(None, "Train only the heads.")
    adapter: TaskAdapterOptions | ProjectedAttentionOptions | None = flag(
        None,
        "Train task-specific weights in the encoder: bottleneck adapters, with the encoder frozen, or projected "
        "attention.",
        {
            **{name: TaskAdapterOptions(**vars(ADAPTER_CONFIGS[name])) for name in _ADAPTERS},
            "projected-attention": ProjectedAttentionOptions,
        },
        conflicts=("freeze",),
    )
    unlabeled_file: str | None = flag(
        None, "Unlabeled examples for every second step, from which all tasks learn (cross-view training)."
    )


@dataclass(frozen=True)
class TaskCollator:
    """Collates the features of one task with its collator, and adds the task's name for `CtxMultiTaskModel`."""

    collators: Mapping[str, Collator]

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the model's forward; raises CtxError for features of several tasks."""
        tasks = list(dict.fromkeys(feature[TASK] for feature in features))
        if len(tasks) > 1:
            raise CtxError(f"Expected a batch of one task, but it has features of {', '.join(tasks)}.")
        inputs = [{name: value for name, value in feature.items() if name != TASK} for feature in features]
        batch = self.collators[tasks[0]](inputs)
        if tasks[0] == _UNLABELED:  # all tasks learn from its views
            return {name: value for name, value in batch.items() if name != "labels"}
        return {**batch, TASK: tasks[0]}


class TaskRun:
    """One task of the run; errors of its files, labels and options name the task.

    Attributes:
        listed: Its entry in the list of tasks.
        task: The task, after `configure`.
        training, validation: The examples of its files.
        config: The encoder's configuration with the task's labels and options, after `configure`.
        baseline: Metrics of `Task.baseline`, the main metric first; after `encode`.
        learned_baseline: Metrics of `Task.learned_baseline`; after training.
    """

    config: CtxConfig
    baseline: dict[str, float]
    learned_baseline: dict[str, float]

    def __init__(self, listed: ListedTask) -> None:
        check_task_name(listed.name, listed.location)
        self.listed, self.task = listed, TASKS[listed.kind](listed.arguments)
        with self._named_errors():
            self.training, self.validation = self.task.read_splits([listed.train_file], listed.validation_file)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        name, location = self.listed.name, self.listed.location
        try:
            with convert_config_errors(hint="remove the option."):
                yield
        except CtxError as error:
            location = f"{error.location}; {location}" if error.location else location
            raise CtxError(f"The task {name}: {error.message}", location=location, hint=error.hint) from error

    def configure(self, config: PreTrainedConfig) -> None:
        """Set the task's labels and options in a copy of the encoder's configuration."""
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
        with self._named_errors():
            self.config.validate()
            self.config.architectures = None  # the heads are of the classes in `FamilySpec.models`
            self.task.configure(self.config, self.training, self.validation)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Feature], Encoded]:
        """Encode training and validation examples, and compute the baseline; returns features with the task's name."""
        with self._named_errors():
            training = self.task.encode(self.training, tokenizer)
            validation = self.task.encode(self.validation, tokenizer)
        for feature in (*training.features, *validation.features):
            feature[TASK] = self.listed.name
        self.baseline = self.task.score(self.validation, self.task.baseline(self.training, self.validation))
        metric = self.main_metric[0]
        if metric not in self.baseline:
            raise CtxError(
                f"The task {self.listed.name} has no metric {metric!r}.",
                location=self.listed.location,
                hint=f"use one of {', '.join(self.baseline)}.",
            )
        self.baseline = {metric: self.baseline[metric], **self.baseline}
        return training.features, validation

    def encode_unlabeled(self, file: str, tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """Encode the unlabeled examples of a file in the task's format."""
        features = mark_unlabeled(self.task.encode(self.task.read_unlabeled(file), tokenizer).features)
        return [{**feature, TASK: _UNLABELED} for feature in features]

    @property
    def main_metric(self) -> tuple[str, float]:
        """The main metric and its maximum; after `encode`."""
        return self.listed.metric or next(iter(self.baseline)), 100.0 if self.task.is_percentage else 1.0

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal when the run is resumed; files are compared by content."""
        files = {name: describe_content(getattr(self.listed, name)) for name in ("train_file", "validation_file")}
        fields = {name: value for name, value in asdict(self.listed).items() if name != "location"}
        return {**fields, **files}


@restore_determinism()
def finetune_tasks(
    arguments: MultitaskArguments, start: StartingModelArguments, defaults: TaskArguments, loop: LoopArguments
) -> None:
    """Fine-tune a model on all tasks of a list, evaluate and save it, and print the metrics.

    All micro-batches of an optimizer step are of one task; the loss is the mean over the step's targets.

    Raises:
        CtxError: Files, model, tokenizer and flags do not match each other.
    """
    if arguments.freeze is not None:
        check_layerwise_flags(loop)
    check_run_directory(loop, start.tokenizer_source)
    accelerator = make_accelerator(loop, unused_parameters=True)
    file = find_packaged(str(arguments.tasks), "tasks", "list of tasks", "--tasks")
    listed = read_task_list(file, defaults, arguments.tasks_folder, arguments.only)
    runs = {task.name: TaskRun(task) for task in listed.tasks}
    # a tokenizer that splits words for tagging also reads plain text, but not the other way round
    first = min(runs.values(), key=lambda run: not run.task.split_words)
    config, tokenizer = load_config_and_tokenizer(start, first.task, require_family=True)
    source = start.model or "--family"
    for run in runs.values():
        check_tokenizer_matches_model(tokenizer, config, run.listed.arguments.max_length, location=source)
        run.configure(config)
    prepare_for_tasks(tokenizer)
    sizes = ", ".join(f"{name} {len(run.training):,}" for name, run in runs.items())
    print_status(f"tokenizing the training examples of {len(runs)} tasks: {sizes}", accelerator.is_main_process)
    encoded = {name: run.encode(tokenizer) for name, run in runs.items()}

    model = _new_model(config, tokenizer, runs, start, arguments.adapter)
    if arguments.freeze is not None:
        freeze_encoder(model)
    if isinstance(arguments.adapter, TaskAdapterOptions):
        adapter_names = list(dict.fromkeys(name for task in runs for name in arguments.adapter.stack(task)))
        for name in adapter_names:
            add_adapter(model, name, arguments.adapter.config)
        freeze_all_but(model, adapter_names)
    elif arguments.adapter is not None and not arguments.adapter.train_encoder:
        freeze_encoder(model)
    collators: dict[str, Collator] = {name: run.task.collator(tokenizer) for name, run in runs.items()}
    unlabeled: list[Feature] = []
    if arguments.unlabeled_file is not None:
        reader = _unlabeled_reader(runs, model, arguments.unlabeled_file)
        unlabeled = reader.encode_unlabeled(arguments.unlabeled_file, tokenizer)
        collators[_UNLABELED] = UnlabeledCollator(reader.task.collator(tokenizer))
        print_status(f"{len(unlabeled):,} unlabeled examples", accelerator.is_main_process)
    collate = TaskCollator(collators)
    size = loop.per_device_batch_size
    evaluations = {
        name: TaskEvaluation(run.task, run.validation, encoded[name][1], collate, size) for name, run in runs.items()
    }
    best = BestModel(loop.output_dir, bool(loop.resume)) if arguments.keep == "best" else None

    features = [training for training, _ in encoded.values()]
    examples, loop = _mix_tasks(features, listed, loop, global_batch_size(loop, accelerator))
    result = TrainingLoop(
        model,
        UnlabeledMixture(examples, unlabeled) if unlabeled else examples,
        collate,
        loop,
        accelerator,
        tokenizer=tokenizer,
        evaluate=SeveralTasksEvaluation(
            evaluations, {name: run.main_metric for name, run in runs.items()}, [] if best is None else [best]
        ),
        identity={
            "tasks": [run.identity for run in runs.values()],
            "sampling": listed.sampling,
            "temperature": listed.temperature,
            "freeze": arguments.freeze is not None,
            **({} if arguments.adapter is None else {"adapter": asdict(arguments.adapter)}),
            **({"unlabeled_file": describe_content(arguments.unlabeled_file)} if arguments.unlabeled_file else {}),
        },
    ).run()
    if best is not None and best.metrics:  # replace the last model by the best one
        if accelerator.is_main_process:
            weights = safetensors.torch.load_file(best.file)
            with replacing_model(Path(loop.output_dir)) as temporary:
                model.save_pretrained(temporary, state_dict=weights, max_shard_size="1000GB")
                tokenizer.save_pretrained(temporary)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _report(runs, evaluations, result, best.metrics if best is not None else result.metrics)


def _mix_tasks(
    features: list[list[Feature]], listed: TaskList, loop: LoopArguments, step_size: int
) -> tuple[Mixture, LoopArguments]:
    """The training examples of all tasks with the sampling of the task list, and the arguments of the loop, which for
    annealed sampling have a number of epochs. Raises CtxError for annealed sampling with `max_steps`."""
    if listed.sampling == "proportional":
        return ShuffledMixture(features, step_size), loop
    if listed.sampling == "temperature":
        return ReweightedMixture.tempered(features, step_size, listed.temperature), loop
    if loop.max_steps is not None:
        raise CtxError(
            "Annealed sampling needs the length of the run in epochs.",
            location="--max_steps",
            hint="pass --num_train_epochs instead, or another sampling.",
        )
    epochs = loop.num_train_epochs or finetuning_epochs(sum(map(len, features)), step_size)
    mixture = ReweightedMixture.annealed(features, step_size, math.ceil(epochs))
    return mixture, replace(loop, num_train_epochs=epochs)


def _new_model(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    runs: dict[str, TaskRun],
    start: StartingModelArguments,
    adapter: TaskAdapterOptions | ProjectedAttentionOptions | None,
) -> CtxMultiTaskModel:
    """A multi-task model with new heads and the encoder of the starting model."""
    config.name_or_path = ""  # the location is not part of the model
    entries = {name: task_entry(run.task.auto_class, run.config, run.listed.weight) for name, run in runs.items()}
    multitask_config = CtxMultiTaskConfig(encoder=config, tasks=entries)
    heads = {name: multitask_config.head_class(name) for name in runs}
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
    initial_model = open_model(start, runs[pooled_task].task, runs[pooled_task].config, tokenizer)
    prepare_for_training(initial_model)
    if getattr(initial_model.config, "vocab_size", None) != getattr(config, "vocab_size", None):  # new tokens
        config.vocab_size = initial_model.config.vocab_size
    if isinstance(adapter, TaskAdapterOptions):
        multitask_config.task_adapters = {name: adapter.stack(name) for name in runs}
    elif adapter is not None:
        multitask_config.projected_attention = {"size": adapter.size, "heads": adapter.heads}
    model = CtxMultiTaskModel(multitask_config)
    for head in model.heads.values():
        head.load_pretrained_components()
    model.encoder.load_state_dict(initial_model.base_model.state_dict())
    return model


def _unlabeled_reader(runs: dict[str, TaskRun], model: CtxMultiTaskModel, file: str) -> TaskRun:
    """The task whose format the unlabeled file has: the first task of words with a loss for unlabeled examples, or
    otherwise of texts; raises CtxError if there is none."""
    learners = [name for name, head in model.heads.items() if "views" in head.loss_targets]
    if not learners:
        raise CtxError(
            "No task of the list has a loss for unlabeled examples.",
            location=f"--unlabeled_file {file}",
            hint="remove it, or use a family with such a loss, such as cvt, and tagging or classification.",
        )
    return runs[min(learners, key=lambda name: not runs[name].task.split_words)]


def _report(
    runs: dict[str, TaskRun],
    evaluations: Mapping[str, TaskEvaluation],
    result: TrainingResult,
    metrics: dict[str, float],
) -> None:
    """Save the `TrainingSummary` with the baselines of all tasks; print metrics, baselines and the next commands."""
    mean_baseline = fmean(run.baseline[run.main_metric[0]] / run.main_metric[1] for run in runs.values())
    baselines = {f"{name}_{metric}": value for name, run in runs.items() for metric, value in run.baseline.items()}
    baselines["mean"] = mean_baseline
    warnings = []
    for name, run in runs.items():
        run.learned_baseline = learned_baseline_scores(run.task, run.training, run.validation)
        metric, scores = run.main_metric[0], {key: metrics[f"eval_{name}_{key}"] for key in run.baseline}
        learned = {metric: run.learned_baseline[metric]} if run.learned_baseline else {}
        baselines |= {f"{name}_{key}_tfidf": value for key, value in learned.items()}
        warnings += [f"{name}: {text}" for text in evaluations[name].warnings(scores, learned)]
    result.metrics = {**metrics, **{f"baseline_{name}": value for name, value in baselines.items()}}
    summary = result.summary(
        warnings=warnings,
        task=", ".join(f"{name} ({run.listed.kind})" for name, run in runs.items()),
        dataset=", ".join(source_name(run.listed.train_file) for run in runs.values()),
        max_length=max(run.listed.arguments.max_length for run in runs.values()),
        task_max_lengths={name: run.listed.arguments.max_length for name, run in runs.items()},
        task_columns={name: run.listed.arguments.saved_columns() for name, run in runs.items()},
    )
    output = result.arguments.output_dir
    summary.save(output)

    width = max(16, *(len(name) + 2 for name in runs))
    print(f"{'task':<{width}}{'metric':<24}{'model':>10}{'baseline':>10}{'TF-IDF':>10}  range")
    for name, run in runs.items():
        for index, (metric, baseline) in enumerate(run.baseline.items()):
            value, scale = metrics[f"eval_{name}_{metric}"], metric_range(metric, run.task.is_percentage)
            learned_value = f"{run.learned_baseline[metric]:>10.4f}" if run.learned_baseline else " " * 10
            columns = f"{value:>10.4f}{baseline:>10.4f}{learned_value}  {scale}"
            print(f"{name if index == 0 else '':<{width}}{metric:<24}{columns}")
    print(f"{'mean':<{width}}{'main metrics':<24}{metrics[MEAN]:>10.4f}{mean_baseline:>10.4f}{'':>10}  0 to 1")
    print(f"model, tokenizer, log and summary saved in {output}")
    summary.print_warnings()
    name, run = next(iter(runs.items()))
    files = ("--train_file", "FILE", "--validation_file", "FILE", "--output_dir", "DIRECTORY")
    again = ("finetune", run.listed.kind, "--model", output, "--task_name", name, *files)
    print(format_next_commands(again, ("push", "--model", output, "--repo_id", "ORGANIZATION/NAME")))
