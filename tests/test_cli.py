"""The console command and the packaged recipes, in a clone and in a wheel."""

import gc
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from commands import run_command

import hf_ctxmodels_cli as cli
from hf_ctxmodels.cli import finetune
from hf_ctxmodels.core.command_line import join_repeated, parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.torch_environment import configure_torch
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training.arguments import AdamWOptions, ConstantOptions, LoopArguments
from hf_ctxmodels.training.model_loading import parse_config_options
from hf_ctxmodels.training.pretraining import PretrainingArguments

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXT = "The cat sat on the mat.\nA dog ran to the river.\nIt was cold.\n\n" * 20

LEAF_COMMANDS = cli.leaf_commands()


def test_each_command_has_one_module():
    module, _, function = PROJECT["project"]["scripts"]["hf-ctxmodels"].partition(":")
    assert getattr(import_module(module), function) is cli.main
    folder = ROOT / "hf_ctxmodels" / "cli"
    modules = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("[!_]*.py")}
    assert {command.module for command in LEAF_COMMANDS.values()} == modules


def test_overview_lists_commands(capsys):
    assert len(cli.COMMANDS) <= 18
    assert run_command() == 0
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines() if line.startswith("  ")] == list(cli.FIRST_COMMANDS)
    assert run_command("--help") == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output and command.summary in output for name, command in cli.COMMANDS.items())
    assert run_command("evaluate") == 0
    assert "  words " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "--version", "pretain --family bert", "finetune regresion"])
def test_help_and_usage_errors_do_not_import_torch(arguments):
    code = f"import sys, hf_ctxmodels_cli as cli\nsys.argv[1:] = {arguments.split()}\n"
    code += "try: cli.main()\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == (0 if arguments.startswith("--") else 2)
    assert not {"torch", "transformers", "hf_ctxmodels"} & set(result.stdout.splitlines()[-1].split())


def test_stored_help_does_not_import_torch():
    code = "import io, sys, hf_ctxmodels_cli as cli\nfrom contextlib import redirect_stdout, suppress\n"
    code += "for words in cli.leaf_commands():\n    sys.argv[1:] = [*words.split(), '--help']\n"
    code += "    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit): cli.main()\n"
    code += "    assert output.getvalue() == cli.help_file(words).read_text('utf-8'), words\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "transformers", "hf_ctxmodels"} & set(result.stdout.split())


def test_help_written_to_closed_pipe():
    command = f"{sys.executable} -c 'import hf_ctxmodels_cli as cli; cli.main()' pretrain --help | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("encoding", "written"), [(None, "é → हि".encode()), ("cp1252", "é ".encode("cp1252") + rb"\u2192 \u0939\u093f")]
)
def test_characters_outside_the_encoding_of_the_output(encoding, written):
    code = f"import hf_ctxmodels_cli as cli; cli._write_all_characters(); print({'é → हि'!a}, end='')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment.pop("PYTHONIOENCODING", None)
    environment |= {} if encoding is None else {"PYTHONIOENCODING": encoding}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert result.stdout == written, result.stderr


def test_interrupted_import_has_no_traceback():
    code = """
import sys
import hf_ctxmodels_cli as cli
class InterruptingFinder:
    def find_spec(name, path, target=None):
        if name == "hf_ctxmodels.core.console":
            raise KeyboardInterrupt
sys.meta_path.insert(0, InterruptingFinder)
sys.argv = ["hf-ctxmodels", "pretrain"]
cli.main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (130, "\nInterrupted.\n")


def test_second_interruption_has_no_traceback(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "collect", interrupt)
    with pytest.raises(SystemExit, match="130"):
        run_script(interrupt)
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_matplotlib_backend_of_notebook_is_ignored():
    """A cell of a notebook passes the name of its backend to a command of another environment."""
    code = "import atexit, sys; atexit.register(__import__, 'matplotlib.figure'); import hf_ctxmodels_cli as cli; "
    code += "sys.argv = ['hf-ctxmodels', 'recipes']; cli.main()"
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


def test_package_import_is_lazy(process_without_package):
    code = "import sys, hf_ctxmodels; print(*sys.modules); hf_ctxmodels.DataCollatorForMaskedLM"
    result = process_without_package.run("-c", code)
    assert result.returncode == 0, result.stderr
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
def test_environment_is_set_before_torch_import(name, value, expected, tmp_path, monkeypatch):
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
def test_thread_count_respects_cpu_quota(quota, environment, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr("hf_ctxmodels.core.torch_environment.cpu_count", lambda: quota)
    monkeypatch.delitem(sys.modules, "torch")
    configure_torch()
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("command", LEAF_COMMANDS)
def test_command_help_matches_stored_help(capsys, command):
    assert run_command(*command.split(), "--help") == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: hf-ctxmodels {command} [--help]")
    assert output == cli.help_file(command).read_text("utf-8"), "run `python scripts/write_help.py`"
    flags = [line.split()[0] for line in output.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags))
    assert len(flags) <= (62 if command in ("finetune seq2seq", "pretrain") else 54)
    if command == "finetune sequence-classification":
        assert len(flags) <= 49
        assert flags[1:11] == [f"--{name}" for name in finetune.ESSENTIAL]
    descriptions = [line.strip() for line in output.splitlines()]
    assert not [text for text in descriptions if text.endswith("(default: None)")]


def test_stored_help_has_no_removed_commands():
    assert set(cli.HELP_FOLDER.iterdir()) == {cli.help_file(command) for command in LEAF_COMMANDS}


def test_suggestion_for_misspelled_command(capsys):
    assert run_command("pretain", "--family", "bert") == 2
    assert "did you mean pretrain?" in capsys.readouterr().err
    assert run_command("finetune", "regresion") == 2
    assert "did you mean regression?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        ("pretrain --lr 1e-4", "--learning_rate"),
        ("finetune regression --epochs=3", "--num_train_epochs"),
        ("push --modle runs/bert", "--model"),
        ("evaluate words --neer king", "--near"),
    ],
)
def test_suggestion_for_unknown_flag(capsys, arguments, suggestion):
    """There is one suggestion, although required flags are missing as well."""
    assert run_command(*arguments.split()) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("CtxError: Unknown flag --")
    assert f"did you mean {suggestion}? see `hf-ctxmodels " in lines[2]


def test_all_extra_includes_documented_extras():
    rows = re.findall(r"^\| `\.\[(\w+)\]` \|", (ROOT / "README.md").read_text("utf-8"), re.M)
    all_extra = PROJECT["project"]["optional-dependencies"]["all"][0]
    assert set(rows[: rows.index("all")]) == set(re.search(r"\[(.*)\]", all_extra)[1].split(","))
    assert set(rows) <= set(PROJECT["project"]["optional-dependencies"])


def test_make_demo_prints_activation_command():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # by `make test`
    command = ["make", "-n", "demo", "VENV=.venv"]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=environment).stdout
    assert "hf-ctxmodels is .venv/bin/hf-ctxmodels; activate its environment: source .venv/bin/activate" in output


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/recipes/*.yaml")), ids=lambda path: path.stem)
def test_recipe_values_are_valid(path, capsys):
    command_match = re.search(rf"(?:hf-ctxmodels|hf_ctxmodels) ([a-z0-9 -]+?) --recipe {path.stem}\b", path.read_text())
    flags = ["--recipe", str(path), "--max_steps", "1" * 9, "--learning_rate", "fast"]
    assert run_command(*command_match[1].split(), *flags) == 2
    assert "--learning_rate: invalid value 'fast'" in capsys.readouterr().err, "all other values are valid"


@pytest.mark.parametrize("name", ["bert_tiny_demo", "bert_tiny_demo.yaml"])
def test_recipe_by_name_or_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    flags = ["--recipe", name, "--output_dir", "o", "--max_steps", "3"]
    pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
    assert (pretraining.family, pretraining.dataset, loop.max_steps) == ("bert", ["demo"], 3)
    (tmp_path / name).write_text("family: albert\ndataset: x\n")
    assert parse_arguments(PretrainingArguments, LoopArguments, argv=flags)[0].family == "albert", "the file wins"


def test_repeated_list_flags():
    argv = ["--model", "a", "b", "--port=0", "--model=c", "--corpus", "d", "--model", "e"]
    assert join_repeated(argv, {"model"}) == ["--model", "a", "b", "c", "e", "--port=0", "--corpus", "d"]


def test_missing_recipe_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CtxError, match=r"--recipe bert_tinydemo\n.*did you mean bert_tiny_demo"):
        parse_arguments(LoopArguments, argv=["--recipe", "bert_tinydemo"])


def test_repeated_flag_of_recipe_raises(tmp_path):
    (tmp_path / "a.yaml").write_text("max_steps: 3\nseed: 1\nmax_steps: 4\n")
    with pytest.raises(CtxError, match="'max_steps' occurs twice, first in line 1") as error:
        parse_arguments(LoopArguments, argv=["--recipe", str(tmp_path / "a.yaml")])
    assert error.value.location == f"{tmp_path / 'a.yaml'}:3"
    (tmp_path / "a.yaml").write_text("seed: 1\noptimizer:\n  adamw: {beta1: 0.8,\n beta1: 0.9}\n")
    with pytest.raises(CtxError, match="'beta1' occurs twice, first in line 3") as error:
        parse_arguments(LoopArguments, argv=["--recipe", str(tmp_path / "a.yaml")])
    assert error.value.location == f"{tmp_path / 'a.yaml'}:4"


def test_recipes_command_lists_all_recipes(capsys):
    assert run_command("recipes") == 0
    output = capsys.readouterr().out
    assert "  bert_base                 BERT-base, phase 1 (Devlin et al. 2019, appendix A.2): 90% of 1M" in output
    assert "with 256 sequences per step.\n  bert_base_512 " in output.replace("\n" + 28 * " ", " ")
    assert all(path.stem in output for path in ROOT.glob("scripts/recipes/*.yaml"))
    assert all(f"  {path.stem} " in output for path in ROOT.glob("scripts/text2text/*.yaml"))
    assert all(f"  {path.stem} " in output for path in ROOT.glob("scripts/prompts/*.yaml"))
    assert all(f"  {path}\n" in output for path in ROOT.glob("scripts/accelerate/*.yaml"))


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the wheel installs."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, which builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_contents(wheel_files: Path):
    for folder in ("recipes", "tasks", "text2text", "prompts", "behavior", "comparisons", "accelerate"):
        expected = {path.name: path.read_bytes() for path in (ROOT / "scripts" / folder).glob("*.yaml")}
        assert expected
        assert {path.name: path.read_bytes() for path in (wheel_files / "hf_ctxmodels" / folder).iterdir()} == expected
    assets = {path.name for path in (ROOT / "hf_ctxmodels" / "analysis" / "report" / "assets").iterdir()}
    assert {path.name for path in (wheel_files / "hf_ctxmodels" / "analysis" / "report" / "assets").iterdir()} == assets
    assert len(list((wheel_files / "hf_ctxmodels" / "cli" / "help").iterdir())) == len(LEAF_COMMANDS)
    assert not (wheel_files / "scripts").exists()
    entries = next(wheel_files.glob("*.dist-info/entry_points.txt")).read_text()
    assert "hf-ctxmodels = hf_ctxmodels_cli:main" in entries


@pytest.mark.slow
def test_recipe_of_wheel_trains(wheel_files: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text(TEXT)
    get_family("bert").tokenizer.train([TEXT], vocab_size=60).save_pretrained(tmp_path / "tokenizer")
    flags = "--recipe bert_tiny_demo --tokenizer tokenizer --dataset text.txt --validation_fraction 0 --max_length 32"
    flags += " --max_steps 1 --per_device_batch_size 2 --dataloader_workers 0 --output_dir out"
    environment = {**os.environ, "PYTHONPATH": str(wheel_files)}
    command = [sys.executable, "-m", "hf_ctxmodels", "pretrain", *flags.split()]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert (summary["model_type"], summary["steps"]) == ("ctx-bert", 1)
    assert summary["command"] == f"hf-ctxmodels pretrain {flags}"
    for directory in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):  # opened with trust_remote_code=True
        assert "ctx_bert_auto.py" in json.loads((directory / "manifest.json").read_text())["sha256"]
        assert (directory / "ctx_bert_auto.py").is_file()


def test_gpt3_recipes_match_paper():
    """Brown et al. 2020, table 2.1: tokens per step and peak learning rate of each size; 300 billion tokens, warm-up
    over 375 million (appendix B)."""
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


def loop_arguments(recipe: str, folder: Path) -> LoopArguments:
    """The arguments of the training loop in a recipe of any command."""
    settings = yaml.safe_load((ROOT / "scripts" / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    names = {field.name for field in fields(LoopArguments)}
    settings = {name: value for name, value in settings.items() if name in names}
    (folder / "loop.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return parse_arguments(LoopArguments, argv=["--recipe", str(folder / "loop.yaml"), "--output_dir", "o"])[0]


def test_global_batch_sizes_of_recipes_match_comments(tmp_path):
    """Also that a comment has the number of processes of its command."""
    sizes = {}
    for path in sorted(ROOT.glob("scripts/recipes/*.yaml")):
        comment = " ".join(re.findall("^#(.*)", path.read_text(encoding="utf-8"), re.MULTILINE))
        if match := re.search(r"x processes = (\d+)\b.*?\bfor +(\d+|one) +(?:process|device)", comment):
            arguments, processes = loop_arguments(path.stem, tmp_path), int(match[2].replace("one", "1"))
            sizes[path.stem] = int(match[1])
            size = arguments.per_device_batch_size * arguments.gradient_accumulation_steps * processes
            assert size == sizes[path.stem], path.stem
            assert int((re.search(r"--num_processes (\d+)", comment) or [0, 1])[1]) == processes, path.stem
    assert len(sizes) > 15
    assert sizes["mass_summaries"] == 4096, "as in the README of MASS-summarization"


@pytest.mark.parametrize(
    ("recipe", "beta2", "epsilon", "weight_decay", "max_grad_norm"),
    [
        ("bart_paper", 0.999, 1e-8, 0.01, 0.1),
        ("bart_released", 0.999, 1e-8, 0.01, 0.1),
        ("distilbert", 0.98, 1e-6, 0, 5),
        ("electra_small", 0.999, 1e-6, 0.01, 1),
        ("gpt_finetune", 0.999, 1e-8, 0.01, 1),
        ("mass_summaries", 0.98, 1e-6, 0.01, 0),
        ("mass_translation", 0.98, 1e-8, 0, 5),
        ("roberta_base", 0.98, 1e-6, 0.01, 0),
        ("spanbert_base", 0.999, 1e-8, 0.01, 1),
        ("transformer_xl_base", 0.999, 1e-8, 0, 0.25),
        ("transformer_xl_enwik8", 0.999, 1e-8, 0, 0.25),
        ("xlm_base", 0.98, 1e-8, 0, 5),
        ("xlm_xnli", 0.999, 1e-8, 0, 0),
    ],
)
def test_optimizer_of_recipe_matches_released_code(recipe, beta2, epsilon, weight_decay, max_grad_norm, tmp_path):
    """The flags of the released command, and the defaults of the released code for the other settings."""
    arguments = loop_arguments(recipe, tmp_path)
    assert arguments.optimizer == AdamWOptions(beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    assert arguments.max_grad_norm == max_grad_norm


@pytest.mark.parametrize("recipe", ["tinybert_task_1", "xlm_xnli"])
def test_rate_of_recipe_is_constant_as_in_released_code(recipe, tmp_path):
    """The schedule `none` of TinyBERT's task_distill.py for the intermediate layers; `adam` of XLM's glue-xnli.py."""
    arguments = loop_arguments(recipe, tmp_path)
    assert (arguments.lr_scheduler, arguments.warmup_steps) == (ConstantOptions(), 0)


def test_albert_recipe_has_dropout_of_first_release():
    """125,000 steps are the first release's (Lan et al. 2019, section 4.1); the second one has no dropout (README)."""
    flags = ["--recipe", "albert_base", "--output_dir", "o", "--dataset", "x"]
    pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
    fields = get_family("albert").sizes[pretraining.config]
    assert loop.max_steps == 125_000
    assert (fields["hidden_dropout_prob"], fields["attention_probs_dropout_prob"]) == (0.1, 0.1)


def test_elmo_recipes_initialize_softmax_as_released_code():
    """bilm-tf's training.py: a standard deviation of 1 / sqrt(width of a direction)."""
    for recipe in ("elmo_base", "elmo_small"):
        flags = ["--recipe", recipe, "--output_dir", "o", "--dataset", "x"]
        pretraining, _ = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
        width = get_family("elmo").sizes[pretraining.config]["hidden_size"] // 2
        options = parse_config_options(pretraining.config_options)
        assert options["initializer_range"] == pytest.approx(width**-0.5, rel=1e-2), recipe
