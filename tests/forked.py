"""Processes that have imported the package when they start: to import torch and transformers takes five seconds.

A process is forked from a server (`multiprocessing`'s) that has imported and done nothing: it has its own memory,
files, signals and exit code, as one that a user starts, and runs the script as `__main__`. What depends on the
interpreter's start (imports, variables that are read then) is for `subprocess`.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hf_ctxmodels.training.pretraining"])


class ForkedProcess:
    """`python <command>` under way: a script with its flags, `-m` and a module's name, or `-c` and a program.

    It leads a process group of its own, and computes with one thread. The methods are those of `subprocess.Popen`.
    """

    def __init__(self, *command: object, cwd: Path | None = None, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("output", "errors")]
        arguments = (list(map(str, command)), str(cwd or Path.cwd()), {**os.environ, **environment}, self._streams)
        self._process = _CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number where one ended the process, or None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for the end: standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it lasts longer; the process group is killed.
        """
        self._process.join(timeout)
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        output, errors = (path.read_text("utf-8") for path in self._streams)
        return output, errors


def run_forked(*command: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """What `subprocess.run` gives of `python <command>`."""
    process = ForkedProcess(*command, cwd=cwd, **environment)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _run(command: list[str], cwd: str, environment: dict[str, str], streams: list[Path]) -> None:
    """In the new process: become `python <command>`."""
    os.setsid()
    for number, path in enumerate(streams, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
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
