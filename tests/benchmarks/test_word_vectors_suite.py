"""Suites `static` and `static-quality` on a tiny text, and their tables."""

import itertools
import random
from pathlib import Path

import pytest
from benchmarks import word_vectors
from benchmarks.settings import Settings

from hf_ctxmodels import CtxError

pytest.importorskip("gensim", reason="compares with gensim (extra `demo`)")
WORDS = [f"word{number}" for number in range(30)]


@pytest.fixture
def text(tmp_path: Path) -> str:
    rng = random.Random(0)
    documents = [" ".join(rng.choices(WORDS, k=400)) for _ in range(10)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    return str(tmp_path / "text.txt")


@pytest.fixture
def word_tests(tmp_path: Path) -> str:
    pairs = "\n".join(f"{a}\t{b}\t{number}" for number, (a, b) in enumerate(itertools.pairwise(WORDS)))
    for name in word_vectors.SIMILARITY_TESTS:
        (tmp_path / name).write_text(f"{pairs}\nnowhere\tword1\t1\n")
    (tmp_path / word_vectors.ANALOGY_TEST.removesuffix(".gz")).write_text(f": section\n{' '.join(WORDS[:4])}\n")
    return str(tmp_path)


def test_speed_suite(text: str) -> None:
    results = list(word_vectors.run_speed(Settings(repeats=1, dataset=text)))
    assert [result.architecture for result in results] == ["skip-gram", "cbow"]
    for result in results:
        assert result.words == 4000
        assert len(result.hf_ctxmodels) == len(result.gensim) == 1
        assert min(*result.hf_ctxmodels, *result.gensim) > 0
    table = word_vectors.speed_table(results).splitlines()
    assert table[0].startswith("| architecture | words |")
    assert table[2].startswith("| skip-gram | 4,000 |")
    assert len(table) == 4
    (result,) = word_vectors.run_speed(Settings(repeats=1, only="cbow", dataset=text))
    assert result.architecture == "cbow"


def test_quality_suite(text: str, word_tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_vectors, "ANALOGY_TEST", word_vectors.ANALOGY_TEST.removesuffix(".gz"))
    results = list(word_vectors.run_quality(Settings(repeats=1, dataset=text, word_tests=word_tests, epochs=1)))
    methods = [f"{package}, {name}" for name in ("skip-gram", "cbow") for package in ("hf_ctxmodels", "gensim")]
    methods.append("hf_ctxmodels, GloVe")
    assert [result.method for result in results] == methods
    for result in results:
        assert result.coverage == dict.fromkeys(result.coverage, "29 of 30") | {"analogies": "1 of 1"}
        assert all(-1 <= value <= 1 for values in result.values.values() for value in values)
    table = word_vectors.quality_table(results).splitlines()
    assert "EN-SIMLEX-999 (29 of 30)" in table[0]
    assert len(table) == 2 + len(methods)


def test_quality_requires_test_files(text: str) -> None:
    with pytest.raises(CtxError, match="static-quality needs test files"):
        next(word_vectors.run_quality(Settings(repeats=1, dataset=text)))
