"""Run a command of `hf-ctxmodels` in this process."""

import sys

import pytest

from hf_ctxmodels_cli import main


def run_command(*words: object, **flags: object) -> int:
    """The exit code of `hf-ctxmodels WORDS... --name value ...`; see `flag_list`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hf-ctxmodels", *map(str, words), *flag_list(**flags)])
        with pytest.raises(SystemExit) as stopped:
            main()
    return int(stopped.value.code or 0)


def flag_list(**flags: object) -> list[str]:
    """`--name value` for each flag; a list gives several values, True no value."""
    words = []
    for name, value in flags.items():
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [f"--{name}", *map(str, values)]
    return words
