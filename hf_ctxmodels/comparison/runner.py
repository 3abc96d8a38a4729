"""Runs the unfinished parts of a plan: tokenizers, sizes, pretraining, measures and baselines.

The output file of a part is written atomically, and its name has a digest of the part's settings and data. A part
whose file exists is skipped. Several processes can share a directory: the process that executes a run locks it.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

import hf_ctxmodels
from hf_ctxmodels.comparison.measures import COST, DataFile, Evaluation, Measure, MeasuredCheckpoint, Values
from hf_ctxmodels.comparison.plan import Plan, Run, Variant, digest, located_errors
from hf_ctxmodels.comparison.processes import TimeIsUpError, device_flags, failure_line, package_command, run_command
from hf_ctxmodels.comparison.sizing import RunSize, checkpoint_steps, measure_size
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.locks import try_lock, wait_for_lock
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.data.document_sources import DataArguments
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.files import describe_content
from hf_ctxmodels.training.checkpoint_files import LOCK_FILE, checkpoint_path, list_checkpoints
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary

MINUTE, _SHORT_TIMING = 60.0, 3.0  # seconds
_WAIT_SECONDS = 2.0
_COST_FILE = "cost.json"


@contextmanager
def collected_errors(errors: dict[str, CtxError], name: str) -> Iterator[None]:
    """Print the error of a run or a variant of this name, and add it to `errors` instead of raising it."""
    try:
        with located_errors(name):
            yield
    except CtxError as error:
        print_status(f"{name} failed: {failure_line(error)}")
        errors[name] = error


class Record(NamedTuple):
    """A line of `results.jsonl` or `costs.jsonl`.

    Attributes:
        variant: Name of a variant, or of a baseline.
        family: Its family; None for a baseline.
        budget, seed: Budget and seed of the run; None for a baseline.
        step, words, flops: Position of the checkpoint; None for a baseline, and FLOPs that are not counted.
        measure, metric: Name of the measure, or `COST`, and of one of its metrics.
        digest: Digest of the recipe, the text and the tokenizer.
    """

    variant: str
    family: str | None
    budget: str | None
    seed: int | None
    step: int | None
    words: int | None
    flops: float | None
    measure: str
    metric: str
    value: float
    digest: str

    def line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(self._asdict()) + "\n"


@dataclass
class Comparison:
    """A plan in an output directory.

    Args:
        folder: Output directory.
        only: Names of the variants to run; None for all.
        seeds: Seeds to run; None for all.
        deadline: Time (`time.monotonic`) after which no part starts and training is interrupted; None for no limit.
        timing_seconds: Seconds for which the steps of each variant are timed; 0 for a minute if the budget has
            minutes, and a few seconds otherwise.
        device: Device of pretraining and measures; None for the default, see `select_device`.
    """

    plan: Plan
    folder: Path
    only: list[str] | None = None
    seeds: list[int] | None = None
    deadline: float | None = None
    timing_seconds: float = 0.0
    device: str | None = None

    def __post_init__(self) -> None:
        if not self.timing_seconds:
            self.timing_seconds = MINUTE if "minutes" in self.plan.budget else _SHORT_TIMING
        _check_selection("--only", "variant", self.only or (), [variant.name for variant in self.plan.variants])
        _check_selection("--seeds", "seed", self.seeds or (), self.plan.seeds)

    @cached_property
    def documents(self) -> tuple[Documents, Documents]:
        """The training documents and the held-out documents."""
        training, held_out = DataArguments(
            dataset=self.plan.dataset, validation_fraction=self.plan.validation_fraction
        ).load()
        assert held_out is not None
        return training, held_out

    def selected_runs(self) -> list[Run]:
        """The runs of the selected variants and seeds."""
        return [
            run
            for run in self.plan.runs()
            if (self.only is None or run.variant.name in self.only) and (self.seeds is None or run.seed in self.seeds)
        ]

    def run(self, on_finished_run: Callable[[], object]) -> list[CtxError]:
        """Finish all runs, and wait for the runs of other processes.

        Args:
            on_finished_run: Called after each finished run, to write tables.

        Returns:
            The errors of runs that failed.

        Raises:
            TimeIsUpError: The deadline has passed.
        """
        pending, errors = self.selected_runs(), dict[str, CtxError]()
        number, total = 0, len(pending)
        while pending:
            waiting = []
            for run in pending:
                with try_lock(self.folder / "locks" / f"{run.name.replace('/', '-')}.lock") as is_locked:
                    if not is_locked or _is_locked(self.run_folder(run) / LOCK_FILE):
                        waiting.append(run)
                        continue
                    number += 1
                    with collected_errors(errors, run.name):
                        if self._finish(run, f"[{number}/{total}] {run.name}"):
                            on_finished_run()
            pending = waiting
            if pending:
                self._check_time()
                time.sleep(_WAIT_SECONDS)
        return [*errors.values()]

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeIsUpError

    # folders and files

    def run_folder(self, run: Run) -> Path:
        """Output directory of pretraining."""
        return self.folder / "runs" / run.name

    def tokenizer_folder(self, variant: Variant) -> Path:
        """Directory of the tokenizer that all variants of a kind share."""
        name = f"{variant.tokenizer_kind}-{digest(self.plan.tokenizer_identity(variant))}"
        return self.folder / "tokenizers" / name

    def size_file(self, variant: Variant) -> Path:
        """File of the size of the runs of a variant."""
        identity = {
            **self.plan.recipe_identity(variant),
            "tokenizer": self.plan.tokenizer_identity(variant),
            "timing_seconds": self.timing_seconds,
        }
        return self.folder / "sizes" / f"{variant.name}-{digest(identity)}.json"

    def measure_file(self, run: Run, measure: Measure, step: int) -> Path:
        """File of the metrics of a checkpoint."""
        return self.run_folder(run) / "measures" / f"{measure.name}-{self._measure_digests[measure.name]}-{step}.json"

    def baseline_file(self, measure: Measure, variant: Variant) -> Path:
        """File of the baselines of a measure."""
        suffix = f"-{self.tokenizer_folder(variant).name}" if measure.depends_on_tokenizer else ""
        return self.folder / "baselines" / f"{measure.name}-{self._measure_digests[measure.name]}{suffix}.json"

    @cached_property
    def _measure_digests(self) -> dict[str, str]:
        return {measure.name: measure_digest(measure) for measure in self.plan.measures}

    # parts

    def tokenizer(self, variant: Variant) -> Path:
        """Train the tokenizer of a variant, unless there is one."""
        folder = self.tokenizer_folder(variant)
        with wait_for_lock(self.folder / "locks" / f"tokenizer-{folder.name}.lock"):
            if not (folder / "tokenizer.json").exists():
                self._check_time()
                print_status(f"training the tokenizer of {variant.tokenizer_kind}")
                flags: list[object] = ["--family", variant.tokenizer_kind, "--dataset", *self.plan.dataset]
                flags += ["--vocab_size", self.plan.tokenizer_size(variant)]
                flags += ["--validation_fraction", self.plan.validation_fraction]
                if self.plan.tokenizer_bytes is not None:
                    flags += ["--sample_bytes", self.plan.tokenizer_bytes]
                temporary = folder.with_name(f"{folder.name}.writing")
                command = package_command("data", "tokenizer", *flags, "--overwrite", "--output_dir", temporary)
                run_command(command, self.folder / "logs" / f"tokenizer-{folder.name}.log")
                temporary.rename(folder)
        return folder

    def size(self, variant: Variant) -> RunSize:
        """Measure the size of the runs of a variant, unless it is known."""
        file, tokenizer = self.size_file(variant), self.tokenizer(variant)
        with wait_for_lock(self.folder / "locks" / f"size-{file.stem}.lock"):
            if not file.exists():
                self._check_time()
                print_status(f"measuring the steps of {variant.name} for {self.timing_seconds:g} seconds")
                measure_size(self.plan, variant, tokenizer, self.timing_seconds, self.device).save(file)
        return RunSize.load(file)

    def _finish(self, run: Run, description: str) -> bool:
        """Execute the unfinished parts of a run; returns whether there were any."""
        size = self.size(run.variant)
        steps = self.checkpoint_steps(run, size)
        is_new = False
        if not (self.run_folder(run) / SUMMARY_FILE).exists():
            self._check_time()
            print_status(f"{description}: {steps[-1]:,} steps of pretraining")
            self._pretrain(run, size, steps)
            is_new = True
        # also after the end of a training process whose comparison was killed: only weights are needed
        for checkpoint in list_checkpoints(self.run_folder(run)):
            (checkpoint / "optimizer.safetensors").unlink(missing_ok=True)
        for measure in self.plan.measures:
            for step in measure.select_steps(steps):
                file = self.measure_file(run, measure, step)
                if not file.exists():
                    self._check_time()
                    print_status(f"{description}: {measure.name} at step {step:,}")
                    self._measure(run, measure, step, file)
                    is_new = True
            baselines = self.baseline_file(measure, run.variant)
            if not baselines.exists():
                self._check_time()
                values = measure.baselines(self.tokenizer_folder(run.variant), self.documents[0])
                write_text_file(baselines, json.dumps(values, indent=2) + "\n")
                is_new = True
        return is_new

    def total_steps(self, run: Run, size: RunSize) -> int:
        """Steps of a run: as recorded if it is finished, else from its budget."""
        if (self.run_folder(run) / SUMMARY_FILE).exists():
            return TrainingSummary.load(self.run_folder(run)).steps
        return size.steps(run.budget, self.plan.budget[run.budget])

    def checkpoint_steps(self, run: Run, size: RunSize) -> list[int]:
        """Steps of the evaluated checkpoints of a run."""
        return checkpoint_steps(self.total_steps(run, size), self.plan.checkpoints)

    def _pretrain(self, run: Run, size: RunSize, steps: list[int]) -> None:
        folder, plan = self.run_folder(run), self.plan
        recipe = {
            "family": run.variant.family,
            **run.variant.recipe,
            "dataset": plan.dataset,
            "validation_fraction": str(plan.validation_fraction),
            "tokenizer": str(self.tokenizer_folder(run.variant)),
            "seed": str(run.seed),
            "max_steps": str(steps[-1]),
            "save_at": list(map(str, steps)),
            "save_steps": str(size.save_steps),
            "save_total_limit": "1",
            "logging_steps": str(max(1, steps[-1] // 32)),
        }
        recipe_file = folder / "recipe.yaml"
        header = f"# hf_ctxmodels {hf_ctxmodels.__version__}, digest {run.digest}\n"
        write_text_file(recipe_file, header + yaml.safe_dump(recipe, sort_keys=False))
        command = ["pretrain", "--recipe", recipe_file, "--output_dir", folder, "--resume", *device_flags(self.device)]
        log = self.folder / "logs" / f"{run.name.replace('/', '-')}.log"
        cost = run_command(package_command(*command, accelerate=plan.accelerate), log, self.deadline)
        write_text_file(folder / _COST_FILE, json.dumps(cost._asdict()) + "\n")

    def _measure(self, run: Run, measure: Measure, step: int, file: Path) -> None:
        folder = self.run_folder(run)
        total = TrainingSummary.load(folder).steps
        # the final model has averaged weights if the optimizer averages
        path = folder if step == total else checkpoint_path(folder, step)
        start = time.monotonic()
        result = measure.evaluate(MeasuredCheckpoint(path, file.parent, run.seed, self.documents[1], self.device))
        content = (result or Evaluation({}))._asdict() | {"seconds": time.monotonic() - start}
        write_text_file(file, json.dumps(content, indent=2) + "\n")
        names = ", ".join(_non_finite(content["values"]))
        print_status(f"warning: {run.name}: {measure.name}, {names} is not finite at step {step:,}", bool(names))

    # results

    def _finished_runs(self) -> Iterator[tuple[Run, RunSize]]:
        """The runs whose pretraining is finished."""
        for run in self.plan.runs():
            size_file = self.size_file(run.variant)
            if size_file.exists() and (self.run_folder(run) / SUMMARY_FILE).exists():
                yield run, RunSize.load(size_file)

    def records(self) -> Iterator[Record]:
        """The metrics of all finished parts; they are the same if the plan is run again."""
        baseline_files: set[Path] = set()
        for run, size in self._finished_runs():
            for step in self.checkpoint_steps(run, size):
                record = self._record(run, size, step)
                costs = {"parameters": size.parameters, "words": record.words, "flops": record.flops}
                yield from _metric_records(record, COST, costs)
                for measure in self.plan.measures:
                    file = self.measure_file(run, measure, step)
                    yield from _metric_records(record, measure.name, read_json(file)["values"] if file.exists() else {})
            for measure in self.plan.measures:
                file = self.baseline_file(measure, run.variant)
                if file.exists() and file not in baseline_files:
                    baseline_files.add(file)
                    yield from _baseline_records(file, measure, run.variant)

    def cost_records(self) -> Iterator[Record]:
        """Durations and memory, which vary if the plan is run again."""
        for run, size in self._finished_runs():
            folder = self.run_folder(run)
            curve = TrainingSummary.load(folder).curve
            # missing if the comparison was killed during training
            peak = read_json(folder / _COST_FILE)["peak_bytes"] if (folder / _COST_FILE).exists() else None
            for step in self.checkpoint_steps(run, size):
                costs = {"seconds": training_seconds(curve, step), "peak_bytes": peak}
                yield from _metric_records(self._record(run, size, step), COST, costs)

    def _record(self, run: Run, size: RunSize, step: int) -> Record:
        """A record of a checkpoint without a metric."""
        return Record(
            run.variant.name,
            run.variant.family,
            run.budget,
            run.seed,
            step,
            words=round(step * size.words_per_step),
            flops=None if size.flops_per_step is None else step * size.flops_per_step,
            measure="",
            metric="",
            value=0.0,
            digest=run.digest,
        )

    def methods(self, measure: Measure) -> dict[str, list[str]]:
        """Method of a measure, such as the kind of likelihood -> names of the variants that it was used for."""
        methods: dict[str, list[str]] = {}
        for run in self.plan.runs():
            for file in self._measure_files(run, measure):
                method, name = read_json(file)["method"], run.variant.name
                if method and name not in methods.setdefault(method, []):
                    methods[method].append(name)
        return methods

    def metric_names(self, measure: Measure) -> list[str]:
        """The metrics of a measure in its order, finite or not."""
        files = (file for run in self.plan.runs() for file in self._measure_files(run, measure))
        return list(dict.fromkeys(name for file in files for name in read_json(file)["values"]))

    def non_finite_values(self, budget: str) -> list[str]:
        """The metrics of the runs of a budget that are infinite or not a number, and are left out of the records."""
        return [
            f"{measure.name}, {metric} of {run.variant.name} (seed {run.seed}, step {file.stem.rpartition('-')[2]})"
            for run in self.plan.runs()
            if run.budget == budget
            for measure in self.plan.measures
            for file in self._measure_files(run, measure)
            for metric in _non_finite(read_json(file)["values"])
        ]

    def _measure_files(self, run: Run, measure: Measure) -> list[Path]:
        """The files of the metrics of all checkpoints of a run, by step."""
        pattern = f"{measure.name}-{self._measure_digests[measure.name]}-*.json"
        files = (self.run_folder(run) / "measures").glob(pattern)
        return sorted(files, key=lambda file: int(file.stem.rpartition("-")[2]))


def _check_selection(flag: str, kind: str, selection: Sequence[object], choices: Sequence[object]) -> None:
    if unknown := [str(value) for value in selection if value not in choices]:
        hint = f"use some of: {', '.join(map(str, choices))}."
        raise CtxError(f"The plan has no {kind} {', '.join(unknown)}.", location=flag, hint=hint)


def _is_locked(file: Path) -> bool:
    """Whether the training process of a killed comparison is still running."""
    if not file.exists():
        return False
    with try_lock(file) as is_free:
        return not is_free


def _metric_records(record: Record, measure: str, values: Mapping[str, float | None]) -> Iterator[Record]:
    """A record for each finite metric of a measure."""
    for metric, value in values.items():
        if value is not None and np.isfinite(value):
            yield record._replace(measure=measure, metric=metric, value=value)


def _baseline_records(file: Path, measure: Measure, variant: Variant) -> Iterator[Record]:
    """The records of a file of baselines."""
    suffix = f" ({variant.tokenizer_kind})" if measure.depends_on_tokenizer else ""
    for name, values in read_json(file).items():
        for metric, value in values.items():
            yield Record(name + suffix, None, None, None, None, None, None, measure.name, metric, value, file.stem)


def _non_finite(values: Values) -> list[str]:
    """Names of the metrics that are infinite or not a number."""
    return [name for name, value in values.items() if not np.isfinite(value)]


def measure_digest(measure: Measure) -> str:
    """Digest of the options that determine the values of a measure, and of the content of its files."""
    values = asdict(measure)
    del values["name"], values["checkpoints"]
    for option in fields(measure):
        if option.type in (DataFile, list[DataFile]):
            files = getattr(measure, option.name)
            values[option.name] = [describe_content(file) for file in ([files] if isinstance(files, str) else files)]
    return digest([measure.kind, values])


def training_seconds(curve: list[dict[str, float]], step: int) -> float:
    """Seconds of training until a step, without evaluation and saving, from the log of a run."""
    steps, seconds, tokens = [0.0], [0.0], 0.0
    for record in curve:
        if "tokens_per_second" in record:
            steps.append(record["step"])
            seconds.append(seconds[-1] + (record["tokens"] - tokens) / record["tokens_per_second"])
            tokens = record["tokens"]
    return float(np.interp(step, steps, seconds))
