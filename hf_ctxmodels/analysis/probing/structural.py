"""Structural probes: a linear map under which distances between words equal distances in the dependency tree, or
norms equal depths (Hewitt & Manning 2019)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse.csgraph import shortest_path
from scipy.stats import rankdata
from torch import Tensor, nn

from hf_ctxmodels.analysis.probing.probes import ProbeGrid, project
from hf_ctxmodels.analysis.probing.training import ProbeTraining, optimize_probes
from hf_ctxmodels.data.treebanks import TreebankSentence

StructuralTask = Literal["distance", "depth"]
SPEARMAN_LENGTHS = range(5, 51)
_BATCH_SENTENCES = 20
_MAX_SELECTION_SENTENCES = 500


@dataclass
class ParsedSentence:
    """The tree of a sentence.

    Attributes:
        first_row: Row of its first word in the table of vectors.
        distances: (words, words) number of arcs between two words.
        depths: (words,) number of arcs to the root.
        is_scored: (words,) bool: False for punctuation, which is not scored in trees and roots.
    """

    first_row: int
    distances: np.ndarray
    depths: np.ndarray
    is_scored: np.ndarray

    @classmethod
    def from_treebank(cls, sentence: TreebankSentence, first_row: int) -> "ParsedSentence":
        """Path lengths in the undirected tree of a treebank sentence."""
        depths = np.array(sentence.depths())
        arcs = np.zeros((len(depths), len(depths)))
        for word, head in enumerate(sentence.heads):
            if head >= 0:
                arcs[word, head] = 1
        distances = shortest_path(arcs, directed=False, unweighted=True)
        return cls(first_row, distances, depths, ~np.array(sentence.is_punctuation()))


class StructuralProbes(nn.Module):
    """Maps B of L layers and V seeds: squared distances |B (x - y)|^2 and squared norms |Bx|^2 (sections 2.1
    and 2.3).

    Initial weights are smaller than the published ±0.05, for vectors of variance 1 (see `standardize`), whose distances
    would be far larger than distances in trees.
    """

    def __init__(self, grid: ProbeGrid, rank: int) -> None:
        super().__init__()
        self.weight = grid.uniform(grid.hidden_size, rank, bound=0.005)

    def project(self, vectors: Tensor) -> Tensor:
        """(L, V, sentences, words, rank) of (L, sentences, words, hidden)."""
        return project(vectors.flatten(1, 2), self.weight).unflatten(2, vectors.shape[1:3])

    def distances(self, vectors: Tensor) -> Tensor:
        """(L, V, sentences, words, words)."""
        projected = self.project(vectors)
        norms = projected.square().sum(-1)
        products = projected @ projected.transpose(-1, -2)
        return (norms[..., :, None] + norms[..., None, :] - 2 * products).clamp_min(0)

    def depths(self, vectors: Tensor) -> Tensor:
        """(L, V, sentences, words)."""
        return self.project(vectors).square().sum(-1)


@dataclass
class TreeData:
    """Sentences with their vectors, (rows, layers, hidden)."""

    vectors: Tensor
    sentences: Sequence[ParsedSentence]
    layers: list[int] | None = None

    def batches(self, generator: torch.Generator | None, batch_size: int) -> Iterator[list[ParsedSentence]]:
        """Batches of sentences of similar length, in random order if there is a generator."""
        order = sorted(range(len(self.sentences)), key=lambda index: len(self.sentences[index].depths))
        groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        numbers = range(len(groups)) if generator is None else torch.randperm(len(groups), generator=generator).tolist()
        for number in numbers:
            yield [self.sentences[index] for index in groups[number]]

    def padded(self, batch: Sequence[ParsedSentence]) -> tuple[Tensor, Tensor]:
        """(L, sentences, words, hidden) vectors, 0 at padding, and (sentences, words) bool of real words."""
        length = max(len(sentence.depths) for sentence in batch)
        positions = torch.arange(length)
        lengths = torch.tensor([len(sentence.depths) for sentence in batch])
        is_word = positions < lengths[:, None]
        starts = torch.tensor([sentence.first_row for sentence in batch])
        rows = torch.where(is_word, starts[:, None] + positions, starts[:, None])
        vectors = self.vectors[rows.flatten()]
        if self.layers is not None:
            vectors = vectors[:, self.layers]
        vectors = vectors.float().transpose(0, 1).unflatten(1, rows.shape)
        return vectors * is_word[..., None], is_word


def _gold(batch: Sequence[ParsedSentence], task: StructuralTask, length: int) -> Tensor:
    """Padded gold distances (sentences, words, words) or depths (sentences, words)."""
    shape = (len(batch), length, length) if task == "distance" else (len(batch), length)
    gold = torch.zeros(shape)
    for row, sentence in enumerate(batch):
        size = len(sentence.depths)
        if task == "distance":
            gold[row, :size, :size] = torch.from_numpy(sentence.distances)
        else:
            gold[row, :size] = torch.from_numpy(sentence.depths)
    return gold


def structural_losses(
    probes: StructuralProbes, data: TreeData, batch: Sequence[ParsedSentence], task: StructuralTask
) -> Tensor:
    """(L, V) mean over sentences of the L1 loss, over the squared length for distances and the length for depths
    (equation 2)."""
    vectors, is_word = data.padded(batch)
    gold = _gold(batch, task, is_word.shape[1])
    lengths = is_word.sum(-1).float()
    if task == "distance":
        mask = is_word[:, :, None] & is_word[:, None, :]
        errors = (probes.distances(vectors) - gold).abs() * mask
        return (errors.sum((-2, -1)) / lengths.square()).mean(-1)
    errors = (probes.depths(vectors) - gold).abs() * is_word
    return (errors.sum(-1) / lengths).mean(-1)


def train_structural(
    probes: StructuralProbes,
    train: TreeData,
    dev: TreeData,
    task: StructuralTask,
    training: ProbeTraining,
    *,
    description: str,
) -> None:
    """Train structural probes on trees; see `optimize_probes`."""
    batches_per_epoch = -(-len(train.sentences) // _BATCH_SENTENCES)
    epochs = max(training.epochs, -(-training.min_steps // batches_per_epoch))
    generator = torch.Generator().manual_seed(0)
    selection = replace(dev, sentences=dev.sentences[:_MAX_SELECTION_SENTENCES])

    @torch.no_grad()
    def dev_losses() -> Tensor:
        batches = selection.batches(None, _BATCH_SENTENCES)
        return torch.stack([structural_losses(probes, selection, batch, task) * len(batch) for batch in batches]).sum(0)

    optimize_probes(
        probes,
        (batch for _ in range(epochs) for batch in train.batches(generator, _BATCH_SENTENCES)),
        lambda batch: structural_losses(probes, train, batch, task),
        dev_losses,
        training,
        steps=epochs * batches_per_epoch,
        description=description,
    )


@torch.no_grad()
def predict_structure(
    probes: StructuralProbes, data: TreeData, task: StructuralTask
) -> Iterator[tuple[ParsedSentence, np.ndarray]]:
    """Each sentence with its predicted (L, V, words, words) distances or (L, V, words) depths."""
    for batch in data.batches(None, _BATCH_SENTENCES):
        vectors, _ = data.padded(batch)
        predictions = (probes.distances if task == "distance" else probes.depths)(vectors).numpy()
        for row, sentence in enumerate(batch):
            size = len(sentence.depths)
            selected = predictions[:, :, row, :size]
            yield sentence, selected[..., :size] if task == "distance" else selected


def minimum_spanning_trees(distances: np.ndarray) -> np.ndarray:
    """Edges of the minimum spanning tree of each (..., words, words) matrix of distances, as (..., words - 1, 2) pairs
    with the smaller index first, by Prim's algorithm for all matrices at once."""
    *shape, size, _ = distances.shape
    matrices = distances.reshape(-1, size, size)
    numbers = np.arange(len(matrices))
    is_outside = np.ones((len(matrices), size), dtype=bool)
    is_outside[:, :1] = False
    nearest = np.zeros((len(matrices), size), dtype=np.int64)
    costs = matrices[:, 0].copy() if size else np.zeros((len(matrices), 0))
    edges = np.zeros((len(matrices), max(size - 1, 0), 2), dtype=np.int64)
    for step in range(size - 1):
        word = np.where(is_outside, costs, np.inf).argmin(1)
        edges[:, step] = np.sort(np.stack([nearest[numbers, word], word], 1), 1)
        is_outside[numbers, word] = False
        rows = matrices[numbers, word]
        is_nearer = rows < costs
        nearest = np.where(is_nearer, word[:, None], nearest)
        costs = np.minimum(costs, rows)
    return edges.reshape(*shape, max(size - 1, 0), 2)


def rank_correlations(predictions: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Spearman correlation of the last axis, nan if either side is constant; `gold` is broadcast."""
    ranks, gold_ranks = rankdata(predictions, axis=-1), rankdata(gold, axis=-1)
    ranks, gold_ranks = (values - values.mean(-1, keepdims=True) for values in (ranks, gold_ranks))
    norms = np.sqrt((ranks**2).sum(-1) * (gold_ranks**2).sum(-1))
    with np.errstate(invalid="ignore"):
        return np.where(norms > 0, (ranks * gold_ranks).sum(-1) / norms, np.nan)


class SpearmanByLength:
    """Spearman correlations, averaged over the rows of a sentence length, then over the lengths from 5 to 50
    (sections 3.1 and 3.2)."""

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}
        self._counts: dict[int, np.ndarray] = {}

    def add(self, length: int, correlations: np.ndarray) -> None:
        """Add the (L, V, rows) correlations of a sentence of `length` words; nan is left out."""
        if length in SPEARMAN_LENGTHS:
            valid = ~np.isnan(correlations)
            self._sums[length] = self._sums.get(length, 0) + np.where(valid, correlations, 0).sum(-1)
            self._counts[length] = self._counts.get(length, 0) + valid.sum(-1)

    def mean(self) -> np.ndarray | None:
        """(L, V) mean over the lengths with a correlation, nan without one; None if there is no sentence of these
        lengths."""
        if not self._sums:
            return None
        counts = np.stack([self._counts[length] for length in self._sums])
        means = np.stack([*self._sums.values()]) / np.maximum(counts, 1)
        num_lengths = (counts > 0).sum(0)
        return np.where(num_lengths > 0, means.sum(0) / np.maximum(num_lengths, 1), np.nan)


def scored_edges(distances: np.ndarray, is_scored: np.ndarray) -> np.ndarray:
    """Edges of the minimum spanning trees over the scored words, as word indices."""
    words = np.flatnonzero(is_scored)
    if len(words) < 2:
        return np.zeros((*distances.shape[:-2], 0, 2), dtype=np.int64)
    return words[minimum_spanning_trees(distances[..., words[:, None], words])]


def evaluate_distances(predictions: Iterator[tuple[ParsedSentence, np.ndarray]]) -> dict[str, np.ndarray]:
    """`uuas`, the share of gold edges between words without punctuation in the minimum spanning tree, over the corpus;
    and `spearman` (section 3.1), each (L, V)."""
    correct, total, spearman = 0, 0, SpearmanByLength()
    for sentence, distances in predictions:
        gold, edges = (scored_edges(matrix, sentence.is_scored) for matrix in (sentence.distances, distances))
        code = np.array([len(sentence.depths), 1])  # an edge as one number
        correct = correct + np.isin(edges @ code, gold @ code).sum(-1)
        total += len(gold)
        spearman.add(len(sentence.depths), rank_correlations(distances, sentence.distances))
    return _scores("uuas", correct, total, spearman)


def evaluate_depths(predictions: Iterator[tuple[ParsedSentence, np.ndarray]]) -> dict[str, np.ndarray]:
    """`root_accuracy`, the share of sentences whose least deep word, without punctuation, is the root, among sentences
    whose root is no punctuation; and `spearman` of all sentences (section 3.2), each (L, V)."""
    correct, total, spearman = 0, 0, SpearmanByLength()
    for sentence, depths in predictions:
        root = int(sentence.depths.argmin())
        is_root = np.where(sentence.is_scored, depths, np.inf).argmin(-1) == root
        correct = correct + (is_root & sentence.is_scored[root])
        total += bool(sentence.is_scored[root])
        spearman.add(len(sentence.depths), rank_correlations(depths, sentence.depths)[..., None])
    return _scores("root_accuracy", correct, total, spearman)


def _scores(name: str, correct: Any, total: int, spearman: SpearmanByLength) -> dict[str, np.ndarray]:
    scores = {name: np.asarray(correct) / max(total, 1)}
    correlation = spearman.mean()
    return scores if correlation is None else scores | {"spearman": correlation}


def chain_baseline(sentences: Sequence[ParsedSentence], task: StructuralTask) -> float:
    """UUAS of arcs between neighbors without punctuation; root accuracy of the first word without punctuation."""
    correct, total = 0, 0
    for sentence in sentences:
        words = np.flatnonzero(sentence.is_scored)
        if task == "depth":
            root = sentence.depths.argmin()
            total += bool(sentence.is_scored[root])
            correct += bool(len(words) and words[0] == root)
            continue
        gold = {tuple(edge) for edge in scored_edges(sentence.distances, sentence.is_scored).tolist()}
        total += len(gold)
        correct += sum((int(first), int(second)) in gold for first, second in pairwise(words))
    return correct / max(total, 1)
