"""The record of a training run, a JSON file in the model's directory."""

import dataclasses
import json
import shlex
import sys
import typing
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import check_json_type, read_json
from hf_ctxmodels.core.output_files import write_text_file

SUMMARY_FILE = "training_summary.json"
_RATE_HINT = "a higher --learning_rate (--learning_rate auto measures one), "
_NEW_SUMMARY = "train the model again to write a new one."
_PACKAGES = ("hf_ctxmodels", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def _installed_versions() -> dict[str, str]:
    """Versions of Python and of installed packages that influence results."""
    versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


@dataclass(kw_only=True)
class TrainingSummary:
    """The record of a run, the source of model cards.

    Attributes:
        task: "pretraining", or the fine-tuning task ("sequence-classification", ...).
        model_class, model_type: For example "CtxBertForPreTraining" and "ctx-bert".
        dataset: A Hub id, a file name, or "demo".
        parameters: Number of parameters, tied weights once.
        global_batch_size: Examples per optimizer step, over all processes and accumulated micro-batches.
        max_length: Longest input in tokens; of a multi-task model the longest of all tasks.
        task_max_lengths: Task of a multi-task model -> its longest input in tokens.
        columns: Names of the columns of the training file and the delimiter of labels, by the flags of `hf-ctxmodels
            finetune`.
        task_columns: Task of a multi-task model -> `columns` of its training file.
        tokens: Non-padding input tokens in training.
        tokens_per_second: Training speed without evaluation and saving; None if no step was trained.
        rates: Realized rates of the objective (masked share, ...), and the rates at which the members of a mixture are
            sampled ("mixing_<name>").
        metrics: The last evaluation ("eval_<name>"), baselines by frequencies ("baseline_<name>"), the TF-IDF
            baseline of tasks on texts ("baseline_<name>_tfidf"), and upper bounds ("upper_bound_<name>") if the
            tokenizer cannot reproduce the targets.
        has_measured_rate: Whether the learning rate was found by a range test (`--learning_rate auto`).
        layer_shares: Learned share of each layer, by the name of the layer mix, see `ScalarMix`.
        warnings: Signs that the model has not learned, one sentence each.
        curve: The records of `training_log.jsonl`.
    """

    task: str
    model_class: str
    model_type: str
    dataset: str
    seed: int
    parameters: int
    steps: int
    global_batch_size: int
    max_length: int | None = None
    task_max_lengths: dict[str, int] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    task_columns: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: int = 0
    tokens_per_second: float | None = None
    objective: str | None = None
    objective_options: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    has_measured_rate: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    layer_shares: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=_installed_versions)
    command: str = field(default_factory=lambda: shlex.join([*Path(sys.argv[0]).name.split(), *sys.argv[1:]]))

    @property
    def baselines(self) -> dict[str, float]:
        """Metric -> baseline."""
        names = [name.removeprefix("baseline_") for name in self.metrics if name.startswith("baseline_")]
        return {name: self.metrics[f"baseline_{name}"] for name in names}

    def print_warnings(self) -> None:
        """Print a line with the warnings, if any, and a hint."""
        if self.warnings:
            rate_hint = "" if self.has_measured_rate else _RATE_HINT
            shorter = "shorter sequences (--max_length), " if self.task == "pretraining" else ""
            hint = f"hint: try {rate_hint}more steps, {shorter}or a pretrained --model."
            print(f"warning: {'; '.join(self.warnings)}; {hint}")

    def save(self, directory: str | Path) -> Path:
        """Write `training_summary.json` into `directory` and return its path."""
        path = Path(directory) / SUMMARY_FILE
        write_text_file(path, self.as_json())
        return path

    def as_json(self) -> str:
        """The summary as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read `training_summary.json` of `directory`; raises CtxError if it is missing or not a training summary."""
        path = Path(directory) / SUMMARY_FILE
        if not path.exists():
            raise CtxError(
                f"The model has no {SUMMARY_FILE}.",
                location=str(directory),
                hint="train it with `hf-ctxmodels pretrain` or `finetune`, which write one.",
            )
        return cls.from_json(read_json(path, hint=_NEW_SUMMARY), str(path))

    @classmethod
    def from_json(cls, fields: Any, location: str) -> Self:
        """The summary of a JSON object; raises CtxError if it is not a training summary."""
        check_json_type(fields, typing.get_type_hints(cls), location=location, content="a training summary")
        with wrap_errors("Not a training summary", location=location, hint=_NEW_SUMMARY):
            return cls(**fields)
