"""Structural probes against SciPy, NetworkX and planted trees."""

import networkx
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from hf_ctxmodels.analysis.probing.layer_scores import ProbingOptions, probe_structure
from hf_ctxmodels.analysis.probing.probes import ProbeGrid
from hf_ctxmodels.analysis.probing.structural import (
    ParsedSentence,
    SpearmanByLength,
    StructuralProbes,
    TreeData,
    chain_baseline,
    evaluate_depths,
    evaluate_distances,
    minimum_spanning_trees,
    rank_correlations,
    scored_edges,
    structural_losses,
)
from hf_ctxmodels.analysis.probing.training import ProbeTraining


def test_minimum_spanning_trees() -> None:
    """Tree weights equal those of NetworkX, also with zero distances; edges are equal if distances are distinct."""
    generator = np.random.default_rng(0)
    matrices = generator.random((2, 5, 9, 9))
    matrices[1, :, :4, :4] = 0
    matrices = np.minimum(matrices, matrices.swapaxes(-1, -2)) * (1 - np.eye(9))
    trees = minimum_spanning_trees(matrices)
    for index in np.ndindex(2, 5):
        expected = networkx.minimum_spanning_tree(networkx.from_numpy_array(matrices[index] + 1))
        edges = trees[index].tolist()
        assert sum(matrices[index][i, j] for i, j in edges) == pytest.approx(
            sum(data["weight"] - 1 for *_, data in expected.edges(data=True))
        )
        if index[0] == 0:
            assert {tuple(edge) for edge in edges} == {tuple(sorted(edge)) for edge in expected.edges}
    assert minimum_spanning_trees(np.zeros((3, 1, 1))).shape == (3, 0, 2)


def test_rank_correlations() -> None:
    generator = np.random.default_rng(0)
    predictions, gold = generator.random((2, 3, 6, 8)), generator.integers(0, 4, (6, 8))
    result = rank_correlations(predictions, gold)
    for index in np.ndindex(2, 3, 6):
        assert result[index] == pytest.approx(spearmanr(predictions[index], gold[index[-1]]).statistic)
    assert np.isnan(rank_correlations(predictions, np.ones((6, 8)))).all()


def random_tree(generator: np.random.Generator, size: int, first_row: int) -> ParsedSentence:
    heads = [-1, *(int(generator.integers(0, word)) for word in range(1, size))]
    order = generator.permutation(size)
    graph = networkx.Graph([(order[word], order[head]) for word, head in enumerate(heads) if head >= 0])
    lengths = dict(networkx.all_pairs_shortest_path_length(graph))
    distances = np.array([[lengths[i][j] for j in range(size)] for i in range(size)], dtype=float)
    is_scored = np.ones(size, dtype=bool)
    return ParsedSentence(first_row, distances, distances[order[0]].astype(int), is_scored)


def pythagorean_embedding(sentence: ParsedSentence, width: int) -> torch.Tensor:
    """Vectors whose squared distances are tree distances and whose squared norms are depths (Coenen et al. 2019)."""
    vectors = torch.zeros(len(sentence.depths), width)
    for number, word in enumerate(np.argsort(sentence.depths)):
        parents = np.flatnonzero((sentence.distances[word] == 1) & (sentence.depths < sentence.depths[word]))
        if len(parents):
            vectors[word] = vectors[parents[0]]
            vectors[word, number] = 1
    return vectors


def planted_data(sizes: dict[str, int]) -> dict[str, TreeData]:
    """Layer 0: rotated planted embeddings and as many noise dimensions; layer 1: only noise."""
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(16, 16)).Q
    trees: dict[str, list[ParsedSentence]] = {}
    vectors: list[torch.Tensor] = []
    start = 0
    for split, count in sizes.items():
        trees[split] = []
        for _ in range(count):
            sentence = random_tree(generator, int(generator.integers(5, 9)), start)
            start += len(sentence.depths)
            signal = torch.cat([pythagorean_embedding(sentence, 8), torch.randn(len(sentence.depths), 8)], 1) @ rotation
            vectors.append(torch.stack([signal, torch.randn_like(signal)], 1))
            trees[split].append(sentence)
    all_vectors = torch.cat(vectors)
    return {split: TreeData(all_vectors, sentences, [0, 1]) for split, sentences in trees.items()}


def test_planted_trees_are_recovered() -> None:
    """From the layer with planted trees, not from the noise layer."""
    data = planted_data({"train": 150, "dev": 20, "test": 40})
    options = ProbingOptions(training=ProbeTraining(learning_rate=0.03, epochs=20, min_steps=1), rank=8)
    scores, edges = probe_structure(data, [3, 7], "distance", [0, 1], options, "distance")
    assert min(scores[3]["score"]) > 0.9
    assert max(scores[7]["score"]) < 0.6
    assert min(scores[3]["spearman"]) > 0.9
    assert {len(edges[layer]) for layer in (3, 7)} == {
        next(len(tree.depths) for tree in data["test"].sentences if len(tree.depths) >= 6) - 1
    }
    scores, _ = probe_structure(data, [3, 7], "depth", [0, 1], options, "depth")
    assert min(scores[3]["score"]) > 0.9
    assert max(scores[7]["score"]) < 0.6


def test_loss_of_padded_batch() -> None:
    """The loss of a padded batch is the mean of the losses of single sentences and equals the formula."""
    data = planted_data({"train": 6})["train"]
    probes = StructuralProbes(ProbeGrid(["0", "1"], ["a"], 16, 1, 1), rank=4)
    for task in ("distance", "depth"):
        losses = [structural_losses(probes, data, [sentence], task)[0, 0] for sentence in data.sentences]  # type: ignore[arg-type]
        batch_loss = structural_losses(probes, data, data.sentences, task)[0, 0]  # type: ignore[arg-type]
        torch.testing.assert_close(batch_loss, torch.stack(losses).mean())
    sentence = data.sentences[0]
    size = len(sentence.depths)
    projected = data.vectors[:size, 0] @ probes.weight[0, 0]
    expected = torch.cdist(projected, projected).square() - torch.from_numpy(sentence.distances)
    loss = structural_losses(probes, data, [sentence], "distance")[0, 0]
    torch.testing.assert_close(loss, (expected.abs().sum() / size**2).float(), atol=1e-3, rtol=1e-3)


def test_scores_exclude_punctuation() -> None:
    """The chain a - b - "," - c: without the comma, c is connected to b, and the root is the first scored word."""
    sentence = ParsedSentence(
        0, np.abs(np.arange(4)[:, None] - np.arange(4)).astype(float), np.arange(4), np.array([True, True, False, True])
    )
    assert scored_edges(sentence.distances, sentence.is_scored).tolist() == [[0, 1], [1, 3]]
    assert chain_baseline([sentence], "distance") == 1.0
    predicted = np.array([[[[0, 1, 9, 1], [1, 0, 9, 3], [9, 9, 0, 9], [1, 3, 9, 0]]]], dtype=float)
    scores = evaluate_distances(iter([(sentence, predicted)]))
    assert scores["uuas"].tolist() == [[0.5]]
    assert "spearman" not in scores, "no sentence of 5 to 50 words"
    depths = np.array([[[1.0, 2.0, 0.0, 3.0]]])
    assert evaluate_depths(iter([(sentence, depths)]))["root_accuracy"].tolist() == [[1.0]]


def test_roots_that_are_punctuation() -> None:
    """They have no root accuracy, but a correlation, as distances have."""
    words = np.arange(5)
    distances = np.abs(words[:, None] - words).astype(float)
    sentences = [ParsedSentence(0, distances, words, words > root) for root in (-1, 0)]
    predictions = [np.array([[[0.0, 1.0, 2.0, 3.0, 4.0]]]), np.array([[[4.0, 3.0, 2.0, 1.0, 0.0]]])]
    scores = evaluate_depths(iter(zip(sentences, predictions)))
    assert {name: values.tolist() for name, values in scores.items()} == {"root_accuracy": [[1.0]], "spearman": [[0.0]]}
    assert evaluate_depths(iter([(sentences[1], predictions[1])]))["root_accuracy"].shape == (1, 1)


def test_spearman_is_averaged_by_length() -> None:
    spearman = SpearmanByLength()
    for length, value in ((5, 1.0), (5, 0.0), (7, 0.2), (51, 0.9)):
        spearman.add(length, np.full((1, 1, length), value))
    spearman.add(7, np.full((1, 1, 7), np.nan))
    assert spearman.mean() == pytest.approx(np.array([[0.35]]))
    spearman.add(9, np.full((1, 1, 9), np.nan))
    assert spearman.mean() == pytest.approx(np.array([[0.35]])), "a length without any correlation is left out"
    undefined = SpearmanByLength()
    undefined.add(9, np.full((1, 1, 9), np.nan))
    assert np.isnan(undefined.mean()).all()
