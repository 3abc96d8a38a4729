"""Scores of the probes of one task for all layers: task, control task, code length, layer mixes, structure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.analysis.probing.controls import (
    ControlTask,
    online_code_length,
    shuffle_sentences,
    uniform_code_length,
)
from hf_ctxmodels.analysis.probing.probes import (
    EdgeOptions,
    LinearOptions,
    MixedProbes,
    ProbeGrid,
    ProbeOptions,
    build_probes,
)
from hf_ctxmodels.analysis.probing.structural import (
    StructuralProbes,
    StructuralTask,
    TreeData,
    evaluate_depths,
    evaluate_distances,
    predict_structure,
    scored_edges,
    train_structural,
)
from hf_ctxmodels.analysis.probing.tasks import SPLITS, ProbingTask
from hf_ctxmodels.analysis.probing.training import (
    ProbeData,
    ProbeTraining,
    evaluate_probes,
    label_targets,
    pool_spans,
    train_probes,
)
from hf_ctxmodels.core.errors import CtxError

Scores = dict[str, list[float]]
"""Name of a number -> its value for each seed."""


@dataclass
class ProbingOptions:
    """Options of the probes of a task.

    Attributes:
        probe: Probe and its options.
        training: Optimization.
        rank: Rank of structural probes.
        control_task, code_length: Whether to train probes of the control task, and on the portions of the online code.
    """

    probe: ProbeOptions = field(default_factory=LinearOptions)
    training: ProbeTraining = field(default_factory=ProbeTraining)
    rank: int = 64
    control_task: bool = True
    code_length: bool = True


@dataclass
class LabeledVectors:
    """The vectors of a task's examples.

    Attributes:
        task: The task.
        vectors: (rows, layers, hidden) standardized vectors.
        spans: Split -> (examples, slots, 2) rows of the spans of its examples.
        columns: Columns of `vectors` to probe, and `layers`, their numbers.
    """

    task: ProbingTask
    vectors: Tensor
    spans: dict[str, Tensor]
    columns: list[int]
    layers: list[int]

    def pooled(self) -> "LabeledVectors":
        """The same with one row for each span, the mean of its words."""
        sizes = [len(self.spans[split]) for split in SPLITS]
        vectors, spans = pool_spans(self.vectors, torch.cat([self.spans[split] for split in SPLITS]))
        spans_by_split = dict(zip(SPLITS, spans.split(sizes), strict=True))
        return replace(self, vectors=vectors, spans=spans_by_split)

    def data(self, split: str, targets: Tensor) -> ProbeData:
        """Examples of a split with (V, examples, ...) targets."""
        return ProbeData(self.vectors, self.spans[split], targets, self.columns)


def probe_layers(
    inputs: LabeledVectors, seeds: Sequence[int], options: ProbingOptions, description: str
) -> dict[int, Scores]:
    """Train and evaluate the probes of all layers, of the task and its control task, for all seeds together.

    Returns:
        For each layer: `score`; with a control task, `control` and `selectivity`; with code lengths, `bits`,
        `compression`, and `control_bits`, `control_compression`.
    """
    is_edge = isinstance(options.probe, EdgeOptions)
    if inputs.task.is_multilabel and not is_edge:
        raise CtxError(
            f"Examples of {inputs.task.name} have several labels.", location="--probe", hint="use --probe edge."
        )
    if not is_edge:
        inputs = inputs.pooled()
    has_control = options.control_task and not inputs.task.is_sentence_level
    variants = [("task", seed) for seed in seeds] + [("control", seed) for seed in seeds if has_control]
    targets = _targets(inputs.task, variants, is_edge)
    grid = _grid(inputs, [f"{target} {seed}" for target, seed in variants])

    probes = build_probes(grid, options.probe)
    dev = inputs.data("dev", targets["dev"])
    train_probes(probes, inputs.data("train", targets["train"]), dev, options.training, description=description)
    numbers = {"score": _test_scores(probes, inputs, variants, targets["test"])}
    if options.code_length and not is_edge:
        numbers["bits"] = _code_lengths(inputs, grid, targets["train"], dev, options, description)
        size = uniform_code_length(targets["train"].shape[1], grid.num_labels)
        numbers["compression"] = size / numbers["bits"]
    if has_control:
        for name, values in list(numbers.items()):
            control_name = "control" if name == "score" else f"control_{name}"
            numbers[name], numbers[control_name] = values.split(len(seeds), 1)
        numbers["selectivity"] = numbers["score"] - numbers["control"]
    return {
        layer: {name: values[row].tolist() for name, values in numbers.items()}
        for row, layer in enumerate(inputs.layers)
    }


def _grid(inputs: LabeledVectors, variants: list[str]) -> ProbeGrid:
    names = [f"{inputs.task.name} layer {layer}" for layer in inputs.layers]
    return ProbeGrid(names, variants, inputs.vectors.shape[-1], inputs.task.num_slots, len(inputs.task.labels))


def _targets(task: ProbingTask, variants: Sequence[tuple[str, int]], is_multilabel: bool) -> dict[str, Tensor]:
    """(V, examples) or (V, examples, labels) targets of each split: labels of the task or of a control task."""
    train_labels = [label for example in task.splits["train"].examples for label in example.labels]
    targets = {}
    for split, examples in task.splits.items():
        true_labels = label_targets([example.labels for example in examples.examples], task.labels, is_multilabel)
        types = examples.word_types()
        variant_targets = []
        for target, seed in variants:
            if target == "task":
                variant_targets.append(true_labels)
                continue
            control = ControlTask(train_labels, seed)
            labels = {word_type: (control.label(word_type),) for word_type in set(types)}
            control_labels = [labels[word_type] for word_type in types]
            variant_targets.append(label_targets(control_labels, task.labels, is_multilabel))
        targets[split] = torch.stack(variant_targets)
    return targets


def _test_scores(probes: Any, inputs: LabeledVectors, variants: Sequence[tuple[str, int]], targets: Tensor) -> Tensor:
    """(L, V) scores of the test examples. Labels that training lacks, which have no target, count as not predicted."""
    task, data = inputs.task, inputs.data("test", targets)
    if not data.is_multilabel:
        positive = task.positive_label
        return evaluate_probes(probes, data, None if positive is None else task.labels.index(positive)).score()
    unknown = sum(len(set(example.labels) - set(task.labels)) for example in task.splits["test"].examples)
    evaluation = evaluate_probes(probes, data)
    evaluation.expected += torch.tensor([unknown if target == "task" else 0 for target, _ in variants])
    return evaluation.score()


def _code_lengths(
    inputs: LabeledVectors,
    grid: ProbeGrid,
    train_targets: Tensor,
    dev: ProbeData,
    options: ProbingOptions,
    description: str,
) -> Tensor:
    """(L, V) bits of the training labels by the online code (Voita & Titov 2020, section 2.2.2)."""
    order, sizes = shuffle_sentences(inputs.task.splits["train"])
    spans, targets = inputs.spans["train"][order], train_targets[:, order]
    shuffled = ProbeData(inputs.vectors, spans, targets, inputs.columns)
    losses: list[Tensor] = []
    for number, (size, next_size) in enumerate(pairwise(sizes), 1):
        probes = build_probes(grid, options.probe)
        portion = f"{description}, portion {number} of {len(sizes) - 1}"
        train_probes(probes, shuffled.select(0, size), dev, options.training, description=portion)
        losses.append(evaluate_probes(probes, shuffled.select(size, next_size)).loss)
    bits = torch.zeros(len(grid.layers), len(grid.variants), dtype=torch.double)
    return bits + online_code_length(sizes[0], grid.num_labels, losses)


@dataclass
class MixScores:
    """Scores of learned mixes of the layers up to each one (Tenney et al. 2019, section 3.1 and 3.2).

    Attributes:
        scores: (layers, seeds) of the mix of the layers 0 to l.
        weights: (layers, seeds) of the mix of all layers.
    """

    scores: np.ndarray
    weights: np.ndarray

    def deltas(self) -> np.ndarray:
        """(layers - 1, seeds) gain of each layer from 1 on (equation 3)."""
        return np.diff(self.scores, axis=0)

    def center_of_gravity(self) -> np.ndarray:
        """(seeds,) mean layer by mixing weight (equation 2)."""
        return (np.arange(len(self.weights))[:, None] * self.weights).sum(0)

    def expected_layer(self) -> np.ndarray:
        """(seeds,) mean layer by gain, negative gains included; nan if all gains together are 0 (equation 4)."""
        deltas = self.deltas()
        total = deltas.sum(0)
        weighted = (np.arange(1, len(self.scores))[:, None] * deltas).sum(0)
        return np.where(total != 0, weighted / np.where(total != 0, total, 1), math.nan)


def probe_mixes(inputs: LabeledVectors, seeds: Sequence[int], options: ProbingOptions, description: str) -> MixScores:
    """Train probes of the mixes of the first layers, for all layers and seeds together."""
    is_edge = isinstance(options.probe, EdgeOptions)
    if not is_edge:
        inputs = inputs.pooled()
    variants = [("task", seed) for seed in seeds]
    targets = _targets(inputs.task, variants, is_edge)
    probes = MixedProbes(_grid(inputs, [f"task {seed}" for seed in seeds]), options.probe)
    train, dev = (inputs.data(split, targets[split]) for split in ("train", "dev"))
    train_probes(probes, train, dev, options.training, description=f"{description}, mixes")
    scores = _test_scores(probes, inputs, variants, targets["test"])
    weights = probes.mix_weights()[-1].detach().T  # (layers, seeds)
    return MixScores(scores.numpy(), weights.double().numpy())


def probe_structure(
    data: dict[str, TreeData],
    layers: Sequence[int],
    task: StructuralTask,
    seeds: Sequence[int],
    options: ProbingOptions,
    description: str,
) -> tuple[dict[int, Scores], dict[int, list[list[int]]]]:
    """Train and evaluate structural probes of all layers and seeds together.

    Returns:
        The scores of each layer, and for distances the predicted tree of the first test sentence of 6 to 14 words, with
        the first seed.
    """
    hidden_size = data["train"].vectors.shape[-1]
    grid = ProbeGrid([f"{task} layer {layer}" for layer in layers], [str(seed) for seed in seeds], hidden_size, 1, 1)
    probes = StructuralProbes(grid, min(options.rank, hidden_size))
    train_structural(probes, data["train"], data["dev"], task, options.training, description=description)
    evaluate = evaluate_distances if task == "distance" else evaluate_depths
    numbers = evaluate(predict_structure(probes, data["test"], task))
    main, *_ = numbers
    scores = {
        layer: {("score" if name == main else name): values[row].tolist() for name, values in numbers.items()}
        for row, layer in enumerate(layers)
    }
    example = example_index(len(sentence.depths) for sentence in data["test"].sentences)
    if task == "depth" or example is None:
        return scores, {}
    one_sentence = replace(data["test"], sentences=[data["test"].sentences[example]])
    [(sentence, distances)] = predict_structure(probes, one_sentence, task)
    edges = scored_edges(distances[:, 0], sentence.is_scored)
    return scores, {layer: edges[row].tolist() for row, layer in enumerate(layers)}


def example_index(lengths: Iterable[int]) -> int | None:
    """Index of the first sentence of 6 to 14 words; None if there is none."""
    return next((index for index, length in enumerate(lengths) if 6 <= length <= 14), None)
