"""Files of word vectors, both ways, with gensim as the judge; and damaged ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forked import run_forked
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.static_embeddings import StaticEmbeddingModel
from hf_ctxmodels.conversion.word_vector_files import READERS, WRITERS
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.base import record_tokenizer_digest

SCRIPT = Path(__file__).resolve().parents[2] / "conversion" / "word_vectors.py"
STATIC = [name for name, family in FAMILIES.items() if issubclass(family.models["AutoModel"], StaticEmbeddingModel)]
VECTORS = WordVectors(
    ["the", "naïve", "Zürich", "東京", "x_y", "5,000"],
    np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32) * np.float32(10.0) ** np.arange(-4, 2)[:, None],
)
VECTORS.matrix = VECTORS.matrix.astype(np.float32)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("form", list(READERS))
def test_there_and_back(form: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"vectors{suffix}"
    WRITERS[form](VECTORS, path)
    again = READERS[form](path)
    assert list(again.words) == list(VECTORS.words)
    assert again.matrix.dtype == np.float32
    np.testing.assert_array_equal(again.matrix, VECTORS.matrix)


@pytest.mark.parametrize(
    ("form", "options"), [("word2vec-text", {}), ("word2vec-binary", {"binary": True}), ("glove", {"no_header": True})]
)
def test_gensim_reads_and_writes_the_same(form: str, options: dict, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models", reason="gensim is the judge (extra `demo`)")
    WRITERS[form](VECTORS, tmp_path / "ours")
    theirs = models.KeyedVectors.load_word2vec_format(tmp_path / "ours", **options)
    assert theirs.index_to_key == list(VECTORS.words)
    np.testing.assert_array_equal(theirs.vectors, VECTORS.matrix)
    if form != "glove":
        VECTORS.to_gensim().save_word2vec_format(tmp_path / "theirs", **options)
        ours = READERS[form](tmp_path / "theirs")
        assert sorted(ours.words) == sorted(VECTORS.words)
        np.testing.assert_array_equal(ours.matrix[ours.word_to_index["Zürich"]], VECTORS.matrix[2])


def test_gensim_keeps_counts() -> None:
    pytest.importorskip("gensim", reason="needs gensim (extra `demo`)")
    counted = WordVectors(VECTORS.words, VECTORS.matrix, [60, 50, 40, 30, 20, 10])
    again = WordVectors.from_gensim(counted.to_gensim())
    assert (again.words, again.counts) == (list(counted.words), counted.counts)
    np.testing.assert_array_equal(again.matrix, counted.matrix)
    assert WordVectors.from_gensim(VECTORS.to_gensim()).counts is None


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("word2vec-text", b"", "first line"),
        ("word2vec-text", b"the 1 2 3\n", "read it as glove"),
        ("word2vec-text", b"3 2\na 1 2\nb 3 4\n", "gives 3 words, but there are 2"),
        ("word2vec-text", b"2 2\na 1 2\nb 3\n", "line 3"),
        ("word2vec-text", b"1 2\na 1 x\n", "(?s)Not a number.*line 2"),
        ("word2vec-text", b"1 2\na 1 nan\n", "NaN"),
        ("word2vec-text", b"1 2\n\xff 1 2\n", "Not UTF-8"),
        ("glove", b"3 2\na 1 2\n", "read it as word2vec-text"),
        ("glove", b"a 1 2\nb 1 2 3 4 5 x\n", "line 2"),
        ("glove", b"a 1 2\nb 1\n", "line 2"),
        ("word2vec-binary", b"2 2\na " + np.ones(2, "<f4").tobytes(), "at word 0"),
        ("word2vec-binary", b"2 2\na 1234", "at word 0"),
        ("word2vec-binary", b"the 1 2\n", "first line"),
        ("word2vec-binary", b"1 2\n\xff\xfe " + np.ones(2, "<f4").tobytes(), "not UTF-8"),
    ],
)
def test_damaged_files(form: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vectors").write_bytes(content)
    with pytest.raises(CtxError, match=message):
        READERS[form](tmp_path / "vectors")


def test_missing_file(tmp_path: Path) -> None:
    for reader in READERS.values():
        with pytest.raises(CtxError, match="No such file"):
            reader(tmp_path / "nothing")


def test_repeated_words_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "vectors").write_text("a 1 2\nb 3 4\na 5 6\n")
    with pytest.warns(UserWarning, match="1 repeated"):
        found = READERS["glove"](tmp_path / "vectors")
    assert (found.words, found.matrix.tolist()) == (["a", "b"], [[1, 2], [3, 4]])


def test_words_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "vectors").write_text("a 1 2\n. . 3 4\n")
    found = READERS["glove"](tmp_path / "vectors")
    assert found.words == ["a", ". ."]
    with pytest.raises(CtxError, match="white space"):
        WRITERS["glove"](found, tmp_path / "again")


@pytest.mark.parametrize("family", STATIC)
def test_a_model_of_a_file(family: str, tmp_path: Path) -> None:
    """Through the script, the Auto classes, and back."""
    WRITERS["word2vec-binary"](VECTORS, tmp_path / "vectors.bin")

    def run(*flags: object) -> str:
        done = run_forked(SCRIPT, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run(
        "--read", "word2vec-binary", "--input", tmp_path / "vectors.bin", "--family", family, "--output", tmp_path / "m"
    )
    assert "6 words of 5 dimensions" in out
    model, tokenizer = AutoModel.from_pretrained(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    assert type(model) is FAMILIES[family].models["AutoModel"]
    batch = tokenizer(["naïve 東京", "5,000 unheard"], return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    np.testing.assert_array_equal(states[0].numpy(), VECTORS.matrix[[1, 3]])
    np.testing.assert_array_equal(states[1, 0].numpy(), VECTORS.matrix[5])
    assert not states[1, 1].any()
    run("--write", "glove", "--input", tmp_path / "m", "--output", tmp_path / "again.txt")
    np.testing.assert_array_equal(READERS["glove"](tmp_path / "again.txt").matrix, VECTORS.matrix)


def test_a_pickle_needs_permission(tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="needs gensim (extra `demo`)")
    VECTORS.to_gensim().save(str(tmp_path / "vectors.kv"))
    flags = [
        "--read",
        "gensim",
        "--input",
        tmp_path / "vectors.kv",
        "--family",
        STATIC[0],
        "--output",
        tmp_path / "model",
    ]
    refused = run_forked(SCRIPT, *flags)
    assert refused.returncode == 2
    assert "pickle" in refused.stderr
    allowed = run_forked(SCRIPT, *flags, "--allow_pickle")
    assert allowed.returncode == 0, allowed.stderr
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 8


def test_other_families_have_no_fixed_vectors() -> None:
    other = next(name for name in FAMILIES if name not in STATIC)
    with pytest.raises(CtxError, match="has no static embeddings"):
        VECTORS.to_model(other)


@pytest.mark.parametrize("family", STATIC)
def test_words_of_another_vocabulary_are_refused(family: str) -> None:
    """Of the same size: each vector would stand beside another word."""
    model, tokenizer = VECTORS.to_model(family)
    record_tokenizer_digest(model.config, tokenizer)
    assert WordVectors.from_model(model, tokenizer).words == VECTORS.words
    _, other = WordVectors([word + "s" for word in VECTORS.words], VECTORS.matrix).to_model(family)
    with pytest.raises(CtxError, match="tokenizer_digest"):
        WordVectors.from_model(model, other)
