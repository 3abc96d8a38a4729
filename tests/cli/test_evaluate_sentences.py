"""`hf-ctxmodels evaluate sentences` on hand-made vectors."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from forked import run_forked
from torch import Tensor

from hf_ctxmodels import CtxError, CtxXLMConfig, CtxXLMModel, CtxXLMTokenizer
from hf_ctxmodels.cli.evaluate import retrieval_lines
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.inference import encode_sentences

COMMAND = ("-m", "hf_ctxmodels", "evaluate", "sentences")
WORDS = ["cat", "dog", "tree", "katze", "hund", "baum"]
MATRIX = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0.1, 0], [0, 1, 0.1], [0.1, 0, 1]], dtype=np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for part in WordVectors(WORDS, MATRIX, lower_case=True).to_model("glove"):
        part.save_pretrained(folder)
    return folder


def run(*flags: object) -> subprocess.CompletedProcess:
    return run_forked(*COMMAND, *flags)


def test_results(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("cat,katze,5\ncat dog,dog,3\ncat,tree,0\n")
    rows = [f"{word} {other}\t{word}" for word in WORDS[:3] for other in WORDS[3:]]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows * 4]) + "\n")
    for name, words in (("en", WORDS[:3]), ("de", WORDS[3:])):
        (tmp_path / f"text.{name}.txt").write_text("\n".join(words) + "\n")
    rows_file = tmp_path / "rows.tsv"
    done = run(
        *("--model", checkpoint, "--similarity", f"{tmp_path / 'pairs.csv'}=1,2,3"),
        *("--relatedness", f"{tmp_path / 'pairs.csv'},{tmp_path / 'pairs.csv'}=1,2,3"),
        *("--classification", f"{rows_file},{rows_file}=text,label"),
        *("--retrieval", f"{tmp_path / 'text.en.txt'},{tmp_path / 'text.de.txt'}"),
    )
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("pairs.csv spearman 1.0000")
    assert lines[0].endswith("3 pairs")
    assert "pairs.csv spearman 1.0000 pearson 0.99" in lines[1], "the training pairs are also the test pairs"
    assert "majority 0.33" in lines[2]
    assert lines[3] == "text.en.txt -> text.de.txt cosine 1.0000 margin 1.0000 3 pairs"
    assert lines[4].startswith("text.de.txt -> text.en.txt cosine 1.0000")


def test_language_embeddings(tmp_path: Path) -> None:
    """Each side is read in its language; missing languages are an error."""
    texts = {"en": ["a cat", "a dog ran"], "de": ["eine Katze", "ein Hund lief"]}
    tagged = [f"<{code}> {text}" for code, lines in texts.items() for text in lines]
    tokenizer = CtxXLMTokenizer.train(tagged, 60, min_frequency=1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CtxXLMModel(CtxXLMConfig(vocab_size=len(tokenizer), n_langs=2, lang2id=tokenizer.lang2id, **sizes))
    for code, lines in texts.items():
        (tmp_path / f"text.{code}.txt").write_text("\n".join(lines))
    seen = {}

    def encode(lines: list[str]) -> Tensor:
        vectors = encode_sentences(model, tokenizer, lines, pooling="mean")
        seen[tokenizer.language] = vectors
        return vectors

    named = ",".join(f"{code}={tmp_path / f'text.{code}.txt'}" for code in texts)
    assert "text.en.txt -> text.de.txt" in retrieval_lines(encode, tokenizer, named)[0]
    assert [*seen] == ["en", "de"]
    tokenizer.language = "en"
    other = encode_sentences(model, tokenizer, texts["de"], pooling="mean")
    assert (other - seen["de"]).abs().max() > 1e-3
    tokenizer.language = None
    with pytest.raises(CtxError, match="langs is missing"):
        retrieval_lines(encode, tokenizer, ",".join(str(tmp_path / f"text.{code}.txt") for code in texts))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--similarity", "pairs.csv"), "pairs.csv"),
        (("--relatedness", "one.csv=1,2,3"), "one.csv=1,2,3"),
        (("--classification", "one.tsv=text,label"), "one.tsv=text,label"),
        (("--retrieval", "one.txt"), "one.txt"),
        (("--retrieval", "en=one.txt,two.txt"), "en=one.txt,two.txt"),
        (("--retrieval", "en=one.txt,de=two.txt"), "has no languages"),
        (("--similarity", "nothing.csv=1,2,3"), "No such file"),
    ],
)
def test_errors(checkpoint: Path, flags: tuple[str, ...], message: str) -> None:
    done = run("--model", checkpoint, *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
