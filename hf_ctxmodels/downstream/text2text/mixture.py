"""Mixtures of tasks as text: their files, features, evaluation, and mixing rates."""

import json
import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data import mixing_rates
from hf_ctxmodels.data.files import describe_content
from hf_ctxmodels.data.table_files import parse_number
from hf_ctxmodels.downstream.finetuning.task_evaluation import BestModel, SeveralTasksEvaluation, TaskEvaluation
from hf_ctxmodels.downstream.tasks import Encoded, TaskArguments
from hf_ctxmodels.downstream.tasks.base import Collator, Feature
from hf_ctxmodels.downstream.text2text.metrics import PERCENTAGES
from hf_ctxmodels.downstream.text2text.text_task import TextTask
from hf_ctxmodels.downstream.text2text.text_to_text import RankingEvaluation, TextToText, text_to_text_class

_VALIDATION_SEED = 0
_PREVIEW_WIDTH = 300  # characters of a text


@dataclass
class MixtureArguments:
    """Tasks and mixing."""

    tasks_folder: str | None = flag(None, "Base directory of relative paths of the tasks' files.")
    only: list[str] = flag((), "Train only these tasks of the file.")
    mixing: Literal["examples", "equal"] = flag(
        "examples", "Sample a task in proportion to its number of examples, or all tasks equally."
    )
    mixing_limit: float | None = flag(None, "Count at most this number of examples of a task.")
    mixing_temperature: float = flag(1.0, "Temperature T: rates are raised to 1/T; 1 is proportional.")
    mixing_scale: list[str] = flag((), "Multiply the number of examples of a task, TASK=FACTOR: rte=0.5.")
    prediction: Literal["generate", "rank"] = flag(
        "generate", "Predict by generation, or, for tasks with label strings, by the likelihood of each of them."
    )
    validation_examples: int | None = flag(None, "Evaluate on a fixed subset of N examples of each task.")

    def __post_init__(self) -> None:
        check_choice(("examples", "equal"), mixing=self.mixing)
        check_choice(("generate", "rank"), prediction=self.prediction)
        check_range(self, "validation_examples", at_least=1)
        check_range(self, "mixing_limit", above=0)

    def rates(self, sizes: Mapping[str, float], unlimited: Collection[str] = ()) -> list[float]:
        """The probability of each member of the mixture; see `mixing_rates`.

        Args:
            sizes: Name of a member -> its number of examples.
            unlimited: Members whose size may exceed `mixing_limit`.

        Raises:
            CtxError: A factor is not positive or its member unknown, or the temperature or limit is out of range.
        """
        scaled = dict(sizes)
        for entry in self.mixing_scale:
            name, _, text = entry.partition("=")
            factor = parse_number(text)
            if name not in sizes or factor is None or factor <= 0:
                raise CtxError(
                    f"Expected TASK=FACTOR, got {entry!r}.",
                    location="--mixing_scale",
                    hint=f"write a number above 0 for one of {', '.join(sizes)}.",
                )
            scaled[name] = sizes[name] * factor
        if self.mixing == "equal":
            if self.mixing_temperature != 1 or self.mixing_limit is not None or self.mixing_scale:
                raise CtxError(
                    "Equal mixing has no temperature, limit or factors.",
                    location="--mixing equal",
                    hint="remove these flags, or use --mixing examples.",
                )
            return mixing_rates(list(scaled.values()), temperature=math.inf).tolist()
        if self.mixing_limit is not None:
            limit = self.mixing_limit
            scaled = {name: size if name in unlimited else min(size, limit) for name, size in scaled.items()}
        return mixing_rates(list(scaled.values()), temperature=self.mixing_temperature).tolist()


def describe_rates(sizes: Mapping[str, float], rates: Sequence[float]) -> str:
    """The members of a mixture, with their numbers of examples and rates: `text 1,000 (80.0%), rte 250 (20.0%)`."""
    members = zip(sizes.items(), rates, strict=True)
    return ", ".join(f"{name} {size:,.0f} ({rate:.1%})" for (name, size), rate in members)


def summarize_rates(sizes: Mapping[str, float], rates: Sequence[float]) -> dict[str, float]:
    """The rates of the members as `TrainingSummary.rates`, named `mixing_<member>`."""
    return {f"mixing_{name}": rate for name, rate in zip(sizes, rates, strict=True)}


def read_text_tasks(names: Sequence[str], folder: str | None, location: str = "--tasks") -> dict[str, TextTask]:
    """The tasks of several files and names, see `TextTask.from_yaml`; raises CtxError if two have the same name."""
    text_tasks: dict[str, TextTask] = {}
    for name in names:
        tasks = TextTask.from_yaml(name, folder)
        if repeated := sorted(tasks.keys() & text_tasks):
            raise CtxError(f"The task {repeated[0]} is named twice.", location=location, hint="name each task once.")
        text_tasks |= tasks
    return text_tasks


class TextTaskRun:
    """One task of a mixture, which is trained, evaluated, or both.

    Attributes:
        task: The task, after `configure`.
        training, validation: The examples of its files; empty without a file.
        baseline: Metrics of `TextToText.baseline`, the main metric first; after `encode`, if there are validation
            examples.
    """

    training_features: list[Feature]
    encoded: Encoded
    baseline: dict[str, float]

    def __init__(self, task: TextToText) -> None:
        self.task = task
        files = task.text_task.files
        if not files.keys() & {"train", "validation"}:
            raise CtxError(
                f"The task {task.text_task.name} has neither a train nor a validation file.",
                location=task.text_task.location,
                hint="write `file: {train: FILE, validation: FILE}`.",
            )
        self.training, self.validation = (
            task.read_file(split) if split in files else [] for split in ("train", "validation")
        )

    def select_validation(self, size: int | None) -> None:
        """Select a fixed random subset of at most `size` validation examples; groups are not divided, and at least one
        group is selected."""
        if size is None or size >= len(self.validation):
            return
        rng = random.Random(_VALIDATION_SEED)
        if self.task.text_task.group is None:
            self.validation = rng.sample(self.validation, size)
            return
        groups = defaultdict(list)
        for pair in self.validation:
            groups[pair.example.group].append(pair)
        selected: list[Any] = []
        for group in rng.sample(list(groups.values()), len(groups)):
            if selected and len(selected) + len(group) > size:
                break
            selected += group
        self.validation = selected

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Encode training and validation examples, and compute the baseline."""
        if self.training:
            self.training_features = self.task.encode(self.training, tokenizer).features
        if self.validation:
            self.encoded = self.task.encode(self.validation, tokenizer)
            predictions = self.task.baseline(self.training or self.validation, self.validation)
            self.baseline = self.task.score(self.validation, predictions)

    def target_warning(self) -> str | None:
        """A warning if encoding and decoding the targets of free text reduces the main metric; call after `encode`."""
        if self.task.text_task.metric_kind != "text" or not self.validation:
            return None
        name, maximum = self.main_metric
        score = self.task.decoded_target_scores(self.validation)[name]
        if score > 0.999 * maximum:
            return None
        return f"{name} of the targets is {score:.4f} of {maximum:g} after the tokenizer encodes and decodes them"

    @property
    def main_metric(self) -> tuple[str, float]:
        """The main metric and its maximum; after `encode`, if there are validation examples."""
        is_percentage = self.task.text_task.metrics[0] in PERCENTAGES
        return next(iter(self.baseline)), 100.0 if is_percentage else 1.0

    def make_evaluation(self, collate: Collator, batch_size: int, prediction: str) -> TaskEvaluation:
        """The evaluation on the validation examples; tasks without label strings are always generated."""
        can_rank = all(pair.example.choices for pair in self.validation)
        evaluation_class = RankingEvaluation if prediction == "rank" and can_rank else TaskEvaluation
        return evaluation_class(self.task, self.validation, self.encoded, collate, batch_size)

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal when the run is resumed; files are compared by content."""
        entry = {
            name: value for name, value in asdict(self.task.text_task).items() if name not in ("files", "location")
        }
        files = {split: list(map(describe_content, names)) for split, names in self.task.text_task.files.items()}
        return json.loads(json.dumps({**entry, "files": files}))

    @property
    def train_file(self) -> str:
        """The name of the training file."""
        return Path(self.task.text_task.files["train"][0]).name


class TaskMixture:
    """The tasks of a mixture, for one model.

    Args:
        names: YAML files of tasks, and names of packaged files and tasks.
        config, tokenizer: Configuration and tokenizer of the model; special tokens may be added to them.
        location: The flag that names the file, for errors.
    """

    def __init__(
        self,
        names: Sequence[str],
        arguments: MixtureArguments,
        task_arguments: TaskArguments,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        location: str = "--tasks",
    ) -> None:
        text_tasks = read_text_tasks(names, arguments.tasks_folder, location)
        if unknown := [name for name in arguments.only if name not in text_tasks]:
            raise CtxError(
                f"There is no task {unknown[0]} among the tasks.",
                location=f"{location} {' '.join(names)}",
                hint=f"use {', '.join(text_tasks)}.",
            )
        task_class = text_to_text_class(config)
        self.arguments = arguments
        self.runs = {
            name: TextTaskRun(task_class(text_task, task_arguments))
            for name, text_task in text_tasks.items()
            if not arguments.only or name in arguments.only
        }
        for split, runs in (("train", self.trained), ("validation", self.evaluated)):
            if not runs:
                raise CtxError(
                    f"No task has a {split} file: {', '.join(self.runs)}.",
                    location=f"{location} {' '.join(names)}",
                    hint="add a task with one.",
                )
        for run in self.runs.values():
            run.task.set_token_fields(config, tokenizer)
            run.task.configure(config, run.training, run.validation)
            run.select_validation(arguments.validation_examples)

    @property
    def trained(self) -> dict[str, TextTaskRun]:
        """The tasks with training examples."""
        return {name: run for name, run in self.runs.items() if run.training}

    @property
    def evaluated(self) -> dict[str, TextTaskRun]:
        """The tasks with validation examples."""
        return {name: run for name, run in self.runs.items() if run.validation}

    @property
    def tasks(self) -> list[TextToText]:
        """The tasks, for the same model."""
        return [run.task for run in self.runs.values()]

    def training_collator(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Collator:
        """The collator of training batches, before `encode`; see `Task.training_collator`."""
        first, *next_tasks = self.tasks
        for task in next_tasks:
            task.training_collator(config, tokenizer, seed, verbose=False)
        return first.training_collator(config, tokenizer, seed)

    def preview(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The first three examples of each task, of the training file if there is one, with their numbers of tokens."""
        lines = []
        for name, run in self.runs.items():
            sizes = f"{len(run.training):,} training, {len(run.validation):,} validation examples"
            lines.append(f"{name}: {sizes}, metrics {', '.join(run.task.text_task.metrics)}")
            for pair in (run.training or run.validation)[:3]:
                lengths = len(tokenizer(pair.source).input_ids), len(tokenizer(text_target=pair.target).input_ids)
                for role, text, length in zip(("input", "target"), (pair.source, pair.target), lengths, strict=True):
                    lines.append(f"  {role} ({length} tokens): {shorten(text, _PREVIEW_WIDTH)}")
        return "\n".join(lines)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Encode the examples of all tasks."""
        for run in self.runs.values():
            run.encode(tokenizer)

    def evaluation(
        self, tokenizer: PreTrainedTokenizerBase, batch_size: int, best_models: Sequence[BestModel] = ()
    ) -> SeveralTasksEvaluation:
        """The evaluation of all tasks."""
        collate = self.tasks[0].collator(tokenizer)
        prediction = self.arguments.prediction
        evaluations = {
            name: run.make_evaluation(collate, batch_size, prediction) for name, run in self.evaluated.items()
        }
        return SeveralTasksEvaluation(evaluations, self.main_metrics, best_models)

    @property
    def main_metrics(self) -> Mapping[str, tuple[str, float]]:
        """Task with validation examples -> the name of its main metric and its maximum."""
        return {name: run.main_metric for name, run in self.evaluated.items()}

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that must be equal when the run is resumed."""
        arguments = self.arguments
        return {
            "tasks": [run.identity for run in self.runs.values()],
            "mixing": [arguments.mixing, arguments.mixing_limit, arguments.mixing_temperature, *arguments.mixing_scale],
        }
