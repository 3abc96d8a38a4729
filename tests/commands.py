"""Run a command of `hf-ctxmodels` in this process."""

import sys

import pytest

from hf_ctxmodels_cli import main


def run_command(*words: object) -> int:
    """The exit code of `hf-ctxmodels WORDS...`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hf-ctxmodels", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
    return int(stopped.value.code or 0)
