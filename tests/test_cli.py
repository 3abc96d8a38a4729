"""The console command: every command from a wheel and from a clone, with the recipes that come with the package."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from hf_ctxmodels.cli import main as cli
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments
from hf_ctxmodels.training.recipe import parse_arguments

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXT = "The cat sat on the mat.\nA dog ran to the river.\nIt was cold.\n\n" * 20


def module_of(command: str) -> str:
    return command.replace("-", "_")


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hf-ctxmodels", *argv])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_the_command_is_installed_and_knows_every_module():
    module, _, function = PROJECT["project"]["scripts"]["hf-ctxmodels"].partition(":")
    assert getattr(import_module(module), function) is cli.main
    modules = {path.stem for path in (ROOT / "hf_ctxmodels" / "cli").glob("[!_]*.py")} - {"main"}
    assert {module_of(command) for command in cli.COMMANDS} == modules


def test_without_a_command_the_list_is_shown(monkeypatch, capsys):
    assert run(monkeypatch) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and what in shown for name, what in cli.COMMANDS.items())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(monkeypatch, capsys, command):
    assert run(monkeypatch, command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: hf-ctxmodels {command} [-h]")


def test_a_misspelt_command_is_one_screen(monkeypatch, capsys):
    assert run(monkeypatch, "pretain", "--family", "bert") == 2
    assert "did you mean pretrain?" in capsys.readouterr().err


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/[!c]*.py")), ids=lambda path: path.stem)  # no check_*.py
def test_every_script_is_a_thin_twin_of_a_command(script):
    text = script.read_text(encoding="utf-8")
    command = text.partition("`hf-ctxmodels ")[2].partition("`")[0]
    assert command in cli.COMMANDS
    assert f"from hf_ctxmodels.cli.{module_of(command)} import main\n" in text
    assert len(text.splitlines()) < 10


@pytest.mark.parametrize("name", ["bert_tiny_demo", "bert_tiny_demo.yaml"])
def test_a_recipe_is_known_by_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    given = ["--recipe", name, "--output_dir", "o", "--max_steps", "3"]
    pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=given)
    assert (pretraining.family, pretraining.dataset, loop.max_steps) == ("bert", ["demo"], 3)
    (tmp_path / name).write_text("family: albert\ndataset: x\n")
    assert parse_arguments(PretrainingArguments, LoopArguments, argv=given)[0].family == "albert", "a file comes first"


def test_a_recipe_that_does_not_exist_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CtxError, match=r"--recipe bert_tinydemo\n.*did you mean bert_tiny_demo"):
        parse_arguments(LoopArguments, argv=["--recipe", "bert_tinydemo"])


def test_recipes_and_configurations_are_listed(monkeypatch, capsys):
    assert run(monkeypatch, "recipes") == 0
    shown = capsys.readouterr().out
    assert "  bert_base               BERT-base, phase 1 (Devlin et al. 2019, appendix A.2)\n" in shown
    assert all(path.stem in shown for path in ROOT.glob("scripts/recipes/*.yaml"))
    assert all(f"  {path}\n" in shown for path in ROOT.glob("scripts/accelerate/*.yaml"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, which builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_every_recipe_and_configuration(installed: Path):
    for folder in ("recipes", "tasks", "accelerate"):
        expected = {path.name: path.read_bytes() for path in (ROOT / "scripts" / folder).glob("*.yaml")}
        assert expected
        assert {path.name: path.read_bytes() for path in (installed / "hf_ctxmodels" / folder).iterdir()} == expected
    assert not (installed / "scripts").exists()
    entries = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "hf-ctxmodels = hf_ctxmodels.cli.main:main" in entries


def test_a_recipe_runs_by_its_name_from_the_wheel(installed: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text(TEXT)
    get_family("bert").tokenizer.train([TEXT], vocab_size=60).save_pretrained(tmp_path / "tokenizer")
    flags = "--recipe bert_tiny_demo --tokenizer tokenizer --dataset text.txt --validation_fraction 0 --max_length 32"
    flags += " --max_steps 1 --per_device_batch_size 2 --dataloader_workers 0 --output_dir out"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "hf_ctxmodels", "pretrain", *flags.split()]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    summary = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert (summary["model_type"], summary["steps"]) == ("ctx-bert", 1)
    assert summary["command"] == f"hf-ctxmodels pretrain {flags}"
    for directory in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):  # which opens by trust_remote_code=True
        assert "ctx_bert_auto.py" in json.loads((directory / "manifest.json").read_text())["sha256"]
        assert (directory / "ctx_bert_auto.py").is_file()


def test_gpt3_is_trained_by_the_table_of_the_paper():
    """Brown et al. 2020, table 2.1: tokens a step and peak rate of each size; 300 billion tokens, warm-up over 375
    million (appendix B)."""
    table = {"base": (0.5, 6.0e-4), "medium": (0.5, 3.0e-4), "large": (0.5, 2.5e-4), "xl": (1, 2.0e-4)}
    table |= {"2.7b": (1, 1.6e-4), "6.7b": (2, 1.2e-4), "13b": (2, 1.0e-4), "175b": (3.2, 0.6e-4)}
    for size, (millions, rate) in table.items():
        given = ["--recipe", f"gpt3_{size}", "--output_dir", "o", "--dataset", "x"]
        pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=given)
        assert (pretraining.family, pretraining.config, pretraining.objective) == ("gpt3", size, "clm")
        tokens = pretraining.max_length * loop.per_device_batch_size * loop.gradient_accumulation_steps
        assert tokens == pytest.approx(millions * 1e6, rel=0.05), size
        assert (tokens * loop.max_steps, tokens * loop.warmup_steps) == pytest.approx((300e9, 375e6), rel=2e-3), size
        assert (loop.learning_rate, loop.adam_beta2, loop.min_lr_rate) == (rate, 0.95, 0.1)
