"""Runs the commands of the demo in its output directory, and prints their results with their baselines."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from joblib import cpu_count

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.output_files import check_output_directory, write_text_file

RECORD_FILE = "demo.json"
_POLL_INTERVAL = 0.2  # seconds
_STOP_TIMEOUT = 60  # seconds for a stopped command to save its checkpoint
_NUM_LOG_LINES = 12
_WIDTH = 100
_KEEP_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True)
class Result:
    """A measured value of a metric, and the baselines to beat by name."""

    name: str
    value: float
    baselines: Mapping[str, float]
    lower_is_better: bool = False
    number_format: str = ".3f"

    @property
    def beats_baselines(self) -> bool:
        """Whether the value is better than every baseline."""
        sign = -1 if self.lower_is_better else 1
        return all(sign * self.value > sign * baseline for baseline in self.baselines.values())

    def __str__(self) -> str:
        baselines = ", ".join(f"{value:{self.number_format}} {name}" for name, value in self.baselines.items())
        verb = "beats" if self.beats_baselines else "does not beat"
        return f"{self.name:<44}{self.value:>8{self.number_format}}   {verb} {baselines}"


class DemoReport:
    """Prints to standard output; on a terminal, a status line below is updated in place."""

    def __init__(self, sections: int) -> None:
        self._sections = sections
        self._section = 0
        self._start = time.perf_counter()
        self._is_terminal = sys.stdout.isatty()
        self.results: list[Result] = []

    @property
    def elapsed(self) -> str:
        """Time since the start, for example "1:05"."""
        minutes, seconds = divmod(round(time.perf_counter() - self._start), 60)
        return f"{minutes}:{seconds:02d}"

    def section(self, title: str) -> None:
        """Print the title of the next section."""
        self._section += 1
        heading = f"[{self._section}/{self._sections}] {title}"
        self.line(f"\n{heading:<{_WIDTH - 8}}{self.elapsed:>8}", indent="")

    def line(self, text: str = "", indent: str = "  ") -> None:
        """Print a line."""
        self._clear()
        print(f"{indent}{text}" if text else "", flush=True)

    def text(self, text: str) -> None:
        """Print a paragraph."""
        for line in textwrap.wrap(text, _WIDTH - 2, **_KEEP_WORDS):
            self.line(line)

    def command(self, *arguments: object) -> None:
        """Print a command line of the package."""
        line = f"$ hf-ctxmodels {shlex.join(map(str, arguments))}"
        lines = textwrap.wrap(line, _WIDTH - 6, subsequent_indent="      ", **_KEEP_WORDS)
        self.line(" \\\n  ".join(lines))

    def result(self, result: Result, explanation: str) -> None:
        """Print a result with its baselines and an explanation."""
        self.results.append(result)
        self.line(str(result))
        for line in textwrap.wrap(explanation, _WIDTH - 6, **_KEEP_WORDS):
            self.line(line, indent="      ")

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table with two columns."""
        width = max(len(name) for name, _ in rows) + 2
        for name, value in rows:
            self.line(f"{name:<{width}}{value}")

    def status(self, text: str) -> None:
        """Show progress on a terminal; the next line replaces it."""
        if self._is_terminal:
            self._clear()
            print(f"  {text[: _WIDTH - 2]}", end="\r", flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="")


class Stage:
    """A command of the package in a subprocess, with its output in a log file; `on_success` is called with its duration
    in seconds."""

    def __init__(self, arguments: list[str], log: Path, threads: int, on_success: Callable[[float], None]) -> None:
        self.arguments, self.log = arguments, log
        self._on_success, self._start = on_success, time.time()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            # a new session, so that Ctrl-C reaches the process only through `stop`
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hf_ctxmodels", *arguments],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of the command, and call `on_poll` often; raises CtxError if it failed."""
        while self._process.poll() is None:
            on_poll()
            try:
                self._process.wait(_POLL_INTERVAL)
            except subprocess.TimeoutExpired:
                continue
        if self._process.returncode:
            output = "\n".join(self.last_output(_NUM_LOG_LINES))
            raise CtxError(
                f"hf-ctxmodels {self.arguments[0]} failed with exit code {self._process.returncode}:\n{output}",
                location=str(self.log),
                hint="fix the error above and run the demo again; it continues from here.",
            )
        self._on_success(max(0.0, self.log.stat().st_mtime - self._start))  # it may have ended before this call

    def last_output(self, number: int = 1) -> list[str]:
        """Last lines of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-number:]

    def stop(self) -> None:
        """Terminate a running command; training saves a checkpoint first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()


class DemoRunner:
    """Runs every stage of the demo once in an output directory.

    Args:
        folder: Output directory, created if needed.
        settings: Settings that the results depend on; finished stages of other settings are not reused.
        output_names: Names of the files and directories that the stages write.
        overwrite: Delete the output of an earlier demo, without which its settings must be equal.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], output_names: Sequence[str], *, overwrite: bool
    ) -> None:
        self.folder = folder
        self._record: dict[str, Any] = {"settings": dict(settings), "seconds": {}}
        self._running: list[Stage] = []
        record = read_json(folder / RECORD_FILE) if (folder / RECORD_FILE).is_file() and not overwrite else {}
        if isinstance(record, dict) and record.get("settings") == self._record["settings"]:
            self._record = record
        else:
            check_output_directory(folder, [RECORD_FILE, *output_names], flag="--output_dir", overwrite=overwrite)
            for name in (RECORD_FILE, *output_names):
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.resumed = bool(self._record["seconds"])
        self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stage in self._running:
            stage.stop()

    def seconds(self, name: str) -> float | None:
        """Duration of a stage; None if it is not finished."""
        return self._record["seconds"].get(name)

    def start(self, name: str, command: str, *flags: object, output: Path, threads: int) -> Stage | None:
        """Start or resume a stage: a command of the package with flags, and its output directory; None if finished."""
        if self.seconds(name) is not None and output.exists():
            return None
        arguments = [command, *map(str, flags), "--output_dir", str(output)]
        if output.exists():
            arguments.append("--resume" if command == "pretrain" else "--overwrite")

        def record(seconds: float) -> None:
            self._record["seconds"][name] = round(seconds, 1)
            self._save()

        stage = Stage(arguments, self.folder / "logs" / f"{name}.log", threads, on_success=record)
        self._running.append(stage)
        return stage

    def run(self, report: DemoReport, name: str, command: str, *flags: object, output: Path) -> None:
        """Print the command of a stage and run it, with the arguments of `start`."""
        report.command(command, *flags, "--output_dir", output)
        stage = self.start(name, command, *flags, output=output, threads=num_foreground_threads())
        if stage is None:
            report.line(f"using the output of an earlier run ({self.seconds(name):.0f} s)")
            return
        stage.wait(lambda: report.status(f"... {''.join(stage.last_output()) or 'starting'}"))
        report.line(f"done in {self.seconds(name):.0f} s")

    def _save(self) -> None:
        write_text_file(self.folder / RECORD_FILE, json.dumps(self._record, indent=2) + "\n")


def num_foreground_threads() -> int:
    """Number of threads without the one that pretrains in the background."""
    return max(1, cpu_count() - 1)
