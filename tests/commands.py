"""Run `hf-ctxmodels` commands and scripts in the current process."""

import gc
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from zoo import tiny_config

from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels_cli import main

_TWO_PROCESSES = """
from accelerate import debug_launcher
from hf_ctxmodels_cli import run
debug_launcher(run, num_processes=2)
"""


def run_command(*arguments: object, **flags: object) -> int:
    """Exit code of `hf-ctxmodels ARGUMENTS... --name value ...`; see `flag_list`."""
    return _exit_code(main, "hf-ctxmodels", *arguments, *flag_list(**flags))


def run_file(script: Path, *arguments: object) -> int:
    """Exit code of `python SCRIPT ARGUMENTS...`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(script.parent))
        return _exit_code(partial(runpy.run_path, str(script), run_name="__main__"), script.name, *arguments)


def _exit_code(function: Callable[[], object], *argv: object) -> int:
    collect = gc.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, argv)])
        # a full one would scan the objects of other tests
        patch.setattr(gc, "collect", lambda generation=1: collect(min(generation, 1)))
        with pytest.raises(SystemExit) as exit_info:
            function()
    return int(exit_info.value.code or 0)


def command_output(command: str | Path, *arguments: object, fails: bool = False, **flags: object) -> str:
    """Standard output of a command or script; with `fails`, standard error after exit code 2."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        arguments = *arguments, *flag_list(**flags)
        code = run_file(command, *arguments) if isinstance(command, Path) else run_command(*command.split(), *arguments)
    assert code == (2 if fails else 0), errors.getvalue()
    return errors.getvalue() if fails else output.getvalue()


def run_in_two_processes(*arguments: object, **flags: object) -> None:
    """Run a command in two forked processes; tests/training/test_faults.py uses `accelerate launch`."""
    result = run_forked("-c", _TWO_PROCESSES, *arguments, *flag_list(**flags), cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr[-3000:]


def flag_list(**flags: object) -> list[str]:
    """`--name value` for each flag; a list gives several values, True none."""
    arguments = []
    for name, value in flags.items():
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        arguments += [f"--{name}", *map(str, values)]
    return arguments


def tiny_pair(
    family: str, auto_class: str, texts: list[str], vocab_size: int = 300, seed: int = 0, **fields: Any
) -> tuple[Any, Any]:
    """A tiny randomly initialized model and a tokenizer trained on the texts."""
    spec = FAMILIES[family]
    tokenizer = spec.tokenizer.train(texts * 20, vocab_size=vocab_size)
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **fields}
    fields = {name: value for name, value in fields.items() if name in spec.config.__dataclass_fields__}
    torch.manual_seed(seed)
    return spec.models[auto_class](tiny_config(spec, **fields)).eval(), tokenizer


def save(folder: Path, *objects: Any) -> Path:
    """Save models, tokenizers and configurations in one directory."""
    for item in objects:
        item.save_pretrained(folder)
    return folder


def save_summary(folder: Path, task: str, max_length: int, **fields: Any) -> None:
    """Save the summary of a fine-tuning run in the directory of a model."""
    numbers = {"seed": 0, "parameters": 1, "steps": 1, "global_batch_size": 1, "max_length": max_length}
    TrainingSummary(task=task, model_class="", model_type="", dataset="train.tsv", **numbers, **fields).save(folder)
