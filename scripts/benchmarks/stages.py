"""Running commands of the package one after the other, as a user does."""

import os
import shlex
import subprocess
import sys

from hf_ctxmodels.core.errors import CtxError


def run_stage(command: str, *flags: object, quiet: bool = False, threads: int | None = None) -> str:
    """Run a command to its end, without the network; gives the command line.

    Args:
        command: its name, such as "pretrain".
        flags: its command line.
        quiet: show neither the command nor what it prints.
        threads: what it may compute with; by default what this process may.

    Raises:
        CtxError: it failed.
    """
    line = shlex.join(["hf-ctxmodels", command, *map(str, flags)])
    if not quiet:
        print(f"\n$ {line}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    result = subprocess.run(
        [sys.executable, "-m", "hf_ctxmodels", command, *map(str, flags)],
        env=environment,
        capture_output=quiet,
        text=True,
        check=False,
    )
    if result.returncode:
        raise CtxError(f"hf-ctxmodels {command} failed.\n{result.stderr or ''}", hint="see its message above.")
    return line
