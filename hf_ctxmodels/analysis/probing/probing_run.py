"""Probing of a model: encodes the text once, then trains the probes and controls of all tasks and layers; resumable."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.annotated_corpora import read_senteval
from hf_ctxmodels.analysis.probing.controls import label_score, majority_predictions
from hf_ctxmodels.analysis.probing.layer_scores import (
    LabeledVectors,
    ProbingOptions,
    Scores,
    probe_layers,
    probe_mixes,
    probe_structure,
)
from hf_ctxmodels.analysis.probing.probes import EdgeOptions
from hf_ctxmodels.analysis.probing.sentence_tasks import (
    SENTENCE_TASKS,
    divide_sentences,
    label_sentences,
    sentence_task,
)
from hf_ctxmodels.analysis.probing.structural import ParsedSentence, TreeData, chain_baseline
from hf_ctxmodels.analysis.probing.tasks import (
    FILE_TASKS,
    MORPHOLOGY,
    SPLITS,
    TREEBANK_TASKS,
    ProbingTask,
    build_file_task,
    build_treebank_task,
    is_treebank_task,
)
from hf_ctxmodels.analysis.probing.training import standardize
from hf_ctxmodels.analysis.results import PartialResults
from hf_ctxmodels.analysis.senses import encode_sentences
from hf_ctxmodels.architectures.word_encoder import WordEncoder, WordPooling
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import did_you_mean
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.data.treebanks import TreebankSentence, read_treebank
from hf_ctxmodels.tokenizers.base import tokenizer_digest
from hf_ctxmodels.training.model_loading import new_model_with_seed

Weights = Literal["trained", "untrained"]
STRUCTURAL_TASKS = ("distance", "depth")
TASK_NAMES = (
    *TREEBANK_TASKS, f"{MORPHOLOGY}NAME", *STRUCTURAL_TASKS, *SENTENCE_TASKS, *FILE_TASKS, "senteval"
)  # fmt: skip


@dataclass
class ProbingData:
    """The tasks of a run, made from its files.

    Attributes:
        tasks: Name -> the task for each partition seed; word and pair tasks have one partition, the given files.
        trees: Split -> sentences of the structural tasks.
        structural: Names of the structural tasks.
    """

    tasks: dict[str, list[ProbingTask]] = field(default_factory=dict)
    trees: dict[str, list[TreebankSentence]] = field(default_factory=dict)
    structural: tuple[str, ...] = ()

    def counts(self) -> dict[str, Any]:
        """Numbers of labels and of the examples of each split; sentences for structural tasks."""
        counts: dict[str, Any] = {}
        for name, (task, *_) in self.tasks.items():
            sizes = {split: len(examples.examples) for split, examples in task.splits.items()}
            counts[name] = {"labels": len(task.labels), **sizes}
        sizes = {split: len(sentences) for split, sentences in self.trees.items()}
        return counts | dict.fromkeys(self.structural, sizes)

    def word_sentences(self) -> Iterator[tuple[str, list[str]]]:
        """Split and words of all sentences of word, pair and structural tasks."""
        for split in SPLITS:
            for tasks in self.tasks.values():
                if not tasks[0].is_sentence_level:
                    yield from ((split, sentence) for sentence in tasks[0].splits[split].sentences)
            yield from ((split, sentence.words) for sentence in self.trees.get(split, ()))


def build_data(
    names: Sequence[str], files: Mapping[str, str], seeds: Sequence[int], train_sample: int | None = None
) -> ProbingData:
    """Build the tasks of a run from the file of each split, `train`, `dev` and `test`.

    Sentence tasks are made from the sentences of all files and divided differently for each seed; a SentEval file, the
    train file, has partitions. The other tasks of a treebank train on `train_sample` of its sentences, None for all.

    Raises:
        CtxError: A task is unknown or has no examples, a file is invalid, or files are missing.
    """
    for name in names:
        if name not in TASK_NAMES and not name.startswith(MORPHOLOGY):
            raise CtxError(
                f"Unknown task {name!r}.",
                location="--tasks",
                hint=f"{did_you_mean(name, TASK_NAMES)}use some of: {', '.join(TASK_NAMES)}.",
            )
    if tuple(files) != SPLITS and any(name not in (*SENTENCE_TASKS, "senteval") for name in names):
        raise CtxError("Files are missing.", location="--dev_file, --test_file", hint="give one for each split.")
    data = ProbingData(structural=tuple(name for name in STRUCTURAL_TASKS if name in names))
    treebanks: dict[str, list[TreebankSentence]] = {}
    if data.structural or any(is_treebank_task(name) or name in SENTENCE_TASKS for name in names):
        treebanks = {split: read_treebank(file) for split, file in files.items()}
    sampled = dict(treebanks)
    if train_sample is not None and treebanks:
        count = min(train_sample, len(treebanks["train"]))
        sampled["train"] = random.Random(0).sample(treebanks["train"], count)
    if data.structural:
        data.trees = sampled
    for name in dict.fromkeys(names):
        if is_treebank_task(name):
            data.tasks[name] = [build_treebank_task(name, sampled)]
        elif name in SENTENCE_TASKS:
            sentences = label_sentences(name, [sentence for split in treebanks.values() for sentence in split])
            data.tasks[name] = [divide_sentences(name, sentences, seed) for seed in seeds]
        elif name == "senteval":
            partitions = read_senteval(files["train"])
            renamed = {"train": partitions["train"], "dev": partitions["validation"], "test": partitions["test"]}
            data.tasks[name] = [sentence_task(name, renamed)]
        elif name in FILE_TASKS:
            data.tasks[name] = [build_file_task(name, files)]
    return data


class Representations:
    """Standardized vectors of the sentences of all tasks, from one model.

    Words of sentences are encoded once for all word and pair tasks; sentence tasks have the means of their words, and
    the vector 0 for sentences without tokens.
    """

    def __init__(
        self,
        encoder: WordEncoder,
        data: ProbingData,
        *,
        cache_dir: str | Path | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        self._first_rows: dict[tuple[str, ...], int] = {}
        sentences: list[list[str]] = []
        num_rows = num_training_rows = 0
        for split, words in data.word_sentences():
            key = tuple(words)
            if key not in self._first_rows:
                self._first_rows[key] = num_rows
                sentences.append(words)
                num_rows += len(words)
            if split == "train":
                num_training_rows = num_rows
        self.vectors = torch.empty(0, len(encoder.layers), encoder.hidden_size, dtype=dtype)
        if sentences:
            corpus = encoder.encode_corpus(sentences, cache_dir=cache_dir, dtype=dtype)
            self.vectors = standardize(corpus.vectors, num_training_rows, corpus.has_tokens)
        self.num_words_without_tokens = int((~corpus.has_tokens).sum()) if sentences else 0
        self._means: dict[tuple[str, ...], int] = {}
        for tasks in data.tasks.values():
            for task in tasks if tasks[0].is_sentence_level else ():
                for examples in task.splits.values():
                    for words in examples.sentences:
                        self._means.setdefault(tuple(words), len(self._means))
        self._mean_vectors, self._has_tokens = encode_sentences(encoder, list(self._means), dtype=dtype)

    def labeled(self, task: ProbingTask, columns: list[int], layers: list[int]) -> LabeledVectors:
        """The vectors of a task's examples, for some columns of the table, which hold these layers."""
        if task.is_sentence_level:
            rows = [self._means[tuple(words)] for split in SPLITS for words in task.splits[split].sentences]
            sizes = [len(task.splits[split].sentences) for split in SPLITS]
            vectors = standardize(self._mean_vectors[rows], sizes[0], self._has_tokens[rows])
            spans = torch.stack([torch.arange(len(rows)), torch.arange(1, len(rows) + 1)], -1)[:, None]
            return LabeledVectors(task, vectors, dict(zip(SPLITS, spans.split(sizes), strict=True)), columns, layers)
        spans_by_split = {}
        for split, examples in task.splits.items():
            first_rows = [self._first_rows[tuple(words)] for words in examples.sentences]
            starts = torch.tensor([first_rows[example.sentence] for example in examples.examples])
            spans = torch.tensor([example.spans for example in examples.examples])
            spans_by_split[split] = starts[:, None, None] + spans
        return LabeledVectors(task, self.vectors, spans_by_split, columns, layers)

    def trees(self, data: ProbingData, columns: list[int]) -> dict[str, TreeData]:
        """The sentences of the structural tasks with their vectors."""
        return {
            split: TreeData(
                self.vectors,
                [
                    ParsedSentence.from_treebank(sentence, self._first_rows[tuple(sentence.words)])
                    for sentence in sentences
                ],
                columns,
            )
            for split, sentences in data.trees.items()
        }


def untrained_model(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A model of the same class and configuration with initial weights."""
    untrained = new_model_with_seed(type(model.base_model), model.config, seed)
    return untrained.to(model.device, model.dtype).eval()


@dataclass
class TaskResult:
    """Results of a task: scores of each layer, of mixes, and the predicted trees of the example sentence."""

    layers: dict[int, Scores] = field(default_factory=dict)
    mix: dict[str, Any] | None = None
    trees: dict[int, list[list[int]]] = field(default_factory=dict)

    def select(self, layers: Sequence[int], with_mix: bool) -> "TaskResult":
        """The result for these layers only; a partial result may have more."""
        scores = {layer: self.layers[layer] for layer in layers}
        trees = {layer: self.trees[layer] for layer in layers if layer in self.trees}
        return TaskResult(scores, self.mix if with_mix else None, trees)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TaskResult":
        """The result of `asdict` and JSON, whose numbers of layers are texts."""
        layers, trees = ({int(layer): item for layer, item in values[name].items()} for name in ("layers", "trees"))
        return cls(layers, values["mix"], trees)


@dataclass
class ProbingRun:
    """Probing of a model, trained and untrained.

    Attributes:
        layers: Numbers of layers, or None for all.
        seeds: Seeds of the initial weights of probes, the control task and the partitions of sentence tasks; for the
            latter the seeds of `build_data`.
        mix: Whether to train probes of layer mixes, only with trained weights. Requires all layers.
        partial: The results of finished tasks of an interrupted run, to which finished tasks are added.

    Raises:
        CtxError: `mix` is set, and `layers` is not None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: ProbingData
    options: ProbingOptions
    layers: list[int] | None = None
    seeds: Sequence[int] = (0, 1, 2)
    mix: bool = False
    pooling: WordPooling = "mean"
    partial: PartialResults | None = None
    cache_dir: Path | None = None
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.mix and self.layers is not None:
            raise CtxError("Mixes need all layers.", location="--mix", hint="use --layers all.")

    def results(self, weights: Weights) -> dict[str, TaskResult]:
        """Results of all tasks for the layers of the run, with the weights of the model, or initial ones."""
        model = self.model if weights == "trained" else untrained_model(self.model)
        encoder = WordEncoder(
            model, self.tokenizer, layers="all" if self.layers is None else self.layers, pooling=self.pooling
        )
        digest = weights_digest(model.state_dict()) + tokenizer_digest(self.tokenizer)
        names = [*self.data.tasks, *self.data.structural]
        keys = {name: self._partial_key(name, weights, digest) for name in names}
        saved = {} if self.partial is None else self.partial.results
        results = {
            name: TaskResult.from_json(saved[key]) if key in saved else TaskResult() for name, key in keys.items()
        }
        has_mixes = self.mix and weights == "trained" and len(encoder.layers) > 1
        mixed_tasks = set(self.data.tasks) if has_mixes else set()
        is_complete = all(
            set(encoder.layers) <= set(result.layers) and (result.mix is not None or name not in mixed_tasks)
            for name, result in results.items()
        )
        if not is_complete:
            print_status(f"{weights} weights: {len(encoder.layers)} layers, {', '.join(names)}")
            representations = Representations(encoder, self.data, cache_dir=self.cache_dir, dtype=self.dtype)
            if representations.num_words_without_tokens:
                print_status(f"{representations.num_words_without_tokens:,} words have no tokens; their vectors are 0")
            for name, result in results.items():
                description = f"{name}, {weights}"
                self._complete_layers(name, result, encoder.layers, representations, description)
                if name in mixed_tasks and result.mix is None:
                    result.mix = self._mix(self.data.tasks[name][0], encoder.layers, representations, description)
                if self.partial is not None:
                    self.partial.results[keys[name]] = asdict(result)
                    self.partial.save()
        return {name: result.select(encoder.layers, name in mixed_tasks) for name, result in results.items()}

    def _complete_layers(
        self, name: str, result: TaskResult, layers: Sequence[int], representations: Representations, description: str
    ) -> None:
        """Compute the scores and trees of the layers that are missing in a result."""
        columns = [column for column, layer in enumerate(layers) if layer not in result.layers]
        missing = [layers[column] for column in columns]
        seeds = list(self.seeds)
        if not missing:
            return
        if name in self.data.structural:
            trees = representations.trees(self.data, columns)
            scores, edges = probe_structure(trees, missing, name, seeds, self.options, description)  # type: ignore[arg-type]
            result.layers |= scores
            result.trees |= edges
            return
        partitions = self.data.tasks[name]
        seeds_of_partitions = [seeds] if len(partitions) == 1 else [[seed] for seed in seeds]
        for task, task_seeds in zip(partitions, seeds_of_partitions, strict=True):
            inputs = representations.labeled(task, columns, missing)
            for layer, layer_scores in probe_layers(inputs, task_seeds, self.options, description).items():
                for metric, values in layer_scores.items():
                    result.layers.setdefault(layer, {}).setdefault(metric, []).extend(values)

    def _mix(
        self, task: ProbingTask, layers: Sequence[int], representations: Representations, description: str
    ) -> dict[str, Any]:
        """Compute the scores of layer mixes."""
        inputs = representations.labeled(task, list(range(len(layers))), list(layers))
        mixes = probe_mixes(inputs, list(self.seeds), self.options, description)
        return {
            "scores": mixes.scores.tolist(),
            "weights": mixes.weights.tolist(),
            "center_of_gravity": mixes.center_of_gravity().tolist(),
            "expected_layer": mixes.expected_layer().tolist(),
        }

    def _partial_key(self, name: str, weights: Weights, model_digest: str) -> str:
        """Key of a task's partial result, with a digest of all settings but the layers."""
        if name in self.data.structural:
            content: Any = [
                (sentence.words, sentence.heads) for split in self.data.trees.values() for sentence in split
            ]
        else:
            content = [vars(examples) for task in self.data.tasks[name] for examples in task.splits.values()]
        options = (
            type(self.options.probe).__name__,
            asdict(self.options),
            list(self.seeds),
            self.pooling,
            str(self.dtype),
        )
        digest = hashlib.blake2b(json.dumps([model_digest, options, content]).encode(), digest_size=8).hexdigest()
        return f"{name}, {weights}, {digest}"

    def baselines(self) -> dict[str, dict[str, float]]:
        """Scores without a model for each task: `majority` label, `word_majority`, or for trees the `chain`."""
        baselines = {}
        is_edge = isinstance(self.options.probe, EdgeOptions)
        for name, partitions in self.data.tasks.items():
            values: dict[str, list[float]] = {}
            for task in partitions:
                train, test = task.splits["train"], task.splits["test"]
                positive_label = None if is_edge else task.positive_label
                references = [example.labels for example in test.examples]
                for by_words in (False,) if task.is_sentence_level else (False, True):
                    baseline = "word_majority" if by_words else "majority"
                    predictions = majority_predictions(train, test, by_words=by_words)
                    values.setdefault(baseline, []).append(label_score(predictions, references, positive_label))
            baselines[name] = {baseline: sum(scores) / len(scores) for baseline, scores in values.items()}
        test_trees = [ParsedSentence.from_treebank(sentence, 0) for sentence in self.data.trees.get("test", ())]
        for name in self.data.structural:
            baselines[name] = {"chain": chain_baseline(test_trees, name)}  # type: ignore[arg-type]
        return baselines
