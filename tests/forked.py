"""Python processes that start without the five seconds of importing torch and transformers.

A process is forked from the fork server of `multiprocessing`, which has imported the package. It has separate memory,
files, signals and exit code, like a process that a user starts, and runs the script as `__main__`. Tests of imports
and of variables that are read at start-up use `subprocess`.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# with the modules that the commands import when they run
CONTEXT.set_forkserver_preload(["hf_ctxmodels.cli.pretrain", "hf_ctxmodels.cli.finetune", "matplotlib.figure"])


class ForkedProcess:
    """A running `python <command>`: a script with its flags, `-m` and a module, or `-c` and a program.

    The process leads a new process group and computes with one thread. The methods are named as in `subprocess.Popen`.
    """

    def __init__(self, *command: object, cwd: Path | None = None, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("output", "errors")]
        arguments = (list(map(str, command)), str(cwd or Path.cwd()), {**os.environ, **environment}, self._streams)
        self._process = CONTEXT.Process(target=execute, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative signal number if a signal ended the process, or None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for the process to exit; returns standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: After `timeout` seconds; the process group is killed.
        """
        self._process.join(timeout)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        output, errors = (path.read_text("utf-8") for path in self._streams)
        return output, errors


def run_forked(*command: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run `python <command>` and wait for it to exit."""
    process = ForkedProcess(*command, cwd=cwd, **environment)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def execute(command: list[str], cwd: str, environment: dict[str, str], streams: list[Path]) -> None:
    """Execute `python <command>` in a forked process, which writes to the files `streams` (output, errors)."""
    os.setsid()
    gc.freeze()  # collections, also at exit, would traverse and copy the objects of the imported modules
    for number, path in enumerate(streams, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # The first call in a fork replaces torch's thread pool; if two threads do it at once, torch aborts the process.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
