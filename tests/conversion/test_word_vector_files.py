"""Word vector files: round trips, compatibility with gensim, and damaged files."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import command_output, run_command
from transformers import AutoModel, AutoTokenizer

from hf_ctxmodels import CtxError
from hf_ctxmodels.architectures.static_embeddings import StaticEmbeddingModel
from hf_ctxmodels.conversion.word_vector_files import READERS, WRITERS
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.base import record_tokenizer_digest

COMMAND = "convert word-vectors"
STATIC = [name for name, family in FAMILIES.items() if issubclass(family.models["AutoModel"], StaticEmbeddingModel)]
VECTORS = WordVectors(
    ["the", "naïve", "Zürich", "東京", "x_y", "5,000"],
    (np.random.default_rng(0).standard_normal((6, 5)) * 10.0 ** np.arange(-4, 2)[:, None]).astype(np.float32),
)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("file_format", list(READERS))
def test_write_and_read(file_format: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"vectors{suffix}"
    WRITERS[file_format](VECTORS, path)
    loaded = READERS[file_format](path)
    assert list(loaded.words) == list(VECTORS.words)
    assert loaded.matrix.dtype == np.float32
    np.testing.assert_array_equal(loaded.matrix, VECTORS.matrix)


@pytest.mark.parametrize(
    ("file_format", "options"),
    [("word2vec-text", {}), ("word2vec-binary", {"binary": True}), ("glove", {"no_header": True})],
)
def test_files_are_compatible_with_gensim(file_format: str, options: dict, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models", reason="needs gensim (extra `demo`)")
    WRITERS[file_format](VECTORS, tmp_path / "vectors")
    keyed_vectors = models.KeyedVectors.load_word2vec_format(tmp_path / "vectors", **options)
    assert keyed_vectors.index_to_key == list(VECTORS.words)
    np.testing.assert_array_equal(keyed_vectors.vectors, VECTORS.matrix)
    if file_format != "glove":
        VECTORS.to_gensim().save_word2vec_format(tmp_path / "gensim", **options)
        loaded = READERS[file_format](tmp_path / "gensim")
        assert sorted(loaded.words) == sorted(VECTORS.words)
        np.testing.assert_array_equal(loaded.matrix[loaded.word_to_index["Zürich"]], VECTORS.matrix[2])


def test_gensim_round_trip_keeps_counts() -> None:
    pytest.importorskip("gensim", reason="needs gensim (extra `demo`)")
    vectors = WordVectors(VECTORS.words, VECTORS.matrix, [60, 50, 40, 30, 20, 10])
    converted = WordVectors.from_gensim(vectors.to_gensim())
    assert (converted.words, converted.counts) == (list(vectors.words), vectors.counts)
    np.testing.assert_array_equal(converted.matrix, vectors.matrix)
    assert WordVectors.from_gensim(VECTORS.to_gensim()).counts is None


@pytest.mark.parametrize(
    ("file_format", "content", "message"),
    [
        ("word2vec-text", b"", "first line"),
        ("word2vec-text", b"the 1 2 3\n", "format glove"),
        ("word2vec-text", b"3 2\na 1 2\nb 3 4\n", "3 words, but there are 2"),
        ("word2vec-text", b"2 2\na 1 2\nb 3\n", "line 3"),
        ("word2vec-text", b"1 2\na 1 x\n", "(?s)Not a number.*line 2"),
        ("word2vec-text", b"1 2\na 1 nan\n", "NaN"),
        ("word2vec-text", b"1 2\n\xff 1 2\n", "Not UTF-8"),
        ("glove", b"3 2\na 1 2\n", "word2vec-text"),
        ("glove", b"a 1 2\nb 1 2 3 4 5 x\n", "line 2"),
        ("glove", b"a 1 2\nb 1\n", "line 2"),
        ("word2vec-binary", b"2 2\na " + np.ones(2, "<f4").tobytes(), "at word 0"),
        ("word2vec-binary", b"2 2\na 1234", "at word 0"),
        ("word2vec-binary", b"1 1\na 1234\nb 5678\n", "specifies 1 words, but the file continues"),
        ("word2vec-binary", b"the 1 2\n", "first line"),
        ("word2vec-binary", b"\xba\x16O/\x0c\0\0\0" + bytes(99), "a model of fastText"),
        ("word2vec-binary", b"1 2\n\xff\xfe " + np.ones(2, "<f4").tobytes(), "not UTF-8"),
    ],
)
def test_damaged_files_raise(file_format: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vectors").write_bytes(content)
    with pytest.raises(CtxError, match=message):
        READERS[file_format](tmp_path / "vectors")


def test_missing_files_and_unusual_words(tmp_path: Path) -> None:
    """Repeated words are ignored; words with spaces can be read but not written."""
    for reader in READERS.values():
        with pytest.raises(CtxError, match="No such file"):
            reader(tmp_path / "missing")
    (tmp_path / "vectors").write_text("a 1 2\nb 3 4\na 5 6\n")
    with pytest.warns(UserWarning, match="1 repeated"):
        vectors = READERS["glove"](tmp_path / "vectors")
    assert (vectors.words, vectors.matrix.tolist()) == (["a", "b"], [[1, 2], [3, 4]])
    (tmp_path / "vectors").write_text("a 1 2\n. . 3 4\n")
    vectors = READERS["glove"](tmp_path / "vectors")
    assert vectors.words == ["a", ". ."]
    (tmp_path / "no-break-space").write_text("\u00a0 1 2 3\na 4 5 6\n")
    assert READERS["glove"](tmp_path / "no-break-space").words == ["\u00a0", "a"]
    with pytest.raises(CtxError, match="white space"):
        WRITERS["glove"](vectors, tmp_path / "copy")


@pytest.mark.parametrize("family", STATIC)
def test_conversion_command(family: str, tmp_path: Path) -> None:
    WRITERS["word2vec-binary"](VECTORS, tmp_path / "vectors.bin")
    directory = tmp_path / "model"
    source = {"input_format": "word2vec-binary", "input": tmp_path / "vectors.bin"}
    assert "6 words of 5 dimensions" in command_output(COMMAND, **source, family=family, output=directory)
    model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert type(model) is FAMILIES[family].models["AutoModel"]
    batch = tokenizer(["naïve 東京", "5,000 unheard"], return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    np.testing.assert_array_equal(states[0].numpy(), VECTORS.matrix[[1, 3]])
    np.testing.assert_array_equal(states[1, 0].numpy(), VECTORS.matrix[5])
    assert not states[1, 1].any()
    command_output(COMMAND, output_format="glove", input=directory, output=tmp_path / "vectors.txt")
    np.testing.assert_array_equal(READERS["glove"](tmp_path / "vectors.txt").matrix, VECTORS.matrix)


def test_failed_write_of_gensim_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("gensim.models", reason="needs gensim (extra `demo`)")
    save = models.KeyedVectors.save

    def fail_after_writing(self: Any, file: str) -> None:
        save(self, file)
        raise OSError(errno.ENOSPC, "No space left on device")

    WRITERS["glove"](VECTORS, tmp_path / "vectors.txt")
    source = {"input_format": "glove", "input": tmp_path / "vectors.txt", "family": STATIC[0]}
    command_output(COMMAND, **source, output=tmp_path / "model")
    flags = {"output_format": "gensim", "input": tmp_path / "model", "output": tmp_path / "out" / "vectors.kv"}
    monkeypatch.setattr(models.KeyedVectors, "save", fail_after_writing)
    assert "free disk space there" in command_output(COMMAND, **flags, fails=True)
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setattr(models.KeyedVectors, "save", save)
    command_output(COMMAND, **flags)
    assert models.KeyedVectors.load(str(flags["output"])).index_to_key == list(VECTORS.words)


def test_pickles_require_allow_pickle(tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="needs gensim (extra `demo`)")
    VECTORS.to_gensim().save(str(tmp_path / "vectors.kv"))
    flags = ["--input_format", "gensim", "--input", tmp_path / "vectors.kv"]
    flags += ["--family", STATIC[0], "--output", tmp_path / "model"]
    assert "pickle" in command_output(COMMAND, *flags, fails=True)
    command_output(COMMAND, *flags, "--allow_pickle")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 8
    (tmp_path / "vectors.kv").write_text("2 3\n")
    error = command_output(COMMAND, *flags, "--allow_pickle", "--overwrite", fails=True)
    assert "cannot be read as word vectors of gensim" in error
    assert "pass --family" in command_output(
        COMMAND, input=tmp_path / "none", input_format="glove", output=tmp_path / "out", fails=True
    )


@pytest.mark.parametrize("family", STATIC)
def test_tokenizer_with_different_words_raises(family: str) -> None:
    """A vocabulary of the same size with other words is an error."""
    model, tokenizer = VECTORS.to_model(family)
    record_tokenizer_digest(model.config, tokenizer)
    assert WordVectors.from_model(model, tokenizer).words == VECTORS.words
    _, other_tokenizer = WordVectors([word + "s" for word in VECTORS.words], VECTORS.matrix).to_model(family)
    with pytest.raises(CtxError, match="tokenizer_digest"):
        WordVectors.from_model(model, other_tokenizer)
    with pytest.raises(CtxError, match="has no static embeddings"):
        VECTORS.to_model("bert")


@pytest.mark.parametrize("flags", [{"family": "glove"}, {"lower_case": "true"}, {"allow_pickle": "true"}])
def test_flags_of_the_other_direction_are_an_error(flags, tmp_path, capsys) -> None:
    assert run_command(*COMMAND.split(), input="m", output=tmp_path / "v.txt", output_format="glove", **flags) == 2
    assert f"--{next(iter(flags))} cannot be combined with --output_format" in capsys.readouterr().err
