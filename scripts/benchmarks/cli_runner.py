"""Run commands of the package in subprocesses."""

import os
import shlex
import subprocess
import sys

from hf_ctxmodels.core.errors import CtxError


def run_command(command: str, *flags: object, quiet: bool = False, threads: int | None = None) -> str:
    """Run a command offline and return its command line.

    Args:
        command: Name of the command, for example "pretrain".
        flags: Its arguments.
        quiet: Print neither the command nor its output.
        threads: Number of threads; by default as many as this process has.

    Raises:
        CtxError: The command failed.
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
        raise CtxError(
            f"hf-ctxmodels {command} failed.\n{result.stderr or ''}", hint="read the message of the command above."
        )
    return line
