"""The demo's directory: what is finished there, and the commands that make the rest."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import read_json
from hf_ctxmodels.core.output_files import check_output_directory, wrap_write_errors
from hf_ctxmodels.demo.screen import Screen

RECORD = "demo.json"
_POLL = 0.2  # seconds
_PATIENCE = 60  # seconds for a stopped command to save its checkpoint
_LOG_LINES = 12


class Stage:
    """A command of the package in a process of its own, with what it prints in a file.

    Args:
        line: Its command line, from the command's name on.
        log: The file.
        threads: What it may compute with.
        done: Called once it has ended well, with its seconds.
    """

    def __init__(self, line: list[str], log: Path, threads: int, done: Callable[[float], None]) -> None:
        self.line, self.log = line, log
        self._done, self._start = done, time.time()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            # In a session of its own: an interruption at the keyboard reaches it through `stop` alone, and so once.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hf_ctxmodels", *line],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, watch: Callable[[], None] = lambda: None) -> None:
        """Wait for its end, and call `watch` a few times a second.

        Raises:
            CtxError: It failed.
        """
        while self._process.poll() is None:
            watch()
            try:
                self._process.wait(_POLL)
            except subprocess.TimeoutExpired:
                continue
        if self._process.returncode:
            said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            raise CtxError(
                f"hf-ctxmodels {self.line[0]} failed with exit code {self._process.returncode}:\n" + "\n".join(said),
                location=str(self.log),
                hint="see its message above; the same command goes on from here.",
            )
        self._done(max(0.0, self.log.stat().st_mtime - self._start))  # it may have ended some time ago

    def said(self) -> str:
        """The last line that it has printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "starting"

    def stop(self) -> None:
        """End it, if it runs; training saves a checkpoint first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()


class Workshop:
    """A directory in which stages are run, each of them once.

    Args:
        folder: It need not exist.
        settings: What the results depend on; stages of another demo are not taken over.
        made: Names of what the stages make in it.
        overwrite: Delete what an earlier demo has made, and start anew.

    Raises:
        CtxError: The directory holds one of these names, but no demo with these settings has made it.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], made: Sequence[str], *, overwrite: bool) -> None:
        self.folder = folder
        self._record: dict[str, Any] = {"settings": dict(settings), "seconds": {}}
        self._running: list[Stage] = []
        earlier = read_json(folder / RECORD) if (folder / RECORD).is_file() and not overwrite else {}
        if isinstance(earlier, dict) and earlier.get("settings") == self._record["settings"]:
            self._record = earlier
        else:
            check_output_directory(folder, [RECORD, *made], flag="--output_dir", overwrite=overwrite)
            for name in (RECORD, *made):
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.resumed = bool(self._record["seconds"])
        self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stage in self._running:
            stage.stop()

    def seconds(self, name: str) -> float | None:
        """What a stage took; None if it is not finished."""
        return self._record["seconds"].get(name)

    def start(self, name: str, command: str, *flags: object, output: Path, threads: int) -> Stage | None:
        """Start the command of a stage, unless it is finished; of an unfinished one, go on where that can be done.

        Args:
            name: Of the stage, and of its log.
            command: Of the package.
            flags: Its flags.
            output: Its --output_dir.
            threads: What it may compute with.
        """
        if self.seconds(name) is not None and output.exists():
            return None
        line = [command, *map(str, flags), "--output_dir", str(output)]
        begun = output.exists()
        again = [] if not begun else ["--resume"] if command == "pretrain" else ["--overwrite"]
        log = self.folder / "logs" / f"{name}.log"
        stage = Stage([*line, *again], log, threads, lambda seconds: self.finish(name, seconds))
        self._running.append(stage)
        return stage

    def run(self, screen: Screen, name: str, command: str, *flags: object, output: Path) -> None:
        """Show the command of a stage, and run it to its end; the arguments are those of `start`."""
        screen.command(command, *flags, "--output_dir", output)
        stage = self.start(name, command, *flags, output=output, threads=foreground_threads())
        if stage is None:
            screen.line(f"finished in an earlier run, in {self.seconds(name):.0f} s: its files are used")
            return
        stage.wait(lambda: screen.state(f"... {stage.said()}"))
        screen.line(f"done in {self.seconds(name):.0f} s")

    def finish(self, name: str, seconds: float) -> None:
        """Record that a stage is finished."""
        self._record["seconds"][name] = round(seconds, 1)
        self._save()

    def _save(self) -> None:
        with wrap_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f"{RECORD}.writing"
            temporary.write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, self.folder / RECORD)


def foreground_threads() -> int:
    """Threads beside the one that pretrains in the background."""
    return max(1, (os.cpu_count() or 1) - 1)
