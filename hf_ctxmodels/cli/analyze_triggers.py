r"""Search universal triggers, and measure how they transfer to other models.

    hf-ctxmodels analyze triggers --model runs/sst2-bert runs/sst2-gpt2 --transfer_to runs/sst2-elmo \
        --validation_file SST-2/dev.tsv --text_columns sentence --exclude_class_words 200 \
        --train_file SST-2/train.tsv --output_dir analyses
    hf-ctxmodels analyze triggers --model runs/squad-bert --validation_file qa.json --answer "the king" \
        --question_word who --output_dir analyses
    hf-ctxmodels analyze triggers --model runs/gpt2 --validation_file recipes.txt --output_dir analyses

A trigger is a few words that change the output of a model for any text that they are put before (Wallace et al. 2019).
It is searched on one half of the file, and measured on the other half with every model. The head of the first model
decides on the attack: a classifier predicts wrong labels, a question answering model answers --answer, and a causal
language model continues the trigger with the lines of the file.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_ctxmodels.analysis.figures import Heatmap
from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.results import AnalysisResult, PartialResults, Table, mean_and_std
from hf_ctxmodels.analysis.triggers.attacks import (
    AnswerAttack,
    Attack,
    ClassificationAttack,
    ContinuationAttack,
    TriggerMeasurement,
    class_words,
    measure_triggers,
)
from hf_ctxmodels.analysis.triggers.search import TriggerOptions
from hf_ctxmodels.analysis.word_arguments import short_names
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.tasks import QuestionAnswering, SequenceClassification, TaskArguments
from hf_ctxmodels.downstream.tasks.base import default_max_length
from hf_ctxmodels.evaluation.scoring import saved_language_model_class
from hf_ctxmodels.inference import Predictor
from hf_ctxmodels.training.model_loading import check_sources, load_config

TASK_ARGUMENTS = ("text_columns", "label_column", "doc_stride", "max_answer_length")


@dataclass
class TriggerArguments(OutputArguments):
    """Models and data.

    Raises:
        CtxError: A number is out of range.
    """

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of the models to attack.")
    validation_file: str = flag(REQUIRED, "Examples as for finetune, or one text per line for a language model.")
    transfer_to: list[str] = flag((), "Further models on which the triggers of --model are measured.")
    label: list[str] = flag((), "Attack examples of these labels, one trigger for each; by default all labels.")
    target_label: str | None = flag(None, "Label that the trigger should cause; by default any wrong label.")
    answer: str | None = flag(None, "Answer that the trigger contains and should cause, for question answering.")
    question_word: str | None = flag(None, "Attack only questions that start with this word.")
    exclude_class_words: int = flag(0, "Exclude the N words that are most typical of each label from triggers.")
    train_file: str | None = flag(
        None, "Labeled examples for --exclude_class_words, the more the better; by default --validation_file."
    )
    max_length: int | None = flag(
        None,
        "Longest input in tokens; by default as in the fine-tuning of each model; for language models 128, or their "
        "limit if it is smaller.",
    )
    random_triggers: int = flag(10, "Random triggers per attacked model, for the baseline.")
    max_examples_per_label: int | None = flag(None, "Use N random examples of each label; by default all.")
    seeds: list[int] = flag((0,), "Seeds of the two halves and of the random triggers; results are averaged.")

    def __post_init__(self) -> None:
        check_range(self, "exclude_class_words", "random_triggers", at_least=0)
        check_range(self, "max_length", at_least=1)
        check_range(self, "max_examples_per_label", at_least=2)
        check_range(self, "seeds", at_least=0, at_most=MAX_SEED)


def main() -> None:
    """Search triggers for each label and seed, and save the tables."""
    arguments, task_arguments, options, placement = parse_arguments(
        TriggerArguments,
        (TaskArguments, TASK_ARGUMENTS),
        TriggerOptions,
        DeviceArguments,
        description=__doc__,
        essential=("model", "validation_file", "output_dir"),
    )
    arguments.check_output("triggers")
    attacks = open_attacks(arguments, task_arguments, options, placement)
    check_flags(arguments, attacks[0])
    groups, excluded_words = read_examples(arguments, task_arguments, attacks[0])
    digests = [weights_digest(attack.model.state_dict()) for attack in attacks[: len(arguments.model)]]
    identity = [arguments.options(), asdict(task_arguments), asdict(options), digests]
    data_files = [file for file in (arguments.validation_file, arguments.train_file) if file is not None]
    partial = PartialResults(Path(arguments.output_dir) / "triggers-partial.json", identity, data_files)
    measurements: dict[str, list[TriggerMeasurement]] = {label: [] for label in groups}
    for label, examples in groups.items():
        for seed in arguments.seeds:
            key = f"{label}, seed {seed}"
            print_status(f"{key}: {len(examples):,} examples")
            measurement = measure_triggers(
                attacks,
                len(arguments.model),
                examples,
                options,
                seed=seed,
                random_triggers=arguments.random_triggers,
                excluded_words=excluded_words,
                triggers=partial.results.get(key),
            )
            measurements[label].append(measurement)
            partial.results[key] = measurement.triggers
            partial.save()
    names = short_names([*arguments.model, *arguments.transfer_to])
    settings = {**asdict(arguments), **asdict(options), "examples": {name: len(rows) for name, rows in groups.items()}}
    settings["excluded_words"] = excluded_words
    arguments.save(trigger_result(measurements, attacks[0], names, len(arguments.model), settings))
    partial.file.unlink(missing_ok=True)


def open_attacks(
    arguments: TriggerArguments, task_arguments: TaskArguments, options: TriggerOptions, placement: DeviceArguments
) -> list[Attack]:
    """An attack of the same kind on each model."""
    check_sources([*arguments.model, *arguments.transfer_to])
    attacks: list[Attack] = []
    for source in (*arguments.model, *arguments.transfer_to):
        config, max_length = load_config(source), arguments.max_length
        if saved_language_model_class(config) == "AutoModelForCausalLM":
            max_length = max_length or default_max_length(config)
            model, tokenizer = load_model_and_tokenizer(source, "AutoModelForCausalLM", max_length)
            attacks.append(ContinuationAttack(model, tokenizer, max_length, options.batch_size))
        else:
            predictor = Predictor.open(source, task_arguments, max_length=max_length)
            if isinstance(predictor.task, QuestionAnswering):
                if not arguments.answer:
                    raise CtxError("The attack on question answering needs an answer.", hint="pass --answer TEXT.")
                attacks.append(AnswerAttack(predictor, arguments.answer, options.batch_size))
            else:
                attacks.append(ClassificationAttack(predictor, arguments.target_label, options.batch_size))
        placement.place(attacks[-1].model)
        first, last = attacks[0], attacks[-1]
        labels = [set(attack.task.labels) for attack in (first, last) if isinstance(attack, ClassificationAttack)]
        if type(first) is not type(last) or (labels and labels[0] != labels[1]):
            raise CtxError(
                "The models have different tasks or labels.",
                location=f"{arguments.model[0]}, {source}",
                hint="use models that were fine-tuned on the same data.",
            )
    return attacks


def check_flags(arguments: TriggerArguments, attack: Attack) -> None:
    """Raise CtxError for a flag that the attack does not use."""
    unused: list[str] = []
    if not isinstance(attack, ClassificationAttack):
        unused += ["label", "target_label", "exclude_class_words", "train_file"]
    if not isinstance(attack, AnswerAttack):
        unused += ["answer", "question_word"]
    for name in unused:
        if getattr(arguments, name):
            raise CtxError(
                f"{type(attack.model).__name__} does not use the flag.", location=f"--{name}", hint="remove the flag."
            )


def read_examples(
    arguments: TriggerArguments, task_arguments: TaskArguments, attack: Attack
) -> tuple[dict[str, list[Any]], list[str]]:
    """Examples by the label that is attacked, and the words that are excluded from triggers."""
    groups: dict[str, list[Any]] = {}
    words: list[str] = []
    if isinstance(attack, ClassificationAttack):
        task = SequenceClassification(task_arguments)
        examples = task.read(arguments.validation_file, "validation")
        for example in examples:
            if example.label != arguments.target_label:
                groups.setdefault(example.label, []).append(example)
        if unknown := sorted({*arguments.label} - {*groups}):
            raise CtxError(
                f"No examples of the label {unknown[0]!r} to attack.",
                location=arguments.validation_file,
                hint=f"use one of: {', '.join(sorted(groups))}.",
            )
        groups = {label: groups[label] for label in arguments.label or sorted(groups)}
        if arguments.exclude_class_words:
            word_examples = task.read(arguments.train_file, "train") if arguments.train_file else examples
            words = class_words(word_examples, arguments.exclude_class_words)
    elif isinstance(attack, AnswerAttack):
        questions = QuestionAnswering(task_arguments).read(arguments.validation_file, "validation")
        start = (arguments.question_word or "").lower()
        groups[start or "all"] = [
            item for item in questions if item.question.lower().split()[:1] == [start] or not start
        ]
    else:
        groups["texts"] = [line.strip() for line in read_lines(arguments.validation_file) if line.strip()]
    if (size := arguments.max_examples_per_label) is not None:
        groups = {label: rows if len(rows) <= size else _sample(rows, size) for label, rows in groups.items()}
    return groups, words


def _sample(rows: list[Any], count: int) -> list[Any]:
    positions = np.random.default_rng(0).choice(len(rows), count, replace=False)
    return [rows[position] for position in sorted(positions)]


def trigger_result(
    measurements: dict[str, list[TriggerMeasurement]],
    attack: Attack,
    names: Sequence[str],
    num_attacked: int,
    settings: dict[str, Any],
) -> AnalysisResult:
    """Tables of the transfer matrix and of the triggers, a heat map for each label, and all numbers."""
    tables, figures, values = [], [], {}
    attacked = names[:num_attacked]
    for number, (label, runs) in enumerate(measurements.items()):
        plain = np.array([run.plain for run in runs])
        draws = np.concatenate([run.random for run in runs])
        matrix = np.array([run.transferred for run in runs])
        rows, cells, spreads = ["no trigger"], [plain.mean(0)], [mean_and_std(plain)[1]]
        if len(draws):
            rows, cells = [*rows, f"{len(draws)} random triggers"], [*cells, draws.mean(0)]
            spreads.append(mean_and_std(draws)[1])
        rows += [f"trigger of {name}" for name in attacked]
        cells += list(matrix.mean(0))
        spreads += [mean_and_std(matrix[:, index])[1] for index in range(num_attacked)]
        strongest = "min" if attack.increases_loss or not attack.has_binary_outcomes else "max"
        tables.append(
            Table(
                f"{label}: {attack.metric}, by model",
                names,
                rows,
                np.array(cells).tolist(),
                spreads if any(value is not None for row in spreads for value in row) else None,
                best=strongest,  # type: ignore[arg-type]
                note="Measured on the half of the examples that the triggers were not searched on.",
            )
        )
        tables.append(_trigger_table(label, runs, attacked, attack))
        figures.append(
            Heatmap(
                f"transfer-{number}",
                f"{label}: {attack.metric} of models with triggers",
                rows,
                list(names),
                np.array(cells).tolist(),
                low=0.0 if attack.has_binary_outcomes else None,
                high=1.0 if attack.has_binary_outcomes else None,
                row_label="trigger",
                column_label="model",
                caption="On examples that the triggers were not searched on.",
            )
        )
        values[label] = {
            "triggers": [run.triggers for run in runs],
            "plain": plain,
            "random": [run.random for run in runs],
            "transferred": matrix,
            "success": [run.success for run in runs],
        }
    return AnalysisResult("triggers", list(settings["model"]), settings, tables, figures, values)


def _trigger_table(label: str, runs: list[TriggerMeasurement], attacked: Sequence[str], attack: Attack) -> Table:
    """The triggers, the metric of the attacked model without and with them, and the success rate."""
    columns = ["trigger", "without", "with"] + (["success rate"] if attack.has_binary_outcomes else [])
    rows: list[str] = []
    cells: list[list[float | int | str | None]] = []
    for run_number, run in enumerate(runs, 1):
        for index, name in enumerate(attacked):
            rows.append(name if len(runs) == 1 else f"{name}, run {run_number}")
            cells.append([run.triggers[index].strip(), float(run.plain[index]), float(run.transferred[index, index])])
            if run.success is not None:
                cells[-1].append(float(run.success[index, index]))
    note = "Success rate: changed outcomes among those that the attack could change."
    return Table(f"{label}: triggers, {attack.metric}", columns, rows, cells, note=note)
