"""Commands replace existing files only with --overwrite, and never their inputs."""

import os
import shutil
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command, run_file, save, tiny_pair
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.conversion.word_vector_files import write_gensim
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import check_output_directory, replacing_files

ROOT = Path(__file__).resolve().parents[2]
CONTENT = "mine"
TEXTS = ["the film was a joy from start to end", "nobody left early"]
FILE_FLAGS = "--train_file {} --validation_file b --output_dir o"


def run(script: str, flags: str) -> int:
    if not script.endswith(".py"):
        return run_command(*script.split(), *flags.split())
    return run_file(ROOT / script, *flags.split())


@pytest.mark.parametrize(
    ("script", "flags", "existing"),
    [
        ("convert cove", "--weights w --vectors v --output {out}", "config.json"),
        ("convert checkpoint", "--checkpoint c --output {out}", "model.safetensors"),
        ("convert elmo", "--options o --weights w --output {out}", "model.safetensors"),
        ("convert gpt", "--folder f --output {out}", "config.json"),
        ("convert mass", "--checkpoint c --codes c --output {out}", "config.json"),
        ("convert grover", "--checkpoint c --vocabulary v --merges m --output {out}", "config.json"),
        ("convert infersent", "--weights w --vectors v --output {out}", "tokenizer.json"),
        ("convert laser", "--encoder e --codes c --output {out}", "config.json"),
        ("convert ulmfit", "--weights w --vocabulary v --output {out}", "config.json"),
        ("convert word-vectors", "--input_format glove --family glove --input i --output {out}", "config.json"),
        ("convert word-vectors", "--output_format glove --input i --output {out}/v.txt", "v.txt"),
        ("data tokenizer", "--family bert --dataset d --vocab_size 9 --output_dir {out}", "tokenizer.json"),
        ("generate", "--model m --input i --output_file {out}/t.txt", "t.txt"),
        ("data pairs", "--kind summaries --dataset d --output_dir {out}", "train.jsonl"),
        ("data units", "--gazetteers g --output {out}/u.txt", "u.txt"),
        ("data phrases", "--dataset d --output {out}/p.txt", "p.txt"),
        ("scripts/learning.py", "--family bert --output_dir {out}", "tokenizer"),
        ("demo", "--output_dir {out}", "bert"),
        ("scripts/benchmark.py", "--output {out}/b.md --only nothing", "b.md"),
        ("finetune regression", "--model m " + FILE_FLAGS.format("a") + " --predictions_file {out}/p", "p"),
        ("finetune regression", "--model m --train_file a --validation_file b --output_dir {out}", "model.safetensors"),
        ("finetune multitask", "--model m --tasks a/b.yaml --output_dir {out}", "config.json"),
        ("pretrain", "--family bert --tokenizer t --dataset d --max_steps 1 --output_dir {out}", "tokenizer.json"),
        ("distill text", "--teacher t --losses cosine --dataset d --max_steps 1 --output_dir {out}", "config.json"),
        ("evaluate transfer", "--model m --task pos --test de --output_dir {out}", "config.json"),
        ("push", "--model m --repo_id a/b --output_dir {out}", "README.md"),
    ],
)
def test_existing_output_requires_overwrite(script, flags, existing, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / existing).write_text(CONTENT)
    assert run(script, flags.format(out=out)) == 2
    error = capsys.readouterr().err
    assert "--overwrite" in error
    assert str(out) in error
    assert (out / existing).read_text() == CONTENT


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("generate", "--model m --input {file} --output_file {file} --overwrite"),
        ("generate", "--model m --input i --references {file} --output_file {file} --overwrite"),
        ("generate", "--model m --input i --bag_of_words {file}:bias=1 --output_file {file} --overwrite"),
        ("predict", "--model m --input file://{file} --output {file} --overwrite"),
        ("predict", "--model m --input i --text_task {file} --output {file} --overwrite"),
        ("embed words", "--model m --input file://{file} --output {file} --overwrite"),
        ("data units", "--gazetteers {file} --output {file} --overwrite"),
        ("finetune regression", "--model m " + FILE_FLAGS.format("{file}") + " --overwrite --predictions_file {file}"),
    ],
)
def test_input_files_are_never_overwritten(script, flags, tmp_path, capsys) -> None:
    file, link = tmp_path / "file.parquet", tmp_path / "link.parquet"
    file.write_text(CONTENT)
    link.hardlink_to(file)
    flags = flags.replace("{file}", str(file), 1).replace("{file}", str(link))
    assert run(script, flags) == 2
    assert "one of the input files" in capsys.readouterr().err
    assert file.read_text() == CONTENT


def test_links_are_kept_and_their_targets_replaced(tmp_path, capsys) -> None:
    (tmp_path / "names.txt").write_text("New York\n")
    file, link = tmp_path / "file.txt", tmp_path / "link.txt"
    link.symlink_to(file)
    for overwrite, code in (([], 2), (["--overwrite"], 0)) * 2:  # a link to no file, and to a file
        content = file.read_text() if file.exists() else None
        flags = ("--gazetteers", tmp_path / "names.txt", "--output", link, *overwrite)
        assert run_command("data", "units", *flags) == code
        assert ("The file exists" in capsys.readouterr().err) == (code == 2)
        assert (file.read_text() if file.exists() else None) == ("New York\n" if code == 0 else content)
        assert link.readlink() == file


def test_links_in_a_model_directory_are_replaced(tmp_path) -> None:
    """Their targets may be files of another model, as in the cache of the Hub."""
    other, out = tmp_path / "other", tmp_path / "out"
    for folder in (other / "adapters", out):
        folder.mkdir(parents=True)
    for name in ("config.json", "adapters/adapter.safetensors"):
        (other / name).write_text(CONTENT)
    shard = "model-00001-of-00002.safetensors"
    for name in ("config.json", "adapters", shard):  # the shard does not exist
        (out / name).symlink_to(other / name)
    with replacing_files(out, ("adapters", "model-?????-of-?????.safetensors")) as folder:
        (folder / "config.json").write_text("new")
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert (out / "config.json").read_text() == "new"
    assert {path.read_text() for path in other.rglob("*.*")} == {CONTENT}


def test_links_to_files_with_separate_weights_are_replaced(tmp_path, monkeypatch) -> None:
    """Weights are read from the folder of the link, not of its target."""
    gensim = pytest.importorskip("gensim.models", reason="needs gensim (extra `demo`)")
    save = partialmethod(gensim.KeyedVectors.save, sep_limit=1)  # by default for 10M numbers
    monkeypatch.setattr(gensim.KeyedVectors, "save", save)
    vectors = WordVectors(["film", "joy"], np.ones((2, 3), np.float32))
    file, link = tmp_path / "target" / "vectors.kv", tmp_path / "link.kv"
    file.parent.mkdir()
    file.write_text(CONTENT)
    link.symlink_to(file)
    write_gensim(vectors, link)
    assert gensim.KeyedVectors.load(str(link)).index_to_key == vectors.words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.kv", "link.kv.vectors.npy", "target"]
    assert file.read_text() == CONTENT


@pytest.mark.parametrize(
    ("main_file", "weights", "options"),
    [
        ("config.json", "model.safetensors", {}),
        ("vectors.kv", "vectors.kv.vectors.npy", {"main_file": "vectors.kv"}),
    ],
)
def test_interrupted_replacement_leaves_no_model_of_mixed_files(
    tmp_path, monkeypatch, main_file, weights, options
) -> None:
    def interrupt(path: Path, target: Path) -> None:
        shutil.move(path, target)
        raise KeyboardInterrupt

    new, out = tmp_path / "new", tmp_path / "out"
    for folder in (new, out):
        folder.mkdir()
        for name in (main_file, weights):
            (folder / name).write_text(folder.name)
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt), replacing_files(out, **options) as folder:
        shutil.copytree(new, folder, dirs_exist_ok=True)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(weights, "new")]


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_with_the_name_of_an_output_file_are_not_replaced(overwrite, tmp_path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CtxError, match=r"^config\.json is a directory, not a file\."):
        check_output_directory(tmp_path, ("config.json", "a.txt"), flag="--output_dir", overwrite=overwrite)
    assert (tmp_path / "config.json").is_dir()


def test_directories_with_a_suffix_are_output_directories(tmp_path) -> None:
    directory = tmp_path / "v1.2"
    for _ in range(2):
        check_output_directory(directory, ("config.json",), flag="--output_dir", overwrite=False)
        directory.mkdir(exist_ok=True)


def test_devices_are_not_replaced(tmp_path, capsys) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run_command("data", "units", "--gazetteers", "names.txt", "--output", pipe, "--overwrite") == 2
    assert "The output file is a device or a pipe" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize("dataset", ["{folder}/*.txt", "{folder}", "file://{folder}/text.txt"])
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("data clean", "--dataset {} --output"),
        ("data phrases", "--dataset {} --output"),
        ("data units", "--dataset {} --output"),
        ("evaluate forgetting", "--pretrained p --finetuned f --text {} --output_file"),
    ],
)
def test_files_of_patterns_and_directories_are_never_overwritten(script, flags, dataset, tmp_path, capsys) -> None:
    (tmp_path / "text.txt").write_text(CONTENT)
    flags = f"{flags.format(dataset.format(folder=tmp_path))} {tmp_path}/text.txt --overwrite"
    assert run(script, flags) == 2
    assert "one of the input files" in capsys.readouterr().err
    assert (tmp_path / "text.txt").read_text() == CONTENT


@pytest.mark.parametrize(
    "command",
    [
        "convert word-vectors --input_format glove --family glove --input {folder}/vectors.txt --output {out}",
        "data tokenizer --family bert --dataset {folder}/text.txt --vocab_size 60 --output_dir {out}",
        "export int8 --model {folder}/model --output_dir {out}",
        "export transformers --model {folder}/model --output_dir {out}",
    ],
)
def test_interrupted_save_keeps_the_previous_files(command, tmp_path, monkeypatch, capsys) -> None:
    save(tmp_path / "model", *tiny_pair("bert", "AutoModelForSequenceClassification", TEXTS))
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 20))
    (tmp_path / "vectors.txt").write_text("a 1 2\nb 3 4\n")
    out = tmp_path / "out"
    (out / "adapters" / "polarity").mkdir(parents=True)
    names = ("adapters/polarity/adapter.safetensors", "config.json", "model.safetensors", "tokenizer.json")
    shard = "model-00001-of-00002.safetensors"
    previous = {out / name: f"{CONTENT} {name}" for name in (*names, "training_summary.json", shard)}
    for file, content in previous.items():
        file.write_text(content)
    save_pretrained = PreTrainedTokenizerBase.save_pretrained

    def interrupt(self: Any, *arguments: Any, **options: Any) -> None:
        save_pretrained(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupt)
    assert run(f"{command.format(folder=tmp_path, out=out)} --overwrite", "") == 130
    assert "Traceback" not in capsys.readouterr().err
    assert {path: path.read_text() for path in out.rglob("*") if path.is_file()} == previous
    assert len([*out.iterdir()]) == len(previous)
    monkeypatch.undo()
    assert run(f"{command.format(folder=tmp_path, out=out)} --overwrite", "") == 0
    assert not [path for path in out.rglob("*") if "writing" in path.name]
    assert (out / "tokenizer.json").read_text() != previous[out / "tokenizer.json"]
    assert (out / shard).exists() == ("data tokenizer" in command)
