"""Fixtures of the parity tests."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "hf_ctxmodels" / "conversion"


@pytest.fixture
def run_conversion(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a conversion script with flags; returns the exit code."""

    def run(script: str, *arguments: object, **flags: object) -> int:
        argv = [argument for name, value in flags.items() for argument in (f"--{name}", value)]
        monkeypatch.setattr(sys, "argv", [script, *map(str, [*argv, *arguments])])
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return exit_info.value.code

    return run
