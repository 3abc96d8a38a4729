"""A process that has imported modules once, and executes each command in a fork of itself. Unlike the fork server of
`forked`, it starts with chosen environment variables and modules, such as another endpoint of the Hub."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]

# Imports the given modules in this order, then executes each command of standard input in a forked process; prints pid
# and exit code.
FORK_COMMANDS = """
import importlib, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
for module in sys.argv[2:]:
    importlib.import_module(module)
import forked
for line in sys.stdin:
    command, folder, environment, streams = json.loads(line)
    if not (child := os.fork()):
        forked.execute(command, folder, {**os.environ, **environment}, [Path(stream) for stream in streams])
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


class ForkServer:
    """Runs `python <command>` in forks of a process that has imported `modules`; a context manager.

    The first command waits for the imports, which the processes share.

    Args:
        modules: Names of the modules, imported in this order.
        environment: Environment variables of the process.
        folder: Folder for the output of the commands.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self._streams = [folder / "output", folder / "errors"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORK_COMMANDS, str(ROOT / "tests"), *modules],
            cwd=ROOT,
            env=environment,
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
