"""Evaluate language models by prompts without and with examples in the context.

    hf-ctxmodels evaluate prompts --model runs/gpt2 runs/gpt2-small --task sst2 lambada --shots 0 4 16 --seeds 0 1 2 \\
        --tasks_folder data --output_dir runs/prompts

`hf-ctxmodels recipes` lists the packaged tasks. Results equal lm-evaluation-harness for equal prompts. The same
command continues an interrupted evaluation.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.figures import Figure, LineChart
from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.results import AnalysisResult, PartialResults, Table, mean_and_std
from hf_ctxmodels.analysis.word_arguments import short_names
from hf_ctxmodels.architectures.continuations import ContinuationScorer
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.evaluation.prompts.evaluation import (
    LikelihoodScorer,
    MetricValue,
    PseudoLikelihoodScorer,
    UnigramScorer,
    evaluate_prompts,
    majority_accuracy,
)
from hf_ctxmodels.evaluation.prompts.tables import TableRow, format_table
from hf_ctxmodels.evaluation.prompts.tasks import PromptExample, PromptTask, find_tasks
from hf_ctxmodels.evaluation.scoring import language_model_class, likelihood_kind
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer, new_model_without_memory

_NAME = "prompts"
_MAIN_METRICS = ("perplexity", "acc", "f1", "rougeL", "bleu", "exact_match")  # the first one of a task is plotted
_UNIGRAMS, _MAJORITY = "unigrams", "majority"
_MAX_SHOTS = 10**6


@dataclass
class PromptArguments(OutputArguments):
    """Models, tasks and output."""

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of language models, with their tokenizers.")
    task: list[str] = flag(REQUIRED, "Names of packaged tasks, or YAML files.")
    shots: list[int] = flag((0,), "Numbers of examples in the context.")
    seeds: list[int] = flag((0,), "Seeds of the examples in the context.")
    tasks_folder: str | None = flag(None, "Directory that relative paths of the tasks refer to.")
    evaluated_file: str | None = flag(
        None,
        "Evaluate this file or split instead of file.validation; for a single task. Without labels, the predictions "
        "are saved, as with --save_examples, and there is no score.",
    )
    shots_file: str | None = flag(None, "Sample examples from this file instead of file.train; for a single task.")
    max_examples: int | None = flag(None, "Evaluate the first N examples of each task; by default all.")
    shared_shots: bool = flag(
        False,
        "Sample the same examples for all contexts of a seed, which is faster; by default they differ.",
    )
    max_length: int | None = flag(
        None, "Truncate prompts at their beginning to N tokens; by default to the model's positions."
    )
    batch_tokens: int = flag(2048, "Tokens per batch.")
    unigram_text: list[str] = flag((), "Text files for the token frequencies of the unigram baseline.")
    save_examples: bool = flag(False, "Write prompts, log-probabilities and answers of all examples as JSON lines.")

    def __post_init__(self) -> None:
        check_range(self, "max_examples", "max_length", "batch_tokens", at_least=1)
        for name, maximum in (("shots", _MAX_SHOTS), ("seeds", MAX_SEED)):
            numbers = getattr(self, name)
            if not numbers or not all(0 <= number <= maximum for number in numbers):
                raise CtxError(
                    f"Expected numbers from 0 to {maximum}, got {numbers}.",
                    location=f"--{name}",
                    hint="separate the numbers by blanks: 0 1 4.",
                )

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Pairs of number of examples and seed, in ascending order; contexts without examples need one seed."""
        seeds = sorted(set(self.seeds))
        return [(n, seed) for n in sorted(set(self.shots)) for seed in (seeds if n else seeds[:1])]


@dataclass(frozen=True)
class TaskData:
    """A task with its examples.

    Attributes:
        pool: Examples for contexts.
        is_same_file: Whether the pool is the evaluated file.
        is_labeled: Whether the examples for evaluation have labels.
        digest: Of the task and the contents of its examples.
    """

    task: PromptTask
    examples: list[PromptExample]
    pool: list[PromptExample]
    is_same_file: bool
    is_labeled: bool
    digest: str

    @classmethod
    def read(cls, task: PromptTask, arguments: PromptArguments) -> "TaskData":
        """Read the examples for evaluation and those for contexts."""
        evaluated_file = arguments.evaluated_file or "validation"
        is_labeled = task.text.has_labels(evaluated_file)
        if not is_labeled and task.output == "likelihood":
            raise CtxError(
                f"The task {task.name} scores the likelihood of targets, which the file lacks.",
                location=task.paths(evaluated_file)[0],
                hint="use a file with targets.",
            )
        examples = task.read(evaluated_file, labeled=is_labeled)
        pool_file = arguments.shots_file or ("train" if "train" in task.text.files else evaluated_file)
        is_same_file = task.paths(pool_file) == task.paths(evaluated_file)
        has_shots = any(shots for shots, _ in arguments.runs)
        if is_same_file and not is_labeled and has_shots:
            raise CtxError(
                "The file has no labels for the examples in the contexts.",
                location=task.paths(evaluated_file)[0],
                hint="pass --shots_file, add file.train to the task, or use --shots 0.",
            )
        pool = examples
        if pool_file != evaluated_file and (has_shots or is_labeled):
            pool = task.read(pool_file, is_pool=True)
        content = [[example.content for example in group] for group in (examples, pool)]
        settings = replace(task, text=replace(task.text, files={}, location=""))
        digest = hashlib.sha256(repr((settings, content, is_same_file)).encode())
        return cls(task, examples[: arguments.max_examples], pool, is_same_file, is_labeled, digest.hexdigest()[:16])


@dataclass(frozen=True)
class Cell:
    """Metrics of a model, or a baseline, on a task with a number of examples in the context.

    Attributes:
        parameters: Number of parameters; None for baselines.
        truncated: Share of the prompts that were truncated.
        metrics: Name -> value and standard error (of a cell that was read from a file, a list).
    """

    model: str
    parameters: int | None
    task: str
    shots: int
    seed: int
    examples: int
    truncated: float
    metrics: dict[str, MetricValue]


class LoadedModel:
    """A model under evaluation; prompts are truncated at their beginning."""

    def __init__(self, source: str, arguments: PromptArguments, placement: DeviceArguments) -> None:
        self.model, self.tokenizer = load_model_and_tokenizer(source, _language_model_head, require_head=True)
        placement.place(self.model)
        limit, maximum = max_input_length(self.model.config), arguments.max_length
        max_length = maximum if limit is None else limit if maximum is None else min(limit, maximum)
        scorer_class: type[PseudoLikelihoodScorer] | type[ContinuationScorer]
        if not self.model.config.is_encoder_decoder and is_masked(self.model, self.tokenizer):
            scorer_class = PseudoLikelihoodScorer
        else:
            scorer_class = ContinuationScorer
        self.scorer: LikelihoodScorer = scorer_class(
            self.model, self.tokenizer, batch_tokens=arguments.batch_tokens, max_length=max_length
        )


def _language_model_head(config: PreTrainedConfig) -> str:
    """Name of the Auto class of the head that scores or generates text; raises CtxError if the checkpoint has none."""
    if config.is_encoder_decoder and type(config) in AutoModelForSeq2SeqLM._model_mapping:
        names = config.architectures or []
        if names and all(name.endswith("Model") for name in names):
            raise CtxError(
                f"The checkpoint was saved from {', '.join(names)}, which is not a language model.",
                location=config.name_or_path,
                hint="use a language model.",
            )
        return AutoModelForSeq2SeqLM.__name__
    return language_model_class(config)


def is_masked(model: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a language model predicts tokens from both sides; raises CtxError if it is not a language model."""
    return likelihood_kind(model, tokenizer) == "pseudo-log-likelihood"


def main() -> None:
    """Evaluate the models, print a table for each, and save results and figures."""
    arguments, placement = parse_arguments(
        PromptArguments,
        DeviceArguments,
        description=__doc__,
        essential=("model", "task", "output_dir", "shots", "seeds"),
    )
    directory = Path(arguments.output_dir)
    arguments.check_output(_NAME)
    tasks = [task for name in dict.fromkeys(arguments.task) for task in find_tasks(name, arguments.tasks_folder)]
    if (arguments.evaluated_file or arguments.shots_file) and len(tasks) > 1:
        message = f"--evaluated_file and --shots_file are for one task, not {len(tasks)}."
        raise CtxError(message, location="--task", hint="name one task, or set `file` in the tasks.")
    if len({task.name for task in tasks}) < len(tasks):
        raise CtxError("Two tasks have the same name.", location="--task", hint="rename one of them.")
    check_models(arguments.model, tasks)
    data = [TaskData.read(task, arguments) for task in tasks]
    identity = [arguments.max_examples, arguments.max_length, arguments.shared_shots, placement.dtype]
    partial = PartialResults(directory / f"{_NAME}-partial.json", identity)
    cells: list[Cell] = [baseline for entry in data if (baseline := majority_cell(entry))]
    for name, source in zip(short_names(arguments.model), arguments.model):
        cells += evaluate_model(source, name, data, arguments, placement, partial)
    versions = {task.name: task.version for task in tasks}
    cells = [cell for cell in cells if cell.metrics]
    tables = {model: lm_eval_table(cells, model, versions) for model in dict.fromkeys(cell.model for cell in cells)}
    text = "\n\n".join(f"{model}\n\n{table}" for model, table in tables.items())
    print(f"\n{text}\n" if cells else "")
    if unlabeled := [entry.task.name for entry in data if not entry.is_labeled]:
        print(f"No labels, and so no score: {', '.join(unlabeled)}; predictions in {directory / 'examples'}")
    write_text_file(directory / "results.md", f"{text}\n")
    prompt_result(cells, arguments.model, arguments.options()).save(directory)
    partial.file.unlink(missing_ok=True)
    print(f"Results and figures are in {directory}")


def check_models(sources: Sequence[str], tasks: Sequence[PromptTask]) -> None:
    """Check, before weights are loaded, that each checkpoint is a language model that generates text or predicts masked
    tokens if a task needs it; raises CtxError otherwise."""
    generation_tasks = [task.name for task in tasks if task.output == "text"]
    clozes = [task.name for task in tasks if task.scoring == "cloze"]
    for source in sources:
        config, tokenizer = load_config(source), load_tokenizer(source)
        model = new_model_without_memory(_language_model_head(config), config)
        if config.is_encoder_decoder or not is_masked(model, tokenizer):
            ContinuationScorer(model, tokenizer)
            if clozes:
                raise CtxError(
                    f"The task {clozes[0]} needs a model that predicts masked tokens; {type(model).__name__} predicts "
                    "the next token.",
                    location=f"--model {source}",
                    hint=f"use a masked language model, or omit {', '.join(clozes)}.",
                )
        elif generation_tasks:
            raise CtxError(
                f"The task {generation_tasks[0]} needs a model that generates text; {type(model).__name__} predicts "
                "single tokens from both sides.",
                location=f"--model {source}",
                hint=f"use a causal language model or an encoder-decoder, or omit {', '.join(generation_tasks)}.",
            )


def majority_cell(data: TaskData) -> Cell | None:
    """The most frequent label of the pool; None for a task without labels, or unlabeled examples."""
    if data.task.output != "choice" or not data.is_labeled:
        return None
    metrics = {"acc": majority_accuracy(data.pool, data.examples)}
    return Cell(_MAJORITY, None, data.task.name, 0, 0, len(data.examples), 0.0, metrics)


def evaluate_model(
    source: str,
    name: str,
    data: Sequence[TaskData],
    arguments: PromptArguments,
    placement: DeviceArguments,
    partial: PartialResults,
) -> list[Cell]:
    """Evaluate a model, and the unigram baseline with its tokenizer, on all tasks; available results are reused."""
    model = LoadedModel(source, arguments, placement)
    digest = weights_digest(model.model.state_dict())
    parameters = model.model.num_parameters()
    scores = "pseudo-log-likelihoods" if isinstance(model.scorer, PseudoLikelihoodScorer) else "log-likelihoods"
    print_status(f"{name}: {type(model.model).__name__}, {parameters:,} parameters, {scores}")
    cells = []
    for entry in data:
        for shots, seed in arguments.runs:
            key = f"{source} {digest} {entry.task.name} {entry.digest} {shots} {seed} {arguments.save_examples}"
            if key not in partial.results:
                file = f"{_file_name(f'{name}-{entry.task.name}')}-{shots}-{seed}.jsonl"
                saves_examples = arguments.save_examples or not entry.is_labeled
                path = Path(arguments.output_dir) / "examples" / file if saves_examples else None
                cell = evaluate_cell(model, entry, shots, seed, arguments.shared_shots, path)
                partial.results[key] = cell
                partial.save()
                values = "  ".join(f"{metric} {value:.4f}" for metric, (value, _) in cell["metrics"].items())
                print_status(f"{name}  {entry.task.name}  {shots} examples, seed {seed}  {values}")
            cells.append(Cell(name, parameters, entry.task.name, shots, seed, **partial.results[key]))
    if arguments.unigram_text:
        texts = (line for path in arguments.unigram_text for line in read_lines(path))
        scorer = UnigramScorer(model.tokenizer, texts)
        baseline = f"{_UNIGRAMS} of {name}"
        for entry in data:
            # partial scoring has the same text for all choices, a cloze is not a continuation
            is_continuation = entry.task.output != "text" and entry.task.scoring not in ("partial", "cloze")
            if entry.is_labeled and is_continuation:
                contexts = [""] * len(entry.examples)
                result = evaluate_prompts(entry.task, entry.examples, contexts, scorer)
                # `acc_calibrated` does not depend on the context
                metrics = {key: metric for key, metric in result.metrics.items() if key != "acc_calibrated"}
                cells.append(Cell(baseline, None, entry.task.name, 0, 0, len(entry.examples), 0.0, metrics))
    return cells


def evaluate_cell(
    model: LoadedModel, data: TaskData, shots: int, seed: int, shared: bool, examples_file: Path | None
) -> dict[str, Any]:
    """Number of examples, share of truncated prompts, and metrics; a JSON line per example in `examples_file`."""
    contexts = data.task.contexts(data.examples, data.pool, shots, seed, is_same_file=data.is_same_file, shared=shared)
    result = evaluate_prompts(data.task, data.examples, contexts, model.scorer)
    if examples_file is not None:
        write_text_file(examples_file, "".join(json.dumps(record) + "\n" for record in result.records))
    return {"examples": len(data.examples), "truncated": result.truncated, "metrics": result.metrics}


def lm_eval_table(cells: Sequence[Cell], model: str, versions: Mapping[str, int]) -> str:
    """The table of a model as lm-evaluation-harness prints it: means of values and standard errors over seeds."""
    rows = []
    for (task, shots), group in grouped(cell for cell in cells if cell.model == model).items():
        metrics = {}
        for name in group[0].metrics:
            errors = [cell.metrics[name][1] for cell in group]
            error = None if None in errors else float(np.mean(errors))  # type: ignore[arg-type]
            metrics[name] = MetricValue(float(np.mean([cell.metrics[name][0] for cell in group])), error)
        rows.append(TableRow(task, versions[task], shots, metrics))
    return format_table(rows)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "-", text)


def grouped(cells: Iterable[Cell]) -> dict[tuple[str, int], list[Cell]]:
    """Cells of all seeds by task and number of examples in the context."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.task, cell.shots), []).append(cell)
    return groups


def prompt_result(cells: Sequence[Cell], sources: Sequence[str], settings: dict[str, Any]) -> AnalysisResult:
    """Tables of means and standard deviations over seeds, and figures: the score of each task against the number of
    examples in the context, and against the number of parameters."""
    tables: list[Table] = []
    figures: list[Figure] = []
    for task in dict.fromkeys(cell.task for cell in cells):
        task_cells = [cell for cell in cells if cell.task == task]
        tables.append(_task_table(task, task_cells))
        figures += _task_figures(task, task_cells)
    return AnalysisResult(_NAME, sources, settings, tables, figures, {"cells": [asdict(cell) for cell in cells]})


def _task_table(task: str, cells: Sequence[Cell]) -> Table:
    shots = sorted({cell.shots for cell in cells})
    rows, values, spreads = [], [], []
    for model in dict.fromkeys(cell.model for cell in cells):
        groups = grouped(cell for cell in cells if cell.model == model)
        for metric in dict.fromkeys(name for cell in cells if cell.model == model for name in cell.metrics):
            samples = [[cell.metrics[metric][0] for cell in groups.get((task, number), [])] for number in shots]
            statistics = [mean_and_std(sample) if sample else (None, None) for sample in samples]
            rows.append(f"{model}, {metric}")
            values.append([mean for mean, _ in statistics])
            spreads.append([spread for _, spread in statistics])
    truncated = max(cell.truncated for cell in cells)
    note = f"{cells[0].examples:,} examples; ± is the standard deviation over seeds."
    note += f" Up to {truncated:.0%} of the prompts exceed the maximum length and are truncated." if truncated else ""
    return Table(f"Task {task}", [f"{number}-shot" for number in shots], rows, values, spreads, note=note)


def _task_figures(task: str, cells: Sequence[Cell]) -> list[Figure]:
    names = [name for cell in cells if cell.parameters for name in cell.metrics]
    metric = next((name for name in _MAIN_METRICS if name in names), names[0])
    metric_cells = [cell for cell in cells if metric in cell.metrics]
    sizes = {cell.model: cell.parameters for cell in metric_cells if cell.parameters}
    shots = sorted({cell.shots for cell in metric_cells if cell.model in sizes})
    means, bands = {}, {}
    for model in dict.fromkeys(cell.model for cell in metric_cells):
        groups = grouped(cell for cell in metric_cells if cell.model == model)
        numbers = shots if model in sizes else [0] * len(shots)  # a baseline ignores the context
        samples = [[cell.metrics[metric][0] for cell in groups[task, number]] for number in numbers]
        statistics = [mean_and_std(sample) for sample in samples]
        means[model] = [mean for mean, _ in statistics]
        bands[model] = [(mean - spread, mean + spread) if spread else None for mean, spread in statistics]
    figures: list[Figure] = []
    label = f"{metric} of {task}"
    caption = "Bands are standard deviations over the seeds of the examples."
    safe_name = _file_name(task)
    if len(shots) > 1:
        figures.append(
            LineChart(
                safe_name, f"{label} by number of examples", shots, means, bands,
                x_label="examples in the context", y_label=metric, caption=caption,
            )
        )  # fmt: skip
    if len(set(sizes.values())) > 1:
        models = sorted(sizes, key=lambda model: sizes[model])
        series = {f"{n}-shot": [means[model][i] for model in models] for i, n in enumerate(shots)}
        figures.append(
            LineChart(
                f"{safe_name}-size", f"{label} by size", [sizes[model] for model in models], series,
                x_label="parameters", y_label=metric, log_x=True,
            )
        )  # fmt: skip
    return figures
