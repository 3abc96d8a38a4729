"""The console command, and the packaged recipes, from a clone and from a wheel."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from commands import run_command

import hf_ctxmodels_cli as cli
from hf_ctxmodels.cli import finetune
from hf_ctxmodels.core.command_line import join_repeated, parse_arguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.torch_environment import configure_torch
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXT = "The cat sat on the mat.\nA dog ran to the river.\nIt was cold.\n\n" * 20

LEAVES = cli.leaf_commands()


def test_commands_and_modules():
    module, _, function = PROJECT["project"]["scripts"]["hf-ctxmodels"].partition(":")
    assert getattr(import_module(module), function) is cli.main
    folder = ROOT / "hf_ctxmodels" / "cli"
    modules = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("[!_]*.py")}
    assert {command.module for command in LEAVES.values()} == modules


def test_help(capsys):
    assert len(cli.COMMANDS) <= 18
    assert run_command() == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("  ")] == list(cli.FIRST_COMMANDS)
    assert run_command("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and command.summary in shown for name, command in cli.COMMANDS.items())
    assert run_command("evaluate") == 0
    assert "  words " in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--help", "--version", "pretain --family bert", "finetune regresion"])
def test_commands_without_imports(words):
    code = f"import sys, hf_ctxmodels_cli as cli\nsys.argv[1:] = {words.split()}\n"
    code += "try: cli.main()\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == (0 if words.startswith("--") else 2)
    assert not {"torch", "transformers", "hf_ctxmodels"} & set(result.stdout.splitlines()[-1].split())


def test_stored_help_of_commands_without_imports():
    code = "import io, sys, hf_ctxmodels_cli as cli\nfrom contextlib import redirect_stdout, suppress\n"
    code += "for words in cli.leaf_commands():\n    sys.argv[1:] = [*words.split(), '--help']\n"
    code += "    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit): cli.main()\n"
    code += "    assert output.getvalue() == cli.help_file(words).read_text('utf-8'), words\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "transformers", "hf_ctxmodels"} & set(result.stdout.split())


def test_help_in_a_closed_pipe():
    command = f"{sys.executable} -c 'import hf_ctxmodels_cli as cli; cli.main()' pretrain --help | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


def test_import_without_objectives():
    code = "import sys, hf_ctxmodels; print(*sys.modules); hf_ctxmodels.DataCollatorForMaskedLM"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"hf_ctxmodels.objectives", "hf_ctxmodels.data", "datasets", "sklearn"} & set(result.stdout.split())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("A", "B", ["PASSIVE", "1"]),
        ("OMP_WAIT_POLICY", "ACTIVE", ["ACTIVE", "1"]),
        ("GOMP_SPINCOUNT", "5", ["None", "1"]),
        ("THP_MEM_ALLOC_ENABLE", "0", ["PASSIVE", "0"]),
    ],
)
def test_environment_is_set_before_torch_starts(name, value, expected, tmp_path, monkeypatch):
    names = ("OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")
    (tmp_path / "torch.py").write_text(f"import os\nprint(*map(os.environ.get, {names}), flush=True)\nos._exit(0)")
    for variable in names:
        monkeypatch.delenv(variable, raising=False)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), name: value}
    command = [sys.executable, "-m", "hf_ctxmodels", "pretrain"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert result.stdout.split() == expected


@pytest.mark.parametrize(
    ("quota", "environment", "threads"),
    [(3, {}, "3"), (3, {"LOCAL_WORLD_SIZE": "2"}, "1"), (3, {"OMP_NUM_THREADS": "8"}, "8"), (4, {}, None)],
)
def test_threads_in_a_container_with_a_quota(quota, environment, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr("hf_ctxmodels.core.torch_environment.cpu_count", lambda: quota)
    monkeypatch.delitem(sys.modules, "torch")
    configure_torch()
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("words", LEAVES)
def test_help_of_commands(capsys, words):
    assert run_command(*words.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: hf-ctxmodels {words} [--help]")
    assert shown == cli.help_file(words).read_text("utf-8"), "run `python scripts/write_help.py`"
    flags = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags))
    assert len(flags) <= (62 if words in ("finetune seq2seq", "pretrain") else 54)
    if words == "finetune sequence-classification":
        assert len(flags) <= 50
        assert flags[1:11] == [f"--{name}" for name in finetune.ESSENTIAL]
    descriptions = [line.strip() for line in shown.splitlines()]
    assert not [text for text in descriptions if text.endswith("(default: None)")]


def test_no_stored_help_of_removed_commands():
    assert set(cli.HELP_FOLDER.iterdir()) == {cli.help_file(words) for words in LEAVES}


def test_misspelled_commands(capsys):
    assert run_command("pretain", "--family", "bert") == 2
    assert "did you mean pretrain?" in capsys.readouterr().err
    assert run_command("finetune", "regresion") == 2
    assert "did you mean regression?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("pretrain --lr 1e-4", "--learning_rate"),
        ("finetune regression --epochs=3", "--num_train_epochs"),
        ("push --modle runs/bert", "--model"),
        ("evaluate words --neer king", "--near"),
    ],
)
def test_unknown_flags(capsys, words, suggestion):
    """One suggestion, before missing flags are reported."""
    assert run_command(*words.split()) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("CtxError: Unknown flag --")
    assert f"did you mean {suggestion}? see `hf-ctxmodels " in lines[2]


def test_extra_of_everything():
    rows = re.findall(r"^\| `\.\[(\w+)\]` \|", (ROOT / "README.md").read_text("utf-8"), re.M)
    everything = PROJECT["project"]["optional-dependencies"]["all"][0]
    assert set(rows) - {"all", "ecosystem"} == set(re.search(r"\[(.*)\]", everything)[1].split(","))


def test_end_of_make_demo():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    command = ["make", "-n", "demo", "VENV=.venv"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=environment).stdout
    assert "hf-ctxmodels is .venv/bin/hf-ctxmodels; activate its environment: source .venv/bin/activate" in shown


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/recipes/*.yaml")), ids=lambda path: path.stem)
def test_recipes(path, capsys):
    words = re.search(rf"(?:hf-ctxmodels|hf_ctxmodels) ([a-z0-9 -]+?) --recipe {path.stem}\b", path.read_text())
    flags = ["--recipe", str(path), "--max_steps", "1" * 9, "--learning_rate", "fast"]
    assert run_command(*words[1].split(), *flags) == 2
    assert "--learning_rate: invalid value 'fast'" in capsys.readouterr().err, "all other values are valid"


@pytest.mark.parametrize("name", ["bert_tiny_demo", "bert_tiny_demo.yaml"])
def test_recipe_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    flags = ["--recipe", name, "--output_dir", "o", "--max_steps", "3"]
    pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
    assert (pretraining.family, pretraining.dataset, loop.max_steps) == ("bert", ["demo"], 3)
    (tmp_path / name).write_text("family: albert\ndataset: x\n")
    assert parse_arguments(PretrainingArguments, LoopArguments, argv=flags)[0].family == "albert", "a file comes first"


def test_repeated_list_flags():
    argv = ["--model", "a", "b", "--port=0", "--model=c", "--corpus", "d", "--model", "e"]
    assert join_repeated(argv, {"model"}) == ["--model", "a", "b", "c", "e", "--port=0", "--corpus", "d"]


def test_missing_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CtxError, match=r"--recipe bert_tinydemo\n.*did you mean bert_tiny_demo"):
        parse_arguments(LoopArguments, argv=["--recipe", "bert_tinydemo"])


def test_list_of_recipes(capsys):
    assert run_command("recipes") == 0
    shown = capsys.readouterr().out
    assert "  bert_base                 BERT-base, phase 1 (Devlin et al. 2019, appendix A.2): 90% of 1M" in shown
    assert "with 256 sequences per step.\n  bert_base_512 " in shown.replace("\n" + 28 * " ", " ")
    assert all(path.stem in shown for path in ROOT.glob("scripts/recipes/*.yaml"))
    assert all(f"  {path.stem} " in shown for path in ROOT.glob("scripts/text2text/*.yaml"))
    assert all(f"  {path.stem} " in shown for path in ROOT.glob("scripts/prompts/*.yaml"))
    assert all(f"  {path}\n" in shown for path in ROOT.glob("scripts/accelerate/*.yaml"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the wheel installs."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, which builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_files_of_the_wheel(installed: Path):
    for folder in ("recipes", "tasks", "text2text", "prompts", "behavior", "comparisons", "accelerate"):
        expected = {path.name: path.read_bytes() for path in (ROOT / "scripts" / folder).glob("*.yaml")}
        assert expected
        assert {path.name: path.read_bytes() for path in (installed / "hf_ctxmodels" / folder).iterdir()} == expected
    assets = {path.name for path in (ROOT / "hf_ctxmodels" / "analysis" / "report" / "assets").iterdir()}
    assert {path.name for path in (installed / "hf_ctxmodels" / "analysis" / "report" / "assets").iterdir()} == assets
    assert len(list((installed / "hf_ctxmodels" / "cli" / "help").iterdir())) == len(LEAVES)
    assert not (installed / "scripts").exists()
    entries = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "hf-ctxmodels = hf_ctxmodels_cli:main" in entries


@pytest.mark.slow
def test_recipe_of_the_wheel(installed: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text(TEXT)
    get_family("bert").tokenizer.train([TEXT], vocab_size=60).save_pretrained(tmp_path / "tokenizer")
    flags = "--recipe bert_tiny_demo --tokenizer tokenizer --dataset text.txt --validation_fraction 0 --max_length 32"
    flags += " --max_steps 1 --per_device_batch_size 2 --dataloader_workers 0 --output_dir out"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "hf_ctxmodels", "pretrain", *flags.split()]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
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
        flags = ["--recipe", f"gpt3_{size}", "--output_dir", "o", "--dataset", "x"]
        pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
        assert (pretraining.family, pretraining.config, pretraining.objective) == ("gpt3", size, "clm")
        tokens = pretraining.max_length * loop.per_device_batch_size * loop.gradient_accumulation_steps
        assert tokens == pytest.approx(millions * 1e6, rel=0.05), size
        assert (tokens * loop.max_steps, tokens * loop.warmup_steps) == pytest.approx((300e9, 375e6), rel=2e-3), size
        assert (loop.learning_rate, loop.optimizer.beta2, loop.lr_scheduler.min_rate) == (rate, 0.95, 0.1)
