"""Evaluations of sentence vectors against scikit-learn, scipy and loops."""

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
from hf_ctxmodels.evaluation import (
    classification,
    probe,
    read_labeled_splits,
    read_rated_splits,
    read_test_pairs,
    relatedness,
    retrieval,
    similarity,
)

LETTERS = "abcdefgh"


def letter_counts(sentences: Sequence[str]) -> Tensor:
    """Counts of each letter, (sentences, 8)."""
    return torch.tensor([[float(sentence.count(letter)) for letter in LETTERS] for sentence in sentences])


def write_splits(folder: Path, header: str, rows: list[str]) -> list[str]:
    """Write 200 training examples, and the others as test examples."""
    files = []
    for name, split_rows in (("train.tsv", rows[:200]), ("test.tsv", rows[200:])):
        (folder / name).write_text("\n".join([header, *split_rows]) + "\n")
        files.append(str(folder / name))
    return files


def blobs(size: int, num_classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(num_classes, (size,), generator=generator)
    centers = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])[:num_classes]
    return centers[targets] + 0.6 * torch.randn(size, 4, generator=generator), targets


def test_relatedness_is_learned(tmp_path: Path) -> None:
    """Scores that cosines do not predict: the difference in the counts of one letter."""
    generator = np.random.default_rng(0)
    words = [["".join(generator.choice(list(LETTERS), 6)) for _ in range(2)] for _ in range(300)]
    lines = [f"{a}\t{b}\t{abs(a.count('a') - b.count('a'))}" for a, b in words]
    files = write_splits(tmp_path, "one\ttwo\tscore", lines)
    columns = ["one", "two", "score"]
    result = relatedness(letter_counts, *read_rated_splits(*files, columns))
    assert result.pearson > 0.99
    assert result.pairs == 100
    assert abs(similarity(letter_counts, read_test_pairs(files[1], columns)).pearson) < 0.6
    Path(files[0]).write_text("one\ttwo\tscore\na\tb\tmuch\n")
    with pytest.raises(CtxError, match=r"'much' is not a number[\s\S]*train.tsv:2"):
        read_rated_splits(*files, columns)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": null, "label": "x"}', "Expected a text in column 'text', got None"),
        ('{"text": "a", "label": null}', "None is not a label"),
        ('{"text": "a", "label": " "}', "' ' is not a label"),
    ],
)
def test_invalid_cells_of_labeled_sentences(row: str, message: str, tmp_path: Path) -> None:
    """The columns are part of the flag --classification: there are no flags --text_columns and --label_column."""
    file = tmp_path / "train.jsonl"
    file.write_text(f'{{"text": "b", "label": "y"}}\n{row}\n')
    with pytest.raises(CtxError, match=rf"{message}[\s\S]*train.jsonl:2[\s\S]*Fix: correct the line, or name another"):
        read_labeled_splits(str(file), str(file), ["text", "label"])


def test_probe_matches_logistic_regression() -> None:
    (features, targets), (unseen, unseen_targets) = blobs(400), blobs(300, seed=1)
    labels, unseen_labels = (["xyz"[target] for target in side] for side in (targets, unseen_targets))
    result = probe(features, labels, unseen, unseen_labels)
    expected = LogisticRegression().fit(features.numpy(), targets.numpy()).score(unseen.numpy(), unseen_targets.numpy())
    assert result.accuracy == pytest.approx(expected, abs=0.02)
    assert result.examples == (400, 300)
    majority = int(torch.bincount(targets).argmax())
    assert result.majority == pytest.approx(float((unseen_targets == majority).float().mean()))
    shuffled = random.Random(0).sample(unseen_labels, 300)
    assert probe(features, labels, unseen, shuffled).accuracy < 0.5


def test_probe_standardizes_by_training_statistics() -> None:
    (features, targets), (unseen, unseen_targets) = blobs(200), blobs(100, seed=1)
    sides = [[str(int(label)) for label in side] for side in (targets, unseen_targets)]
    results = [probe(scale * features + 5, sides[0], scale * unseen + 5, sides[1]) for scale in (1, 1000)]
    assert results[0].accuracy == results[1].accuracy
    # test examples of one label, with a different mean
    features = torch.linspace(-1, 1, 40)[:, None]
    labels = ["low" if value < 0 else "high" for value in features]
    assert probe(features, labels, features[30:], labels[30:]).accuracy == 1.0


def test_unseen_labels_raise() -> None:
    features, _ = blobs(4)
    with pytest.raises(CtxError, match="'z'"):
        probe(features, ["x", "y", "x", "y"], features, ["x", "z", "x", "y"])
    with pytest.raises(CtxError, match=r"\['x'\]"):
        probe(features, ["x"] * 4, features, ["x"] * 4)


def test_similarity_matches_scipy(tmp_path: Path) -> None:
    pairs = [("ab", "ab", 5.0), ("abc", "ab", 3.5), ("ab", "cd", 1.0), ("aab", "abb", 4.0)]
    lines = ["first\tsecond\tscore", *("\t".join(map(str, row)) for row in pairs)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    file = str(tmp_path / "pairs.tsv")
    result = similarity(letter_counts, read_test_pairs(file, ["first", "second", "score"]))
    cosines = [
        float(np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v))
        for u, v in (letter_counts(row[:2]).numpy() for row in pairs)
    ]
    assert result.spearman == pytest.approx(spearmanr(cosines, [row[2] for row in pairs])[0])
    assert result.pearson == pytest.approx(pearsonr(cosines, [row[2] for row in pairs])[0], abs=1e-6)
    assert result.pairs == 4
    with pytest.raises(CtxError, match="got 2"):
        read_test_pairs(file, ["first", "second"])


def test_classification_of_texts_and_pairs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list(LETTERS), 6)) for _ in range(300)]
    is_equal = [bool(value) for value in generator.integers(2, size=300)]
    rows = [(word, word if equal else words[-1 - index]) for index, (word, equal) in enumerate(zip(words, is_equal))]
    lines = [f"{a}\t{b}\t{int(equal)}\t{int('a' in a)}" for (a, b), equal in zip(rows, is_equal)]
    files = write_splits(tmp_path, "one\ttwo\tequal\thas", lines)
    for columns, accuracy in ((["one", "two", "equal"], 0.95), (["one", "has"], 0.9)):
        assert classification(letter_counts, *read_labeled_splits(*files, columns)).accuracy > accuracy
    with pytest.raises(CtxError, match="got 1"):
        read_labeled_splits(*files, ["has"])


def retrieval_by_loops(source: np.ndarray, target: np.ndarray, neighbors: int | None) -> float:
    """Score one pair at a time."""
    cosines = np.array([[u @ v / np.linalg.norm(u) / np.linalg.norm(v) for v in target] for u in source])
    scores = cosines.copy()
    if neighbors is not None:
        for i, j in np.ndindex(*cosines.shape):
            neighborhoods = np.sort(cosines[i])[-neighbors:].mean(), np.sort(cosines[:, j])[-neighbors:].mean()
            scores[i, j] = cosines[i, j] / (sum(neighborhoods) / 2)
    return float((scores.argmax(1) == np.arange(len(source))).mean())


def test_retrieval_matches_loops() -> None:
    generator = np.random.default_rng(0)
    source = generator.normal(size=(60, 8)) + 0.5
    target = source + generator.normal(size=(60, 8))
    target[7] = target.mean(0)  # close to all sentences
    sides = [torch.from_numpy(vectors) for vectors in (source, target)]
    accuracies = [retrieval(*sides, criterion) for criterion in ("cosine", "margin")]
    with pytest.raises(CtxError, match="criterion='ratio' is unknown"):
        retrieval(*sides, "ratio")
    assert accuracies == [pytest.approx(retrieval_by_loops(source, target, neighbors)) for neighbors in (None, 4)]
    assert 1 / 60 < accuracies[0] < accuracies[1] < 1, "the criteria must differ"
    assert retrieval(sides[0], sides[0]) == 1
    with pytest.raises(CtxError, match="60 sentences and 59"):
        retrieval(sides[0], sides[1][:59])
