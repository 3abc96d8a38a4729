"""The suites of word vectors at their smallest, and what their tables say."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from benchmarks import words

from hf_ctxmodels import CtxError

pytest.importorskip("gensim", reason="compares with gensim (extra `demo`)")
CPU = (torch.device("cpu"), torch.float32, 1, "sdpa")
NAMES = [f"word{number}" for number in range(30)]


@pytest.fixture
def text(tmp_path: Path) -> str:
    rng = random.Random(0)
    documents = [" ".join(rng.choices(NAMES, k=400)) for _ in range(10)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    return str(tmp_path / "text.txt")


@pytest.fixture
def word_tests(tmp_path: Path) -> str:
    pairs = "\n".join(f"{a}\t{b}\t{number}" for number, (a, b) in enumerate(itertools.pairwise(NAMES)))
    for name in words.SIMILARITY_TESTS:
        (tmp_path / name).write_text(f"{pairs}\nnowhere\tword1\t1\n")
    (tmp_path / words.ANALOGY_TEST.removesuffix(".gz")).write_text(f": some\n{' '.join(NAMES[:4])}\n")
    return str(tmp_path)


def test_speed(text: str) -> None:
    results = list(words.run_speed(*CPU, dataset=text))
    assert [result.architecture for result in results] == ["skip-gram", "cbow"]
    for result in results:
        assert result.words == 4000
        assert len(result.ours) == len(result.gensim) == 1
        assert min(*result.ours, *result.gensim) > 0
    table = words.speed_table(results).splitlines()
    assert table[0].startswith("| architecture | words |")
    assert table[2].startswith("| skip-gram | 4,000 |")
    assert len(table) == 4
    assert [result.architecture for result in words.run_speed(*CPU, "cbow", dataset=text)] == ["cbow"]


def test_quality(text: str, word_tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ANALOGY_TEST", words.ANALOGY_TEST.removesuffix(".gz"))
    results = list(words.run_quality(*CPU, dataset=text, word_tests=word_tests, epochs=1))
    methods = ["ours, skip-gram", "gensim, skip-gram", "ours, cbow", "gensim, cbow", "ours, GloVe"]
    assert [result.method for result in results] == methods
    for result in results:
        assert result.covered == dict.fromkeys(result.covered, "29 of 30") | {"analogies": "1 of 1"}
        assert all(-1 <= value <= 1 for values in result.values.values() for value in values)
    table = words.quality_table(results).splitlines()
    assert "EN-SIMLEX-999 (29 of 30)" in table[0]
    assert len(table) == 2 + len(methods)


def test_quality_needs_tests(text: str) -> None:
    with pytest.raises(CtxError, match="tested, but on what"):
        next(words.run_quality(*CPU, dataset=text))
