"""Console output of a run while it prepares, trains and evaluates, and at its end."""

import io
import json
import re
import sys
from contextlib import redirect_stderr
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run_command

from hf_ctxmodels.cli import pretrain
from hf_ctxmodels.core import console
from hf_ctxmodels.training.corpora import excluded_text
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import read_log

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def flags(workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the command line of pretraining with held-out text; returns its output directory."""
    options = "--validation_fraction 0.2 --max_steps 5 --eval_steps 3 --per_device_batch_size 4 --dataloader_workers 0"
    monkeypatch.setattr(sys, "argv", ["pretrain", *workspace.flags(tmp_path / "out", *options.split())])
    return tmp_path / "out"


def test_terminal_output(flags: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("LINES", "40")
    with redirect_stderr(Terminal()) as terminal:
        pretrain.main()
    screen = terminal.getvalue()
    stages = ["building held-out text", "building training text", "training CtxBertForPreTraining, ", "| 0/5 "]
    stages += ["first step", "loss ", "evaluating", "step 3  eval_loss", "step 5  eval_loss", "computing the freq"]
    assert re.search(".*".join(map(re.escape, stages)), screen, re.DOTALL), screen
    (first_update,) = re.findall(r"\| 1/5 \[[^]]* loss [\d.]+, [\d.]+ k? ?tokens/s\]", screen)[:1]
    assert "<" in first_update, "the remaining time"
    output = capsys.readouterr().out
    assert f"saved in {flags}:\n" in output
    assert all(path.name in output for path in flags.iterdir() if path.name != ".lock")
    assert re.search(r"eval_next_sentence_accuracy +0\.\d+ +baseline 0\.\d+ +0 to 1\n", output)
    assert f"next:\n  hf-ctxmodels finetune sequence-classification --model {flags}" in output
    for name, task in (("ctx-mass", "seq2seq"), ("ctx-t5", "sequence-classification")):
        assert pretrain.finetuning_command("runs/x", name)[1] == task


def test_file_output(flags: Path, capsys: pytest.CaptureFixture) -> None:
    """A line after the first step and for each record; a record has the rate of its interval, and together they give
    the rate of the run."""
    pretrain.main()
    errors = capsys.readouterr().err
    assert "\r" not in errors
    before_training = errors[: errors.index("\nstep 1 of 5  loss ")]
    lines = [line for line in errors.splitlines() if " tokens/s  " in line]
    assert [line.split()[1] for line in lines] == ["1", "2", "4", "5"]
    assert all(len(line.split("  ")) <= 6 and line.endswith(" left") for line in lines)
    assert "training text: " in before_training
    assert "steps 1 to 5" in before_training

    logged = [record for record in read_log(flags) if "tokens_per_second" in record]
    assert [record["step"] for record in logged] == [2, 4, 5]
    totals = [0, *(record["tokens"] for record in logged)]
    tokens = [after - before for before, after in pairwise(totals)]
    seconds = sum(number / record["tokens_per_second"] for number, record in zip(tokens, logged, strict=True))
    assert totals[-1] / seconds == pytest.approx(TrainingSummary.load(flags).tokens_per_second)


def test_report_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: clock))
    timer, times = console.ReportTimer(0.0, *console.LINE_INTERVALS), []
    for second in range(300):
        clock = float(second)
        if timer.is_due():
            times.append(second)
            timer.restart()
    assert times == [0, 5, 15, 35, 75, 135, 195, 255]
    numbers = [console.format_number(number) for number in (0.5, 999, 1000, 1_031_234, 110e6)]
    assert numbers == ["0.5", "999", "1.00 k", "1.03 M", "110 M"]
    assert [console.format_count(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_next_commands(workspace, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = {"family": "bert", "dataset": workspace.folder / "text.txt", "vocab_size": 60, "output_dir": tmp_path}
    assert run_command("data", "tokenizer", **flags) == 0
    captured = capsys.readouterr()
    assert "training a vocabulary of 60 tokens" in captured.err
    assert f"next:\n  hf-ctxmodels pretrain --family bert --tokenizer {tmp_path} --dataset" in captured.out

    rows = [json.dumps({"text": text, "label": label}) for text, label in (("the cat", "a"), ("a dog", "b"))] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = {f"{name}_file": tmp_path / "rows.jsonl" for name in ("train", "validation")}
    flags |= {"family": f"bert:tokenizer={tmp_path}", "max_length": 16, "max_steps": 1, "dataloader_workers": 0}
    output = tmp_path / "tuned"
    assert run_command("finetune", "sequence-classification", **flags, output_dir=output) == 0
    captured = capsys.readouterr()
    assert "tokenizing 8 training and 8 validation examples" in captured.err
    assert re.search(r"\nloss +\d\.\d+ +lower is better\naccuracy +0\.\d+ +0\.\d+ +1\.0000  0 to 1\n", captured.out)
    commands = f"  hf-ctxmodels predict --model {output} --input FILE\n  hf-ctxmodels push --model {output} --repo_id"
    assert re.search(rf"saved in {output}\n(warning: .*; hint: .*\n)+next:\n{commands}", captured.out)


def test_excluded_text() -> None:
    statistics = {"tokens": 1000, "truncated_tokens": 20, "left_out": 3}
    assert excluded_text(SimpleNamespace(statistics=statistics)) == "3 texts left out, 20 of 1,000 tokens truncated"
    statistics = {"tokens": 1000, "target_tokens": 500, "truncated_tokens": 1200}
    assert excluded_text(SimpleNamespace(statistics=statistics)) == "1,200 of 1,500 tokens truncated"
    assert excluded_text(SimpleNamespace(statistics={"left_out": 1})) == "1 text left out"
    assert excluded_text(SimpleNamespace(statistics={"tokens": 1000})) == ""
    assert excluded_text(SimpleNamespace()) == ""
