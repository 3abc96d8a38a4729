"""Measures of a comparison: functions of a checkpoint, each the function behind a command of the package."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NewType

import yaml

from hf_ctxmodels.analysis.disambiguation import disambiguate, read_semcor
from hf_ctxmodels.analysis.probing.layer_scores import ProbingOptions
from hf_ctxmodels.analysis.probing.probing_run import ProbingData, ProbingRun, build_data
from hf_ctxmodels.analysis.probing.training import ProbeTraining
from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.comparison.processes import device_flags, package_command, run_command
from hf_ctxmodels.compression.finetuning_flags import finetuning_sections
from hf_ctxmodels.core.command_line import parse_arguments, recipe_flags, shown_fields
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.devices import place_model
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, did_you_mean, flag, is_settable
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.finetuning.arguments import FinetuningMethods
from hf_ctxmodels.downstream.finetuning.finetuning_run import read_examples
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation
from hf_ctxmodels.downstream.networks.configuration import CtxTaskNetworkConfig
from hf_ctxmodels.downstream.tasks import TASKS
from hf_ctxmodels.evaluation import (
    MinimalPair,
    detects_replaced_tokens,
    evaluate_pairs,
    likelihood_kind,
    measure_perplexity,
    read_pairs,
    score,
    score_originality,
    similarity,
    total_result,
    unigram_scorer,
)
from hf_ctxmodels.evaluation.minimal_pairs import Scorer
from hf_ctxmodels.evaluation.scoring import load_language_model, saved_language_model_class
from hf_ctxmodels.evaluation.sentence_tests import read_test_pairs
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.summary import TrainingSummary

COST = "cost"
"""Name of the costs of training in the results, which no measure has."""

Values = dict[str, float]
"""Name of a metric -> its value; the first one is shown in tables."""


class Evaluation(NamedTuple):
    """The metrics of a checkpoint, and how they were measured, if this differs between families."""

    values: Values
    method: str = ""


_PLANNED_FLAGS = {
    *("model", "family", "features", "train_file", "validation_file", "seed", "output_dir", "overwrite", "resume"),
}
"""Flags of `finetune` that follow from the plan."""

DataFile = NewType("DataFile", str)
"""Type of an option that is a file, relative to the data folder; in lists of files also a pattern."""


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """A checkpoint to evaluate.

    Attributes:
        path: Directory with weights, configuration and tokenizer.
        folder: Directory for temporary files.
        seed: Seed of the run, which measures with random choices use too.
        held_out: Held-out documents of the training text.
        device: See `Comparison`.
    """

    path: Path
    folder: Path
    seed: int
    held_out: Documents
    device: str | None = None

    @cached_property
    def config(self) -> Any:
        """The configuration."""
        return load_config(self.path)

    def open(self, auto_class: str) -> tuple[Any, Any]:
        """Load the model on the device, and its tokenizer."""
        model, tokenizer = load_model_and_tokenizer(str(self.path), auto_class)
        return place_model(model, self.device), tokenizer


@dataclass(kw_only=True)
class Measure(ABC):
    """A measure with its options.

    Attributes:
        kind: Name of the measure in a plan.
        chance: The score of random choices; None if it depends on the data.
        depends_on_tokenizer: Whether `baselines` differ between tokenizers.
        name: Name in the results.
        checkpoints: The evaluated checkpoints of a run: all, the first (initial weights) and the last, or the last.
    """

    kind: ClassVar[str]
    chance: ClassVar[float | None] = None
    depends_on_tokenizer: ClassVar[bool] = False

    name: str
    checkpoints: Literal["all", "ends", "last"] = "all"

    @abstractmethod
    def check(self) -> None:
        """Read the files of the measure; raises CtxError if a file, a column or an option is invalid for any model."""

    @abstractmethod
    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """The metrics of a checkpoint; None if the measure is not defined for its family."""

    def baselines(self, tokenizer: Path, documents: Documents) -> dict[str, Values]:
        """Name of a baseline without a model -> its metrics.

        Args:
            tokenizer: Directory of a tokenizer, for token frequencies.
            documents: The training text of the plan.
        """
        return {}

    def select_steps(self, steps: Sequence[int]) -> list[int]:
        """The steps to evaluate, of all checkpoints of a run in ascending order."""
        return {"all": [*steps], "ends": [steps[0], steps[-1]], "last": [steps[-1]]}[self.checkpoints]


@dataclass(kw_only=True)
class MinimalPairs(Measure):
    """Accuracy on minimal pairs, as `evaluate pairs`: by the scores of `evaluation.score`."""

    kind = "pairs"
    chance = 0.5
    depends_on_tokenizer = True  # frequencies of tokens

    files: list[DataFile] = flag(REQUIRED, "Files of pairs in the format of BLiMP or Zorro.")
    max_pairs: int | None = flag(None, "Use the first N pairs of each file.")
    batch_size: int = flag(64, "Sequences per batch.")
    unigram_words: int = flag(500_000, "Words of the training text for the frequencies of the baseline.")

    def __post_init__(self) -> None:
        check_range(self, "max_pairs", "batch_size", "unigram_words", at_least=1)

    @cached_property
    def pairs(self) -> list[MinimalPair]:
        """The pairs of all files."""
        return [pair for file in self.files for pair in read_pairs(file)[: self.max_pairs]]

    def check(self) -> None:
        """Read the pairs; raises CtxError for a phenomenon with the name of a metric of all pairs."""
        if names := sorted({pair.phenomenon for pair in self.pairs} & {"accuracy", "generator"}):
            raise CtxError(
                f"A phenomenon is named {names[0]!r}, as a metric of all pairs.",
                location="files",
                hint="rename the file, or the linguistics_term of its pairs.",
            )

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """Accuracy over all pairs, and of each phenomenon; of a pair of discriminator and generator the accuracy of the
        discriminator, whose encoder the other measures evaluate, and in addition the accuracy of the generator."""
        if saved_language_model_class(checkpoint.config) is None:
            return None
        model, tokenizer = load_language_model(str(checkpoint.path))
        try:
            score_kind: str = likelihood_kind(model, tokenizer)
        except CtxError:
            return None
        place_model(model, checkpoint.device)
        score_texts = partial(score, model, tokenizer, batch_size=self.batch_size)
        values = _pair_values(self.pairs, lambda texts: [text.log_probability for text in score_texts(texts)])
        if detects_replaced_tokens(model):
            score_kind = "log-probability of original tokens"
            score_originals = partial(score_originality, model, tokenizer, batch_size=self.batch_size)
            values = _pair_values(self.pairs, score_originals) | {"generator": values["accuracy"]}
        return Evaluation(values, f"by {score_kind}")

    def baselines(self, tokenizer: Path, documents: Documents) -> dict[str, Values]:
        """Log-probability under token frequencies."""
        texts = _first_words(documents, self.unigram_words)
        return {"frequency": _pair_values(self.pairs, unigram_scorer(load_tokenizer(tokenizer), texts))}


def _pair_values(pairs: list[MinimalPair], scorer: Scorer) -> Values:
    """Accuracy over all pairs, and phenomenon -> accuracy."""
    results = evaluate_pairs(pairs, scorer)
    accuracies = {name: result.accuracy for name, result in results.items()}
    return {"accuracy": total_result(results.values()).accuracy, **accuracies}


def _first_words(documents: Documents, number: int) -> list[str]:
    """The first documents with about `number` words."""
    texts, words = [], 0
    for document in documents:
        texts.append(" ".join(document))
        words += len(texts[-1].split())
        if words >= number:
            break
    return texts


@dataclass(kw_only=True)
class HeldOutPerplexity(Measure):
    """Perplexity per word of left-to-right language models on held-out documents, as `evaluate perplexity`."""

    kind = "perplexity"

    documents: int = flag(50, "Number of held-out documents.")
    max_length: int | None = flag(None, "Window in tokens; by default the maximum length of the model.")

    def __post_init__(self) -> None:
        check_range(self, "documents", "max_length", at_least=1)

    def check(self) -> None:
        """There is no file."""

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """Perplexity per word, and the fraction of unknown tokens, which make it too low."""
        if saved_language_model_class(checkpoint.config) != "AutoModelForCausalLM":
            return None
        model, tokenizer = checkpoint.open("AutoModelForCausalLM")
        texts = map(" ".join, islice(checkpoint.held_out, self.documents))
        result = measure_perplexity(model, tokenizer, texts, max_length=self.max_length)
        return Evaluation({"per_word": result.per_word, "unknown": result.unknown / result.tokens})


@dataclass(kw_only=True)
class PretrainingLoss(Measure):
    """Loss or accuracy of the pretraining objective on a text, as `evaluate pretraining`.

    With `options`, models are tested on another task than they were trained on, such as models of next-sentence
    prediction on the order of sentences (Lan et al. 2019, table 5).
    """

    kind = "pretraining"

    text: list[DataFile] = flag(REQUIRED, "Documents, preferably unseen.")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"flags": True})
    metric: str = flag("loss", "Metric for the tables, such as sentence_order_accuracy.")
    max_length: int | None = flag(None, "Maximum length in tokens; by default the length of pretraining.")
    batch_size: int = flag(64, "Examples per batch.")

    def __post_init__(self) -> None:
        check_range(self, "max_length", "batch_size", at_least=1)
        _check_mapping(self.options, "options", self.name)

    def check(self) -> None:
        """Read the first document, and compare the options with the options of all objectives."""
        next(iter(load_documents(*self.text)))
        objectives = [objective for family in FAMILIES.values() for objective in family.objectives.values()]
        all_options = {entry.name for objective in objectives for entry in filter(is_settable, fields(objective))}
        if unknown := sorted({*self.options} - all_options):
            raise CtxError(
                f"No objective has the option {unknown[0]!r}.",
                location="options",
                hint=f"{did_you_mean(unknown[0], all_options)}`hf-ctxmodels pretrain --help` lists the options.",
            )

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """The metric, and the other losses and metrics of the objective; None, with a printed reason, if the checkpoint
        or its objective has none."""
        options = {name: str(value) for name, value in self.options.items()}
        try:
            evaluation = PretrainingEvaluation.open(
                str(checkpoint.path), *self.text, max_length=self.max_length, options=options
            )
        except CtxError as error:
            print_status(f"{self.name} is not measured: {error}")
            return None
        place_model(evaluation.model, checkpoint.device)
        values = _evaluation_metrics(evaluation.loss(self.batch_size), self.metric)
        if self.metric not in values:
            print_status(f"{self.name} is not measured: {evaluation.name} has no {self.metric} ({', '.join(values)})")
            return None
        return Evaluation(values)


@dataclass(kw_only=True)
class Similarity(Measure):
    """Rank correlation of cosines of mean states with ratings of sentence pairs, as `evaluate sentences`."""

    kind = "similarity"

    file: DataFile = flag(REQUIRED, "Table of two sentences and a rating.")
    columns: list[str] = field(default_factory=lambda: ["1", "2", "3"])
    batch_size: int = flag(64, "Sentences per batch.")

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)

    def check(self) -> None:
        """Read the sentences and the ratings."""
        read_test_pairs(self.file, self.columns)

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """Spearman's and Pearson's correlation."""
        model, tokenizer = checkpoint.open("AutoModel")
        encode = partial(encode_sentences, model, tokenizer, pooling="mean", batch_size=self.batch_size)
        result = similarity(encode, read_test_pairs(self.file, self.columns))
        return Evaluation({"spearman": result.spearman, "pearson": result.pearson})


@dataclass(kw_only=True)
class Probing(Measure):
    """Linear or structural probes of the best layer, as `analyze probe`."""

    kind = "probe"

    task: str = flag("pos", "Task of a treebank or of CoNLL columns, as --tasks of analyze probe.")
    train_file: DataFile = flag(REQUIRED, "Training examples.")
    dev_file: DataFile = flag(REQUIRED, "Examples that select the weights of a probe.")
    test_file: DataFile = flag(REQUIRED, "Examples for the scores.")
    train_sample: int | None = flag(None, "Number of training sentences.")
    epochs: int = flag(5, "Training epochs.")
    min_steps: int = flag(500, "Minimum number of training steps; small data sets are repeated.")
    rank: int = flag(64, "Rank of a structural probe.")

    def __post_init__(self) -> None:
        check_range(self, "train_sample", "epochs", "min_steps", "rank", at_least=1)

    @cached_property
    def data(self) -> ProbingData:
        """The examples."""
        files = {"train": self.train_file, "dev": self.dev_file, "test": self.test_file}
        return build_data([self.task], files, [0], self.train_sample)

    def check(self) -> None:
        """Read the examples."""
        _ = self.data

    def _run(self, checkpoint: MeasuredCheckpoint) -> ProbingRun:
        model, tokenizer = checkpoint.open("AutoModel")
        training = ProbeTraining(epochs=self.epochs, min_steps=self.min_steps)
        options = ProbingOptions(training=training, rank=self.rank, code_length=False)
        return ProbingRun(model.eval(), tokenizer, self.data, options, seeds=[checkpoint.seed])

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """Score of the best layer on the test file, and its selectivity (score minus score of the control task)."""
        scores = self._run(checkpoint).results("trained")[self.task].layers
        best = max(scores, key=lambda layer: scores[layer]["score"][0])
        values = {name: numbers[0] for name, numbers in scores[best].items()}
        return Evaluation(values | {"layer": float(best)})

    def baselines(self, tokenizer: Path, documents: Documents) -> dict[str, Values]:
        """Scores of the majority label and of the majority label of each word type; for trees, of a chain of words."""
        run = ProbingRun(None, None, self.data, ProbingOptions())  # type: ignore[arg-type]
        return {name: {"score": value} for name, value in run.baselines()[self.task].items()}


@dataclass(kw_only=True)
class Senses(Measure):
    """Word sense disambiguation by the nearest mean of a sense in the best layer, as `analyze senses`."""

    kind = "senses"

    semcor: DataFile = flag(REQUIRED, "Archive of SemCor.")
    max_lemmas: int | None = flag(None, "Disambiguate a random sample of N ambiguous lemmas; by default all.")

    def __post_init__(self) -> None:
        check_range(self, "max_lemmas", at_least=1)

    @cached_property
    def sentences(self) -> Any:
        """The tagged sentences."""
        return read_semcor(self.semcor)

    def check(self) -> None:
        """Read the sentences."""
        _ = self.sentences

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """Accuracy of the best layer."""
        result = disambiguate(WordEncoder(*checkpoint.open("AutoModel")), self.sentences, max_lemmas=self.max_lemmas)
        best = int(result.accuracy[0].argmax())
        most_frequent = float(result.most_frequent[0])
        values = {"accuracy": float(result.accuracy[0, best]), "layer": float(result.layers[best])}
        return Evaluation(values | {"most_frequent": most_frequent, "upper_bound": float(result.upper_bound[0])})


@dataclass(kw_only=True)
class Finetuning(Measure):
    """A metric of a model fine-tuned by `finetune TASK`, or of a network on its frozen vectors."""

    kind = "finetune"

    task: str = flag("sequence-classification", "Task of finetune.")
    metric: str = flag("accuracy", "Metric of the task.")
    train_file: DataFile = flag(REQUIRED, "Training examples.")
    validation_file: DataFile = flag(REQUIRED, "Examples for the metric.")
    features: bool = flag(False, "Train a network on the frozen vectors of the model, instead of the model.")
    flags: Mapping[str, Any] = field(default_factory=dict, metadata={"flags": True})
    checkpoints: Literal["all", "ends", "last"] = "last"

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise CtxError(f"Unknown task {self.task!r}.", location=self.name, hint=f"use one of: {', '.join(TASKS)}.")
        _check_mapping(self.flags, "flags", self.name)
        if planned := sorted(_PLANNED_FLAGS & {*self.flags}):
            raise CtxError(
                f"{planned[0]} is determined by the plan.", location=f"{self.name}, flags", hint="remove it."
            )

    def _recipe(self, model: Path, seed: int, output: Path) -> dict[str, Any]:
        """The flags of `finetune`."""
        return {
            **self.flags,
            **({"features": f"model={model}"} if self.features else {"model": str(model)}),
            "train_file": self.train_file,
            "validation_file": self.validation_file,
            "seed": str(seed),
            "output_dir": str(output),
        }

    def check(self) -> None:
        """Parse the flags, read the examples, and compare the metric with the metrics of the task."""
        sections = finetuning_sections(TASKS[self.task])
        names = {entry.name for section in sections for entry in shown_fields(section)}
        recipe_flags(self.flags, names - _PLANNED_FLAGS, "flags")
        flags = recipe_flags(self._recipe(Path("model"), 0, Path("output")), names, "flags")
        program = f"hf-ctxmodels finetune {self.task}"
        arguments, task_arguments, _, *methods = parse_arguments(*sections, argv=flags, program=program)
        FinetuningMethods(*methods)
        task = TASKS[self.task](replace(task_arguments, span_beam_search=False))  # which depends on the family
        training, validation = read_examples(task, arguments)
        if not task.is_generative:  # whose metrics do not depend on labels
            task.configure(CtxTaskNetworkConfig(network_options={}), training, validation)
        if arguments.unlabeled_file is not None:
            task.read_unlabeled(arguments.unlabeled_file)
        metrics = ["loss", *task.score(validation, task.baseline(training, validation))]
        if self.metric.removesuffix("_normalized") not in metrics:
            raise self._unknown_metric(metrics)

    def _unknown_metric(self, metrics: Iterable[str]) -> CtxError:
        return CtxError(
            f"The task {self.task} has no metric {self.metric!r}.",
            location=f"metric: {self.metric}",
            hint=f"{did_you_mean(self.metric, list(metrics))}use one of: {', '.join(metrics)}.",
        )

    def evaluate(self, checkpoint: MeasuredCheckpoint) -> Evaluation | None:
        """The metrics of a fine-tuned model, `metric` first; the model is deleted."""
        has_head = TASKS[self.task].auto_class in get_family(checkpoint.config).models
        if not has_head and not self.features:
            return None
        output = checkpoint.folder / f"{self.name}.finetuned"
        recipe_file = checkpoint.folder / f"{self.name}.yaml"
        recipe = self._recipe(checkpoint.path, checkpoint.seed, output)
        write_text_file(recipe_file, yaml.safe_dump(recipe, sort_keys=False))
        command = ["finetune", self.task, "--recipe", str(recipe_file), "--overwrite", *device_flags(checkpoint.device)]
        run_command(package_command(*command), output.with_suffix(".log"))
        values = _evaluation_metrics(TrainingSummary.load(output).metrics, self.metric)
        shutil.rmtree(output)
        if self.metric not in values:
            raise self._unknown_metric(values)
        return Evaluation(values)


def _evaluation_metrics(metrics: Mapping[str, float], first: str) -> Values:
    """The metrics with the prefix "eval_", without it; the metric `first` comes first."""
    values = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
    return dict(sorted(values.items(), key=lambda item: item[0] != first))


def _check_mapping(value: object, option: str, measure: str) -> None:
    if not isinstance(value, Mapping):
        raise CtxError(
            f"The {option} {value!r} are not a mapping.", location=measure, hint=f"write `{option}: {{name: value}}`."
        )


MEASURES: dict[str, type[Measure]] = {
    measure.kind: measure
    for measure in (MinimalPairs, HeldOutPerplexity, PretrainingLoss, Similarity, Probing, Senses, Finetuning)
}
"""Kind in a plan -> measure."""
