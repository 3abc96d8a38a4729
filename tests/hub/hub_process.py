"""Processes with the local Hub as endpoint. huggingface_hub reads the endpoint when it is imported, so that the
processes of `forked` cannot be used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Self

from hub_server import ROOT, TOKEN, HubServer, environment_for

# Imports the package once, and executes each command of standard input in a forked process; prints pid and exit code.
FORK_COMMANDS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import forked, hf_ctxmodels_cli, hf_ctxmodels.training.pretraining
for line in sys.stdin:
    command, folder, environment, streams = json.loads(line)
    if not (child := os.fork()):
        forked.execute(command, folder, {**os.environ, **environment}, [Path(stream) for stream in streams])
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class HubProcess:
    """Runs `python <command>` in processes with a local Hub as endpoint; a context manager.

    The first command waits for the imports, which the processes share.
    """

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self._streams = [folder / "output", folder / "errors"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK_COMMANDS, str(ROOT / "tests")],
            cwd=ROOT,
            env=environment_for(hub, folder / "cache", TOKEN),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *command: object, cwd: Path = ROOT, **environment: str) -> int:
        """Start a command; returns its process id."""
        for stream in self._streams:
            stream.write_text("")
        job = (list(map(str, command)), str(cwd), environment, list(map(str, self._streams)))
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._command = command
        return int(self._process.stdout.readline())

    def finish(self) -> subprocess.CompletedProcess:
        """Wait for the last started command."""
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(self._command, code, *(path.read_text("utf-8") for path in self._streams))

    def run(self, *command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
        """Start a command and wait for it."""
        self.start(*command, cwd=cwd, **environment)
        return self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
