"""Tests of sentence vectors against scikit-learn, scipy and sums by hand."""

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


def blobs(rows: int, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (rows,), generator=generator)
    centres = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]])[:classes]
    return centres[targets] + 0.6 * torch.randn(rows, 4, generator=generator), targets


def test_relatedness_is_learned(tmp_path: Path) -> None:
    """A judgement that cosines do not tell: by how much one word has more of a letter."""
    generator = np.random.default_rng(0)
    words = [["".join(generator.choice(list(LETTERS), 6)) for _ in range(2)] for _ in range(300)]
    lines = [f"{a}\t{b}\t{abs(a.count('a') - b.count('a'))}" for a, b in words]
    files = []
    for name, part in (("train.tsv", lines[:200]), ("test.tsv", lines[200:])):
        files.append(str(tmp_path / name))
        Path(files[-1]).write_text("\n".join(["one\ttwo\tscore", *part]) + "\n")
    columns = ["one", "two", "score"]
    found = relatedness(letters, *files, columns)
    assert found.pearson > 0.99
    assert found.pairs == 100
    assert abs(similarity(letters, files[1], columns).pearson) < 0.6
    Path(files[0]).write_text("one\ttwo\tscore\na\tb\tmuch\n")
    with pytest.raises(CtxError, match=r"'much' is not a number[\s\S]*train.tsv:2"):
        relatedness(letters, *files, columns)


def test_probe_of_unseen_examples() -> None:
    (features, targets), (unseen, wanted) = blobs(400), blobs(300, seed=1)
    names = ["x", "y", "z"]
    found = probe(features, [names[each] for each in targets], unseen, [names[each] for each in wanted])
    expected = LogisticRegression().fit(features.numpy(), targets.numpy()).score(unseen.numpy(), wanted.numpy())
    assert found.accuracy == pytest.approx(expected, abs=0.02)
    assert found.examples == (400, 300)
    most = int(torch.bincount(targets).argmax())
    assert found.majority == pytest.approx(float((wanted == most).float().mean()))
    shuffled = wanted[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    assert probe(features, [names[each] for each in targets], unseen, [names[each] for each in shuffled]).accuracy < 0.5


def test_features_are_standardized_by_the_training_examples() -> None:
    (features, targets), (unseen, wanted) = blobs(200), blobs(100, seed=1)
    sides = [[str(int(each)) for each in side] for side in (targets, wanted)]
    found = [probe(scale * features + 5, sides[0], scale * unseen + 5, sides[1]) for scale in (1, 1000)]
    assert found[0].accuracy == found[1].accuracy
    # test examples that all have one label, and another mean
    features = torch.linspace(-1, 1, 40)[:, None]
    labels = ["low" if each < 0 else "high" for each in features]
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
    found = similarity(letters, str(tmp_path / "pairs.tsv"), ["first", "second", "score"])
    cosines = [
        float(np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v))
        for u, v in (letters(row[:2]).numpy() for row in pairs)
    ]
    assert found.spearman == pytest.approx(spearmanr(cosines, [row[2] for row in pairs])[0])
    assert found.pearson == pytest.approx(pearsonr(cosines, [row[2] for row in pairs])[0], abs=1e-6)
    assert found.pairs == 4
    (tmp_path / "pairs.tsv").write_text("first\tsecond\tscore\na\tb\tmuch\n")
    with pytest.raises(CtxError, match=r"'much' is not a number[\s\S]*tsv:2"):
        similarity(letters, str(tmp_path / "pairs.tsv"), ["first", "second", "score"])
    with pytest.raises(CtxError, match="got 2"):
        similarity(letters, str(tmp_path / "pairs.tsv"), ["first", "second"])


def test_classification_of_texts_and_pairs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list(LETTERS), 6)) for _ in range(300)]
    same = [bool(each) for each in generator.integers(2, size=300)]
    rows = [(word, word if equal else words[-1 - place]) for place, (word, equal) in enumerate(zip(words, same))]
    lines = [f"{a}\t{b}\t{int(equal)}\t{int('a' in a)}" for (a, b), equal in zip(rows, same)]
    for name, part in (("train.tsv", lines[:200]), ("test.tsv", lines[200:])):
        (tmp_path / name).write_text("\n".join(["one\ttwo\tequal\thas\t"[:-1], *part]) + "\n")
    files = [str(tmp_path / name) for name in ("train.tsv", "test.tsv")]
    assert classification(letters, *files, ["one", "two", "equal"]).accuracy > 0.95
    assert classification(letters, *files, ["one", "has"]).accuracy > 0.9
    with pytest.raises(CtxError, match="got 1"):
        classification(letters, *files, ["has"])


def naive_retrieval(source: np.ndarray, target: np.ndarray, neighbours: int | None) -> float:
    """One pair at a time."""
    cosines = np.array([[u @ v / np.linalg.norm(u) / np.linalg.norm(v) for v in target] for u in source])
    scores = cosines.copy()
    if neighbours is not None:
        for i, j in np.ndindex(*cosines.shape):
            near = np.sort(cosines[i])[-neighbours:].mean(), np.sort(cosines[:, j])[-neighbours:].mean()
            scores[i, j] = cosines[i, j] / (sum(near) / 2)
    return float((scores.argmax(1) == np.arange(len(source))).mean())


def test_retrieval() -> None:
    generator = np.random.default_rng(0)
    source = generator.normal(size=(60, 8)) + 0.5
    target = source + generator.normal(size=(60, 8))
    target[7] = target.mean(0)  # near everything
    sides = [torch.from_numpy(each) for each in (source, target)]
    found = [retrieval(*sides, each) for each in ("cosine", "margin")]
    assert found == [pytest.approx(naive_retrieval(source, target, each)) for each in (None, 4)]
    assert 1 / 60 < found[0] < found[1] < 1, "a test that tells the criteria apart"
    assert retrieval(sides[0], sides[0]) == 1
    with pytest.raises(CtxError, match="60 sentences and 59"):
        retrieval(sides[0], sides[1][:59])
