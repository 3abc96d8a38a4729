"""What a run shows while it prepares, trains and evaluates, and what it says at its end."""

import io
import json
import sys
from contextlib import redirect_stderr
from itertools import pairwise
from pathlib import Path

import pytest

from hf_ctxmodels.cli import finetune, pretrain, train_tokenizer
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import read_log

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Terminal(io.StringIO):
    """Takes the place of stderr, as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def flags(workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretraining with held-out text is on the command line; gives its output directory."""
    more = "--validation_fraction 0.2 --max_steps 5 --eval_steps 3 --per_device_batch_size 4 --dataloader_workers 0"
    monkeypatch.setattr(sys, "argv", ["pretrain", *workspace.flags(tmp_path / "out", *more.split())])
    return tmp_path / "out"


def test_a_terminal_is_never_blank(flags: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("LINES", "40")
    with redirect_stderr(Terminal()) as terminal:
        pretrain.main()
    shown, place = terminal.getvalue(), 0
    for stage in (
        *(
            "building held-out text",
            "building training text",
            "training CtxBertForPreTraining, ",
            "| 0/5 ",
            "first step",
        ),
        *("evaluating", "step 3  eval_loss", "evaluating", "step 5  eval_loss", "computing the frequency baselines"),
    ):  # in this order
        assert stage in shown[place:], f"{stage} in {shown[place:]}"
        place = shown.index(stage, place) + len(stage)
    assert shown.count(" tokens/s, ") == shown.count(" in the run]") > 0
    printed = capsys.readouterr().out
    assert f"saved in {flags}:\n" in printed
    assert all(path.name in printed for path in flags.iterdir())
    assert f"next:\n  hf-ctxmodels finetune sequence-classification --model {flags}" in printed
    for name, task in (("ctx-mass", "seq2seq"), ("ctx-t5", "sequence-classification")):
        assert pretrain.finetuning_command("runs/x", name)[1] == task


def test_a_file_gets_lines_with_the_rates_of_whole_intervals(flags: Path, capsys: pytest.CaptureFixture) -> None:
    """Also of an interval that an evaluation divides: together they give the rate of the run."""
    pretrain.main()
    shown = capsys.readouterr().err
    assert "\r" not in shown
    before_training = shown[: shown.index("\nstep 2")]
    assert "training text: " in before_training
    assert "steps 1 to 5" in before_training

    logged = [record for record in read_log(flags) if "tokens_per_second" in record]
    assert [record["step"] for record in logged] == [2, 4, 5]
    totals = [0, *(record["tokens"] for record in logged)]
    tokens = [after - before for before, after in pairwise(totals)]
    seconds = sum(number / record["tokens_per_second"] for number, record in zip(tokens, logged, strict=True))
    assert totals[-1] / seconds == pytest.approx(TrainingSummary.load(flags).tokens_per_second)
    assert f"run_tokens_per_second {totals[-1] / seconds:.6g}" in shown


def test_the_other_commands_say_what_is_next(
    workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made = {
        "--family": "bert",
        "--dataset": workspace.folder / "text.txt",
        "--vocab_size": 60,
        "--output_dir": tmp_path,
    }
    monkeypatch.setattr(sys, "argv", ["train_tokenizer", *map(str, (part for pair in made.items() for part in pair))])
    train_tokenizer.main()
    shown = capsys.readouterr()
    assert "training a vocabulary of 60 tokens" in shown.err
    assert f"next:\n  hf-ctxmodels pretrain --family bert --tokenizer {tmp_path} --dataset" in shown.out

    rows = [json.dumps({"text": text, "label": label}) for text, label in (("the cat", "a"), ("a dog", "b"))] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = " ".join(f"--{name}_file {tmp_path / 'rows.jsonl'}" for name in ("train", "validation"))
    tuned = f"--family bert:tokenizer={tmp_path} {files} --max_length 16 --max_steps 1"
    tuned += f" --dataloader_workers 0 --output_dir {tmp_path / 'tuned'}"
    monkeypatch.setattr(sys, "argv", ["finetune", *tuned.split()])
    finetune.main("sequence-classification")
    shown = capsys.readouterr()
    assert "tokenizing 8 training and 8 validation examples" in shown.err
    assert (
        f"saved in {tmp_path / 'tuned'}\nnext:\n  hf-ctxmodels push --model {tmp_path / 'tuned'} --repo_id" in shown.out
    )
