"""No command replaces what is there, unless it is told to: it says so before it reads anything."""

import runpy
import sys
from pathlib import Path

import pytest
from commands import run_command

ROOT = Path(__file__).resolve().parents[2]
NOTES = "mine"


def run(monkeypatch: pytest.MonkeyPatch, script: str, flags: str) -> int:
    if not script.endswith(".py"):
        return run_command(*script.split(), *flags.split())
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return stopped.value.code


@pytest.mark.parametrize(
    ("script", "flags", "held"),
    [
        ("hf_ctxmodels/conversion/cove.py", "--weights w --vectors v --output {out}", "config.json"),
        ("hf_ctxmodels/conversion/elmo.py", "--options o --weights w --output {out}", "model.safetensors"),
        ("hf_ctxmodels/conversion/gpt.py", "--folder f --output {out}", "config.json"),
        ("hf_ctxmodels/conversion/mass.py", "--checkpoint c --codes c --output {out}", "config.json"),
        ("hf_ctxmodels/conversion/grover.py", "--checkpoint c --vocabulary v --merges m --output {out}", "config.json"),
        ("hf_ctxmodels/conversion/infersent.py", "--weights w --vectors v --output {out}", "tokenizer.json"),
        ("hf_ctxmodels/conversion/laser.py", "--encoder e --codes c --output {out}", "config.json"),
        ("hf_ctxmodels/conversion/ulmfit.py", "--weights w --vocabulary v --output {out}", "config.json"),
        (
            "hf_ctxmodels/conversion/word_vector_files.py",
            "--input_format glove --family glove --input i --output {out}",
            "config.json",
        ),
        (
            "hf_ctxmodels/conversion/word_vector_files.py",
            "--output_format glove --input i --output {out}/v.txt",
            "v.txt",
        ),
        ("train-tokenizer", "--family bert --dataset d --vocab_size 9 --output_dir {out}", "tokenizer.json"),
        ("generate", "--model m --input i --output_file {out}/t.txt", "t.txt"),
        ("data pairs", "--kind summaries --dataset d --output_dir {out}", "train.jsonl"),
        ("data units", "--gazetteers g --output {out}/u.txt", "u.txt"),
        ("scripts/learning.py", "--family bert --output_dir {out}", "tokenizer"),
        ("demo", "--output_dir {out}", "bert"),
        ("scripts/benchmark.py", "--output {out}/b.md --only nothing", "b.md"),
        (
            "finetune regression",
            "--model m --train_file a --validation_file b --output_dir o --predictions_file {out}/p",
            "p",
        ),
    ],
)
def test_what_is_there_stays(script, flags, held, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / held).write_text(NOTES)
    assert run(monkeypatch, script, flags.format(out=out)) == 2
    error = capsys.readouterr().err
    assert "--overwrite" in error
    assert str(out) in error
    assert (out / held).read_text() == NOTES


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("generate", "--model m --input {file} --output_file {file} --overwrite"),
        ("generate", "--model m --input i --references {file} --output_file {file} --overwrite"),
        ("data units", "--gazetteers {file} --output {file} --overwrite"),
        (
            "finetune regression",
            "--model m --train_file {file} --validation_file b --output_dir o --overwrite --predictions_file {file}",
        ),
    ],
)
def test_an_input_stays_whatever_is_said(script, flags, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "text").write_text(NOTES)
    (tmp_path / "other").hardlink_to(tmp_path / "text")
    flags = flags.replace("{file}", str(tmp_path / "text"), 1).replace("{file}", str(tmp_path / "other"))
    assert run(monkeypatch, script, flags) == 2
    assert "one of the input files" in capsys.readouterr().err
    assert (tmp_path / "text").read_text() == NOTES
