"""Tests of sentence vectors against scikit-learn, scipy and sums by hand."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from hf_ctxmodels import CtxError
from hf_ctxmodels.evaluation import classification, probe, relatedness, retrieval, similarity

LETTERS = "abcdefgh"


def letters(sentences: Sequence[str]) -> Tensor:
    """(sentences, 8) how often each letter occurs."""
    return torch.tensor([[float(sentence.count(letter)) for letter in LETTERS] for sentence in sentences])


def write_splits(folder: Path, header: str, rows: list[str]) -> list[str]:
    """Files of 200 training examples and of the others."""
    files = []
    for name, part in (("train.tsv", rows[:200]), ("test.tsv", rows[200:])):
        (folder / name).write_text("\n".join([header, *part]) + "\n")
        files.append(str(folder / name))
    return files


def blobs(rows: int, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (rows,), generator=generator)
    centers = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])[:classes]
    return centers[targets] + 0.6 * torch.randn(rows, 4, generator=generator), targets


def test_relatedness_is_learned(tmp_path: Path) -> None:
    """A judgment that cosines do not tell: by how much one word has more of a letter."""
    generator = np.random.default_rng(0)
    words = [["".join(generator.choice(list(LETTERS), 6)) for _ in range(2)] for _ in range(300)]
    lines = [f"{a}\t{b}\t{abs(a.count('a') - b.count('a'))}" for a, b in words]
    files = write_splits(tmp_path, "one\ttwo\tscore", lines)
    columns = ["one", "two", "score"]
    result = relatedness(letters, *files, columns)
    assert result.pearson > 0.99
    assert result.pairs == 100
    assert abs(similarity(letters, files[1], columns).pearson) < 0.6
    Path(files[0]).write_text("one\ttwo\tscore\na\tb\tmuch\n")
    with pytest.raises(CtxError, match=r"'much' is not a number[\s\S]*train.tsv:2"):
        relatedness(letters, *files, columns)


def test_probe_of_unseen_examples() -> None:
    (features, targets), (unseen, unseen_targets) = blobs(400), blobs(300, seed=1)
    labels, unseen_labels = (["xyz"[target] for target in side] for side in (targets, unseen_targets))
    result = probe(features, labels, unseen, unseen_labels)
    expected = LogisticRegression().fit(features.numpy(), targets.numpy()).score(unseen.numpy(), unseen_targets.numpy())
    assert result.accuracy == pytest.approx(expected, abs=0.02)
    assert result.examples == (400, 300)
    most = int(torch.bincount(targets).argmax())
    assert result.majority == pytest.approx(float((unseen_targets == most).float().mean()))
    shuffled = random.Random(0).sample(unseen_labels, 300)
    assert probe(features, labels, unseen, shuffled).accuracy < 0.5


def test_features_are_standardized_by_the_training_examples() -> None:
    (features, targets), (unseen, unseen_targets) = blobs(200), blobs(100, seed=1)
    sides = [[str(int(label)) for label in side] for side in (targets, unseen_targets)]
    result = [probe(scale * features + 5, sides[0], scale * unseen + 5, sides[1]) for scale in (1, 1000)]
    assert result[0].accuracy == result[1].accuracy
    # test examples that all have one label, and another mean
    features = torch.linspace(-1, 1, 40)[:, None]
    labels = ["low" if value < 0 else "high" for value in features]
    assert probe(features, labels, features[30:], labels[30:]).accuracy == 1.0


def test_labels_that_training_has_not() -> None:
    features, _ = blobs(4)
    with pytest.raises(CtxError, match="'z'"):
        probe(features, ["x", "y", "x", "y"], features, ["x", "z", "x", "y"])
    with pytest.raises(CtxError, match=r"\['x'\]"):
        probe(features, ["x"] * 4, features, ["x"] * 4)


def test_similarity(tmp_path: Path) -> None:
    pairs = [("ab", "ab", 5.0), ("abc", "ab", 3.5), ("ab", "cd", 1.0), ("aab", "abb", 4.0)]
    lines = ["first\tsecond\tscore", *("\t".join(map(str, row)) for row in pairs)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    result = similarity(letters, str(tmp_path / "pairs.tsv"), ["first", "second", "score"])
    cosines = [
        float(np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v))
        for u, v in (letters(row[:2]).numpy() for row in pairs)
    ]
    assert result.spearman == pytest.approx(spearmanr(cosines, [row[2] for row in pairs])[0])
    assert result.pearson == pytest.approx(pearsonr(cosines, [row[2] for row in pairs])[0], abs=1e-6)
    assert result.pairs == 4
    with pytest.raises(CtxError, match="got 2"):
        similarity(letters, str(tmp_path / "pairs.tsv"), ["first", "second"])


def test_classification_of_texts_and_pairs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list(LETTERS), 6)) for _ in range(300)]
    same = [bool(value) for value in generator.integers(2, size=300)]
    rows = [(word, word if equal else words[-1 - place]) for place, (word, equal) in enumerate(zip(words, same))]
    lines = [f"{a}\t{b}\t{int(equal)}\t{int('a' in a)}" for (a, b), equal in zip(rows, same)]
    files = write_splits(tmp_path, "one\ttwo\tequal\thas", lines)
    assert classification(letters, *files, ["one", "two", "equal"]).accuracy > 0.95
    assert classification(letters, *files, ["one", "has"]).accuracy > 0.9
    with pytest.raises(CtxError, match="got 1"):
        classification(letters, *files, ["has"])


def naive_retrieval(source: np.ndarray, target: np.ndarray, neighbors: int | None) -> float:
    """One pair at a time."""
    cosines = np.array([[u @ v / np.linalg.norm(u) / np.linalg.norm(v) for v in target] for u in source])
    scores = cosines.copy()
    if neighbors is not None:
        for i, j in np.ndindex(*cosines.shape):
            near = np.sort(cosines[i])[-neighbors:].mean(), np.sort(cosines[:, j])[-neighbors:].mean()
            scores[i, j] = cosines[i, j] / (sum(near) / 2)
    return float((scores.argmax(1) == np.arange(len(source))).mean())


def test_retrieval() -> None:
    generator = np.random.default_rng(0)
    source = generator.normal(size=(60, 8)) + 0.5
    target = source + generator.normal(size=(60, 8))
    target[7] = target.mean(0)  # near everything
    sides = [torch.from_numpy(vectors) for vectors in (source, target)]
    accuracies = [retrieval(*sides, criterion) for criterion in ("cosine", "margin")]
    assert accuracies == [pytest.approx(naive_retrieval(source, target, neighbors)) for neighbors in (None, 4)]
    assert 1 / 60 < accuracies[0] < accuracies[1] < 1, "a test that tells the criteria apart"
    assert retrieval(sides[0], sides[0]) == 1
    with pytest.raises(CtxError, match="60 sentences and 59"):
        retrieval(sides[0], sides[1][:59])
