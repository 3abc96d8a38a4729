"""What a training run was and what came of it, as one JSON file next to the model."""

import dataclasses
import json
import shlex
import sys
import typing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from hf_ctxmodels.core.errors import CtxError, boundary
from hf_ctxmodels.core.json_text import read_json, require_fit
from hf_ctxmodels.core.outputs import writing

SUMMARY_FILE = "training_summary.json"
_PACKAGES = ("hf_ctxmodels", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers; a package not installed is left out."""
    versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def command_line() -> str:
    """The command that started this process, quoted for a shell."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


@dataclass(kw_only=True)
class TrainingSummary:
    """The record of one run; model cards are filled from it.

    Attributes:
        task: "pretraining", or the fine-tuning task ("sequence-classification", ...).
        model_class: class of the trained model, e.g. "CtxBertForPreTraining".
        model_type: its configuration's `model_type`, e.g. "ctx-bert".
        dataset: what was trained on (a Hub id, a file name, "demo").
        seed: seed of initialisation, data order, masks and dropout.
        parameters: number of distinct parameters (tied weights once).
        steps: optimizer steps.
        global_batch_size: examples per optimizer step, over all processes and accumulated micro-batches.
        max_length: longest input in tokens, None where it has no meaning.
        tokens: non-padding input tokens trained on.
        tokens_per_second: of training alone, without evaluation and saving, over all processes.
        objective: registry name of the pretraining objective, None when fine-tuning.
        objective_options: its options, as given.
        rates: rates the objective realised (masked share, ...).
        hyperparameters: arguments of the training loop.
        metrics: the last evaluation, "eval_<name>", and that of the frequency baseline, "baseline_<name>".
        curve: one record per logging interval and evaluation: "step", "loss", ... as in `training_log.jsonl`.
        versions: of Python and the packages that matter.
        command: the command line.
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
    tokens: int = 0
    tokens_per_second: float | None = None
    objective: str | None = None
    objective_options: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=installed_versions)
    command: str = field(default_factory=command_line)

    @property
    def baselines(self) -> dict[str, float]:
        """Metric -> that of the frequency baseline."""
        prefix = "baseline_"
        return {name.removeprefix(prefix): value for name, value in self.metrics.items() if name.startswith(prefix)}

    def save(self, directory: str | Path) -> Path:
        """Write `training_summary.json` into `directory` and return its path."""
        path = Path(directory) / SUMMARY_FILE
        with writing(path):
            path.write_text(self.as_json(), encoding="utf-8")
        return path

    def as_json(self) -> str:
        """The content of `training_summary.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read `training_summary.json` of `directory`.

        Raises:
            CtxError: no such file, or it does not hold a summary.
        """
        path = Path(directory) / SUMMARY_FILE
        if not path.exists():
            raise CtxError(
                f"The model has no {SUMMARY_FILE}.",
                location=str(directory),
                hint="train it with scripts/pretrain.py or scripts/finetune.py, which write one.",
            )
        hint = "train the model again to write a new one."
        fields = read_json(path, hint=hint)
        require_fit(fields, typing.get_type_hints(cls), location=str(path), what="a training summary")
        with boundary("Not a training summary", location=str(path), hint=hint):
            return cls(**fields)
