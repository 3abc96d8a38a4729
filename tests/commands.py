"""Run commands of `hf-ctxmodels` and scripts in this process."""

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
from hf_ctxmodels_cli import main

_TWO_PROCESSES = """
from accelerate import debug_launcher
from hf_ctxmodels_cli import run
debug_launcher(run, num_processes=2)
"""


def run_command(*words: object, **flags: object) -> int:
    """The exit code of `hf-ctxmodels WORDS... --name value ...`; see `flag_list`."""
    return _exit_code(main, "hf-ctxmodels", *words, *flag_list(**flags))


def run_file(script: Path, *words: object) -> int:
    """The exit code of `python SCRIPT WORDS...`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(script.parent))
        return _exit_code(partial(runpy.run_path, str(script), run_name="__main__"), script.name, *words)


def _exit_code(function: Callable[[], object], *argv: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, argv)])
        patch.setattr(gc, "collect", partial(gc.collect, 1))  # a full collection would visit objects of other tests
        with pytest.raises(SystemExit) as stopped:
            function()
    return int(stopped.value.code or 0)


def command_output(command: str | Path, *words: object, fails: bool = False, **flags: object) -> str:
    """Standard output of a command or script, or standard error of one that fails with status 2."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        words = *words, *flag_list(**flags)
        code = run_file(command, *words) if isinstance(command, Path) else run_command(*command.split(), *words)
    assert code == (2 if fails else 0), errors.getvalue()
    return errors.getvalue() if fails else output.getvalue()


def run_in_two_processes(*words: object, **flags: object) -> None:
    """Run a command in two processes that meet in a file; tests/training/test_faults.py starts `accelerate launch`."""
    result = run_forked("-c", _TWO_PROCESSES, *words, *flag_list(**flags), cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr[-3000:]


def flag_list(**flags: object) -> list[str]:
    """`--name value` for each flag; a list gives several values, True no value."""
    words = []
    for name, value in flags.items():
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def tiny_pair(
    family: str, auto_class: str, texts: list[str], vocab_size: int = 300, seed: int = 0, **fields: Any
) -> tuple[Any, Any]:
    """A tiny random model and a tokenizer of the words of some texts."""
    spec = FAMILIES[family]
    tokenizer = spec.tokenizer.train(texts * 20, vocab_size=vocab_size)
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **fields}
    fields = {name: value for name, value in fields.items() if name in spec.config.__dataclass_fields__}
    torch.manual_seed(seed)
    return spec.models[auto_class](tiny_config(spec, **fields)).eval(), tokenizer


def save(folder: Path, *parts: Any) -> Path:
    """Save models, tokenizers and configurations in one directory."""
    for part in parts:
        part.save_pretrained(folder)
    return folder
