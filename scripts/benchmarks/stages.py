"""Running the package's scripts one after the other, as a user does."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError


def run_stage(script: Path, *flags: object, quiet: bool = False, threads: int | None = None) -> str:
    """Run a script to its end, without the network; gives the command line.

    Args:
        script: file of the script.
        flags: its command line.
        quiet: show neither the command nor what it prints.
        threads: what it may compute with; by default what this process may.

    Raises:
        CtxError: it failed.
    """
    command = shlex.join(["python", f"scripts/{script.name}", *map(str, flags)])
    if not quiet:
        print(f"\n$ {command}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    result = subprocess.run(
        [sys.executable, str(script), *map(str, flags)], env=environment, capture_output=quiet, text=True, check=False
    )
    if result.returncode:
        raise CtxError(f"scripts/{script.name} failed.\n{result.stderr or ''}", hint="see its message above.")
    return command
