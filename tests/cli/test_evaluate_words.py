"""`hf-ctxmodels evaluate words` on hand-made vectors."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from forked import run_forked

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.registry import FAMILIES

COMMAND = ("-m", "hf_ctxmodels", "evaluate", "words")
WORDS = ["man", "king", "woman", "queen", "apple", "pear"]
MATRIX = np.array([[1, 0, 0.1], [1, 1, 0.1], [-1, 0, 0.1], [-1, 1, 0.1], [0, 0.1, 1], [0, 0.2, 1.1]], dtype=np.float32)


@pytest.fixture(scope="module", params=["word2vec", "glove"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    model, tokenizer = WordVectors(WORDS, MATRIX, lower_case=True).to_model(FAMILIES[request.param].name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(*flags: object) -> subprocess.CompletedProcess:
    return run_forked(*COMMAND, *flags)


def test_results(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("apple\tpear\t9.5\nman\twoman\t1\nking\tman\t6\nkiwi\tpear\t8\n")
    (tmp_path / "questions.txt").write_text(": royal\nman king woman queen\n: fruit\nman apple kiwi pear\n")
    done = run(
        *("--model", checkpoint, "--similarity", tmp_path / "pairs.txt", "--analogies", tmp_path / "questions.txt"),
        *("--near", "apple", "--analogy", "man", "king", "woman"),
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "pairs.txt spearman 1.0000 3 of 4 pairs" in lines
    assert "royal accuracy 100.0% 1 of 1 questions" in lines
    assert "fruit accuracy - 0 of 1 questions" in lines
    assert "all accuracy 100.0% 1 of 2 questions" in lines
    assert any(line.startswith("apple: pear 0.99") for line in lines)
    assert any(line.startswith("man : king = woman : queen") for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--analogy", "man", "king"), "three words"),
        (("--near", "kiwi"), "'kiwi' has no vector"),
        (("--similarity", "nothing.txt"), "No such file"),
    ],
)
def test_errors(checkpoint: Path, flags: tuple[str, ...], message: str) -> None:
    done = run("--model", checkpoint, *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
