"""`hf-ctxmodels data prepare`: training on prepared or cached examples equals training on examples in memory."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import fsspec
import pytest
import torch
from commands import command_output, flag_list, run_command
from forked import ForkedProcess
from safetensors.torch import load_file
from training_runs import WORDS, log_without_speed
from zoo import TINY

from hf_ctxmodels import CtxBertConfig, CtxBertTokenizer, CtxCoveTokenizer, CtxGloveTokenizer
from hf_ctxmodels.core.console import format_number
from hf_ctxmodels.data import document_sources, load_documents
from hf_ctxmodels.data import documents as documents_module
from hf_ctxmodels.data.prepared import PreparedCorpus
from hf_ctxmodels.tokenizers.word_level import TRANSLATION_SEPARATOR
from hf_ctxmodels.training import corpora

TRAINING = {"per_device_batch_size": 8, "dataloader_workers": 0, "max_steps": 6, "save_steps": 3, "logging_steps": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """text.txt of 60 documents in several parts, tiny.json, and a tokenizer."""
    for module in (documents_module, document_sources):
        monkeypatch.setattr(module, "PART_BYTES", 4000)
    rng = random.Random(0)
    documents = ["\n".join(" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(4)) for _ in range(60)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents) + "\n")
    tokenizer = CtxBertTokenizer.train(documents, vocab_size=80, min_frequency=1)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fields = {name: value for name, value in TINY.items() if name in CtxBertConfig.__dataclass_fields__}
    (tmp_path / "tiny.json").write_text(json.dumps({**fields, "vocab_size": len(tokenizer)}))
    return tmp_path


def text_flags(folder: Path) -> dict[str, Any]:
    flags = {"family": "bert", "tokenizer": folder / "tokenizer", "dataset": folder / "text.txt", "max_length": 32}
    return flags | {"validation_fraction": 0.2}


def train(folder: Path, output_name: str, *args: str, **flags: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run `pretrain`; returns the log and the weights."""
    flags = {"config": folder / "tiny.json", **TRAINING, **flags, "output_dir": folder / output_name}
    assert run_command("pretrain", *args, **flags) == 0
    return log_without_speed(folder / output_name), load_file(folder / output_name / "model.safetensors")


def assert_same_run(first: tuple[list[Any], dict[str, torch.Tensor]], second: Any) -> None:
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_training_on_prepared_examples_matches_text(folder: Path, capsys: Any) -> None:
    in_memory = train(folder, "memory", **text_flags(folder))
    prepared = folder / "prepared"
    capsys.readouterr()
    for index in range(2):
        flags = text_flags(folder) | {"output_dir": prepared, "shard": f"{index}/2"}
        assert run_command("data", "prepare", **flags, num_proc=1) == 0
        assert "next:" not in capsys.readouterr().out, "one shard does not complete the directory"
    assert "no complete set" in command_output(
        "pretrain", dataset=prepared, family="bert", output_dir=folder / "x", fails=True
    )
    assert run_command("data", "prepare", "--merge", **text_flags(folder), output_dir=prepared) == 0
    assert "validation" in capsys.readouterr().out
    assert_same_run(in_memory, train(folder, "out", dataset=prepared))

    # resumes from the first checkpoint, without the text
    (folder / "text.txt").unlink()
    for path in (folder / "out").glob("checkpoint-6"):
        path.rename(folder / "last")
    assert_same_run(in_memory, train(folder, "out", "--resume", dataset=prepared))


def test_held_out_documents_are_not_prepared_without_held_out_loss(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(corpora, "SMALLEST_CACHED_TEXT", 0)
    monkeypatch.setattr(corpora, "HF_HOME", str(folder / "home"))
    tokenizer = CtxGloveTokenizer.train((folder / "text.txt").read_text().splitlines(), vocab_size=30)
    tokenizer.save_pretrained(folder / "words")
    flags = text_flags(folder) | {"family": "glove", "tokenizer": folder / "words"}
    model = {"config": "tiny", "config_options": f"vocab_size={len(tokenizer)}"}
    in_memory = train(folder, "memory", "--no_cache", **flags, **model)
    assert_same_run(in_memory, train(folder, "cached", **flags, **model))
    assert run_command("data", "prepare", **flags, output_dir=folder / "prepared") == 0
    assert_same_run(in_memory, train(folder, "out", dataset=folder / "prepared", **model))


# Preparation in a process that the test kills when one part is complete.
KILLED_PREPARATION = """
import hf_ctxmodels.data.document_sources, hf_ctxmodels.data.documents
for module in (hf_ctxmodels.data.document_sources, hf_ctxmodels.data.documents):
    module.PART_BYTES = 4000
from hf_ctxmodels.cli import prepare_corpus
prepare_corpus.main()
"""


def test_killed_preparation_is_resumed(folder: Path) -> None:
    flags = flag_list(**text_flags(folder), output_dir=folder / "killed", num_proc=1)
    process = ForkedProcess("-c", KILLED_PREPARATION, *flags, cwd=folder)
    while not list((folder / "killed" / "parts").glob("part-*.json")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first_part = next((folder / "killed" / "train").glob("part-*.arrow"))
    first_mtime = first_part.stat().st_mtime_ns
    for directory in ("killed", "whole"):
        assert run_command("data", "prepare", **text_flags(folder), output_dir=folder / directory, num_proc=1) == 0
    assert first_part.stat().st_mtime_ns == first_mtime
    resumed, uninterrupted = (PreparedCorpus.open(folder / name) for name in ("killed", "whole"))
    assert resumed.identity == uninterrupted.identity
    assert resumed.parts == uninterrupted.parts, "file digests differ"


def test_second_run_reads_cached_examples(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(corpora, "SMALLEST_CACHED_TEXT", 0)
    monkeypatch.setattr(corpora, "HF_HOME", str(folder / "home"))
    in_memory = train(folder, "memory", "--no_cache", **text_flags(folder))
    assert not (folder / "home").exists()
    for output_name, message in (("first", "preparing the text in the cache"), ("second", "are in the cache")):
        assert_same_run(in_memory, train(folder, output_name, num_proc=1, **text_flags(folder)))
        assert message in capfd.readouterr().err
    text = (folder / "text.txt").read_text()
    for file in (folder / "home").rglob("part-00001.arrow"):
        file.unlink()  # a memory-mapped file must not be truncated
        file.write_bytes(b"")
    assert_same_run(in_memory, train(folder, "repaired", num_proc=1, **text_flags(folder)))
    assert "2 of 3 parts are complete" in capfd.readouterr().err
    (folder / "text.txt").write_text(text[:-9] + text[-9:].upper())  # same size
    train(folder, "third", num_proc=1, **text_flags(folder))
    assert "preparing the text in the cache" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["news", "news[1]"])
def test_version_of_a_directory_has_the_dates_of_its_files(tmp_path: Path, name: str) -> None:
    """Also if its name has the brackets of a pattern."""
    file = tmp_path / name / "a.txt"
    file.parent.mkdir()
    file.write_text("A text.")
    documents = load_documents(str(file.parent))
    versions = corpora._source_versions(documents, [str(file.parent)])
    os.utime(file, (1, 1))
    assert versions != corpora._source_versions(documents, [str(file.parent)]) == [(str(file), 10**9)]


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty folder in memory; the cache is in home."""
    monkeypatch.setattr(corpora, "HF_HOME", str(folder / "home"))
    yield "memory://bucket/prepared"
    fsspec.filesystem("memory").store.clear()


def stored_files(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): filesystem.cat_file(path) for path in filesystem.find(root)}


def test_training_on_prepared_examples_of_object_store(folder: Path, store: str, monkeypatch, capfd: Any) -> None:
    in_memory = train(folder, "memory", **text_flags(folder))
    for index in range(2):
        flags = text_flags(folder) | {"output_dir": store, "shard": f"{index}/2"}
        assert run_command("data", "prepare", **flags, num_proc=1) == 0
    flags = {"dataset": store, "family": "bert", "output_dir": folder / "x"}
    assert "no complete set" in command_output("pretrain", **flags, fails=True)
    output = command_output("data prepare --merge", **text_flags(folder), output_dir=f"{store}/")
    assert f"pretrain --dataset {store}" in output
    monkeypatch.setattr("hf_ctxmodels.data.processes.get_context", lambda _: forked.CONTEXT)  # starts sooner than spawn
    local, parallel = folder / "prepared", folder / "parallel"
    assert run_command("data", "prepare", **text_flags(folder), output_dir=local, num_proc=1) == 0
    assert run_command("data", "prepare", **text_flags(folder), output_dir=f"local://{parallel}", num_proc=2) == 0
    for directory in (local, parallel):
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert {str(path.relative_to(directory)): path.read_bytes() for path in files} == stored_files(store)
    for path in [*(folder / "home").rglob("*"), folder / "text.txt"]:
        path.unlink()

    capfd.readouterr()
    assert_same_run(in_memory, train(folder, "out", dataset=store))
    assert "downloading" in capfd.readouterr().err
    (folder / "out" / "checkpoint-6").rename(folder / "last")
    assert_same_run(in_memory, train(folder, "out", "--resume", dataset=f"file://{local}"))
    (folder / "out" / "checkpoint-6").rename(folder / "last-local")
    assert_same_run(in_memory, train(folder, "out", "--resume", dataset=f"{store}/"))
    assert "downloading" not in capfd.readouterr().err
    (cached_file,) = (folder / "home").rglob("train/part-00001.arrow")
    size = cached_file.stat().st_size
    cached_file.unlink()
    assert_same_run(in_memory, train(folder, "repaired", dataset=store))
    assert f"downloading {format_number(size)}B" in capfd.readouterr().err


# Opens prepared examples with a slow file system that records which files are read.
DOWNLOAD = """
import sys, time
from fsspec.implementations.local import LocalFileSystem
from hf_ctxmodels.training import corpora
get_file = LocalFileSystem.get_file
def slow_get_file(filesystem, source, target, **options):
    with open(sys.argv[3], "a") as log:
        log.write(f"{source}\\n")
    time.sleep(0.3)
    get_file(filesystem, source, target, **options)
LocalFileSystem.get_file = slow_get_file
corpora.HF_HOME = sys.argv[2]
corpus = corpora.CorpusArguments(dataset=[sys.argv[1]]).open_prepared()
corpora.fetch_examples(sys.argv[1], corpus)
print(len(corpus.parts))
"""


def test_one_process_downloads_while_others_wait(folder: Path) -> None:
    prepared, log = folder / "prepared", folder / "log.txt"
    assert run_command("data", "prepare", **text_flags(folder), output_dir=prepared, num_proc=1) == 0
    processes = [ForkedProcess("-c", DOWNLOAD, f"local://{prepared}", folder / "home", log) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["3\n", "3\n"]
    examples = [line for line in log.read_text().splitlines() if line.endswith(".arrow")]
    assert sorted(examples) == sorted(map(str, prepared.rglob("*.arrow")))


def test_errors_of_object_store(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = text_flags(folder) | {"num_proc": 1}
    for protocol, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        for command, name in (("data prepare", "output_dir"), ("pretrain", "dataset")):
            output = {name: f"{protocol}://a/b"}
            message = command_output(command, **{**flags, "output_dir": folder / "out", **output}, fails=True)
            assert f"Fix: pip install {package}" in message
    fsspec.filesystem("memory").pipe_file("/bucket/prepared/notes.txt", b"")
    assert "contains other files: notes.txt" in command_output("data", "prepare", **flags, output_dir=store, fails=True)
    assert "contains other files" in command_output("data prepare --overwrite", **flags, output_dir=store, fails=True)
    fsspec.filesystem("memory").rm("/bucket/prepared/notes.txt")
    for length in (32, 24):
        changed = {"max_length": length, "output_dir": store}
        assert run_command("data", "prepare", *["--overwrite"] * (length == 24), **flags | changed) == 0
    assert json.loads(stored_files(store)["prepared.json"])["identity"]["max_length"] == 24
    message = command_output("data", "prepare", **flags, output_dir=store, fails=True)
    assert "contains other examples: max_length is 32, was 24" in message
    assert f"--output_dir {store}" in message
    message = command_output("pretrain", dataset=store, max_length=16, output_dir=folder / "out", fails=True)
    assert "--max_length is 16, was 24" in message
    message = command_output("pretrain", dataset=store, family="gpt2", output_dir=folder / "out", fails=True)
    assert f"not trained on the examples of MaskedLMWithNextSentence.\n  where: {store}\n" in message
    assert not list((folder / "home").rglob("*.arrow")), "downloaded before flags and objective are compared"
    content = bytearray(stored_files(store)["train/part-00001.arrow"])
    content[len(content) // 2] ^= 1
    fsspec.filesystem("memory").pipe_file("/bucket/prepared/train/part-00001.arrow", bytes(content))
    message = command_output("pretrain", dataset=store, output_dir=folder / "out", fails=True)
    assert "The file was changed after it was written" in message
    assert f"{store}/train/part-00001.arrow" in message
    assert not list((folder / "home").rglob("train/part-00001.arrow"))


def test_flags_that_differ_from_preparation_raise(folder: Path) -> None:
    prepared = folder / "prepared"
    assert run_command("data", "prepare", **text_flags(folder), output_dir=prepared, num_proc=1) == 0
    assert "contains other examples: max_length is 16" in command_output(
        "data", "prepare", **text_flags(folder) | {"max_length": 16}, output_dir=prepared, fails=True
    )
    for flags, message in (
        ({"max_length": 64}, "--max_length is 64, was 32"),
        ({"objective": "mlm"}, "objective is MaskedLM, was MaskedLMWithNextSentence"),
        ({"objective": "mlm+nsp:whole_word=true"}, "'whole_word': True"),
        ({"validation_fraction": 0.1}, "--validation_fraction is 0.1, was 0.2"),
        ({"sampling_alpha": 0.5}, "--sampling_alpha is 0.5, was None"),
        ({"family": "roberta"}, "roberta is not trained on the examples of MaskedLMWithNextSentence"),
    ):
        flags = {"family": "bert", "dataset": prepared, "output_dir": folder / "out"} | flags
        assert message in command_output("pretrain", **flags, fails=True)
    for flags, message in (
        ({"shard": "2/2"}, "Expected I/N, with I from 0 to N - 1"),
        ({"family": "infersent"}, "The family infersent is not pretrained on raw text"),
        ({"dataset": folder / "missing.txt"}, "No such file"),
        ({"shard": "0/2", "merge": True}, "--shard --merge"),
        ({"validation_fraction": 0.001}, "There is no held-out document"),
        ({"sampling_alpha": 7}, "sampling_alpha=7.0 is out of range"),
        ({"output_dir": folder}, "contains other files"),
        ({"output_dir": folder, "overwrite": True}, "contains other files"),
    ):
        flags = text_flags(folder) | {"output_dir": folder / "other", "num_proc": 1} | flags
        assert message in command_output("data", "prepare", **flags, fails=True)
    assert (folder / "tokenizer" / "tokenizer.json").is_file()


def test_tokens_of_targets_are_printed(tmp_path: Path, capsys: Any) -> None:
    sides = ("the cat sat", "die katze war dort")
    tokenizer = CtxCoveTokenizer.train([TRANSLATION_SEPARATOR.join(sides)], 60, min_count=1, min_target_count=1)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for name, text in zip(("source.txt", "target.txt"), sides, strict=True):
        (tmp_path / name).write_text(f"{text}\n" * 8)
    flags = {"family": "cove", "tokenizer": tmp_path / "tokenizer", "dataset": tmp_path / "source.txt"}
    flags |= {"translations": tmp_path / "target.txt", "max_length": 32, "output_dir": tmp_path / "prepared"}
    assert run_command("data", "prepare", **flags, num_proc=1) == 0
    num_tokens = 8 * (3 + 5)  # of the sources, and of the targets with their ends
    assert f" {num_tokens} tokens of text" in capsys.readouterr().out


def test_files_of_objective_options_are_compared_by_content(folder: Path) -> None:
    """Training on prepared examples needs a phrase list, which may be moved but not changed."""
    units, moved = folder / "units.txt", folder / "moved.txt"
    units.write_text("cat sat\nold tree\n")
    flags = text_flags(folder) | {"family": "ernie", "objective": f"unit-mlm+pairs:units={units}"}
    assert run_command("data", "prepare", **flags, output_dir=folder / "prepared", num_proc=1) == 0
    in_place = train(folder, "in_place", dataset=folder / "prepared")
    flags = {"dataset": folder / "prepared", "output_dir": folder / "out", "config": folder / "tiny.json"}
    units.write_text("cat sat\nold bird\n")
    assert "The examples were prepared for another run" in command_output("pretrain", **flags, fails=True)
    units.write_text("cat sat\nold tree\n")
    units.rename(moved)
    assert "--objective unit-mlm+pairs:units=FILE" in command_output("pretrain", **flags, fails=True)
    options = {"dataset": folder / "prepared", "objective": f"unit-mlm+pairs:units={moved}"}
    assert_same_run(in_place, train(folder, "moved", **options))
