"""Nearest words, analogies and word similarity, against numpy, scipy and gensim."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from hf_ctxmodels import CtxError
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.evaluation import (
    WordSpace,
    evaluate_analogies,
    evaluate_similarity,
    read_analogies,
    read_similarities,
)

WORDS = ["man", "king", "woman", "queen", "apple", "pear"]
MATRIX = np.array([[1, 0, 0.1], [1, 1, 0.1], [-1, 0, 0.1], [-1, 1, 0.1], [0, 0.1, 1], [0, 0.2, 1.1]], dtype=np.float32)


@pytest.fixture
def space() -> WordSpace:
    return WordSpace(WordVectors(WORDS, MATRIX, lower_case=True))


def test_most_similar_and_analogy(space) -> None:
    neighbors = space.most_similar("Apple", number=1)
    assert [word for word, _ in neighbors] == ["pear"]
    cosine = MATRIX[4] @ MATRIX[5] / np.linalg.norm(MATRIX[4]) / np.linalg.norm(MATRIX[5])
    assert neighbors[0][1] == pytest.approx(cosine, rel=1e-5)
    assert len(space.most_similar("apple", number=100)) == 5
    assert "kiwi" not in space
    with pytest.raises(CtxError, match="'kiwi' has no vector"):
        space.most_similar("kiwi")
    words = [word for word, _ in space.analogy("man", "king", "woman")]
    assert words[0] == "queen"
    assert not {*words} & {"man", "king", "woman"}


def test_most_similar_matches_gensim() -> None:
    pytest.importorskip("gensim", reason="compares with gensim (extra `demo`)")
    matrix = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    vectors = WordVectors([f"w{number}" for number in range(50)], matrix)
    space, reference = WordSpace(vectors), vectors.to_gensim()
    for actual, expected in (
        (space.most_similar("w3", 5), reference.most_similar("w3", topn=5)),
        (WordSpace(vectors, 20).most_similar("w3", 5), reference.most_similar("w3", topn=5, restrict_vocab=20)),
    ):
        assert [word for word, _ in actual] == [word for word, _ in expected]
        assert [value for _, value in actual] == pytest.approx([value for _, value in expected], rel=1e-5)


def test_similarity_matches_scipy(space, tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("apple\tpear\t9.5\nman\twoman\t6\nking\tapple\t1.0\nkiwi\tpear\t8\n")
    result = evaluate_similarity(space, read_similarities(path))
    cosines = [space.similarity(*pair) for pair in (("apple", "pear"), ("man", "woman"), ("king", "apple"))]
    assert (result.covered, result.pairs) == (3, 4)
    assert result.spearman == pytest.approx(spearmanr(cosines, [9.5, 6, 1])[0])


def test_analogy_accuracy(space, tmp_path: Path) -> None:
    path = tmp_path / "questions.txt.gz"
    path.write_bytes(
        gzip.compress(b": royal\nMan King Woman Queen\nman queen woman king\n: fruit\nman apple kiwi pear\n")
    )
    result = evaluate_analogies(space, read_analogies(path))
    assert result.sections["fruit"] == (0, 0, 1)
    assert result.sections["royal"][1:] == (2, 2)
    assert result.total == (result.sections["royal"][0], 2, 3)
    assert result.sections["royal"][0] == 1
    assert result.accuracy == 0.5
    restricted = evaluate_analogies(WordSpace(space.vectors, 3), read_analogies(path))
    assert restricted.total[1] == 1, "answers outside the searched words are not covered"
    without_questions = evaluate_analogies(space, {})
    assert without_questions.total == (0, 0, 0)
    assert np.isnan(without_questions.accuracy)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_similarities, "a\tb\t1\na b 2\n", "line 2"),
        (read_similarities, "a\tb\tmuch\n", "line 1"),
        (read_analogies, ": one\na b c\n", "line 2"),
        (read_analogies, "", "no test"),
    ],
)
def test_invalid_files_raise(read, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tests.txt").write_text(text)
    with pytest.raises(CtxError, match=message):
        read(tmp_path / "tests.txt")
