"""Plants the one-line faults of `faults.py` one by one in a scratch copy and shows that the suite catches each.

    python tests/faults/plant.py [--only TEXT ...] [--part I/N] [--unplanted] [--jobs N]

Prints a line per fault, then those that were not caught, and exits with 1 if there are any. With `--unplanted` no fault
is planted, and the same tests must pass: a fault is caught only by tests that pass without it. torch and transformers
are imported once: every fault runs in a process forked from this one, so that a fault costs its tests and not their
start.
"""

import argparse
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import transformers  # noqa: F401  # imported before the fork
from faults import FAULTS, Fault
from torch.utils import data  # noqa: F401

ROOT = Path(__file__).parents[2]
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit statuses; others say that the tests could not be run


def scratch_copy(target: Path) -> Path:
    """The files that git knows or does not ignore, as they are in the working tree."""
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for shared in (ROOT / "shared", ROOT.parent / "shared"):  # real data that some tests read in place
        if shared.is_dir() and not (target.parent / "shared").exists():
            (target.parent / "shared").symlink_to(shared)
    return target


def run_tests(folder: Path, fault: Fault, result: Connection) -> None:
    """In a process of its own: pytest's exit status and the end of what it printed."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(folder)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hf_ctxmodels", "benchmarks")]:
        del sys.modules[name]
    torch.set_num_threads(1)
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
        status = pytest.main([*options, *(["-k", fault.keyword] if fault.keyword else []), *fault.tests])
    result.send((int(status), output.getvalue()[-2000:]))


def write_module(path: Path, text: str) -> None:
    """Write a module, and remove its compiled form: a file of the same second and size would pass for it."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def outcome(fault: Fault, folder: Path, planted: bool) -> tuple[bool, str]:
    """Whether the tests fail with the fault planted, or pass without it; and what they said."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if planted:
        write_module(path, fault.planted(text))
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=run_tests, args=(folder, fault, sender))
    try:
        process.start()
        sender.close()
        status, output = receiver.recv()
    except EOFError:
        status, output = -1, "the process ended without a result"
    finally:
        process.join()
        write_module(path, text)
    return status == (TESTS_FAILED if planted else TESTS_PASSED), output


def chosen(arguments: argparse.Namespace) -> list[Fault]:
    """The faults that the command line asks for; without planting, one for each choice of tests."""
    faults = [fault for fault in FAULTS if any(text in f"{fault.file} {fault.what}" for text in arguments.only)]
    if arguments.unplanted:
        faults = list({(fault.tests, fault.keyword): fault for fault in faults}.values())
    number, parts = map(int, arguments.part.split("/"))
    return faults[number - 1 :: parts]


def main() -> int:
    """Run the faults; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="faults with one of these in their file or description")
    parser.add_argument("--part", default="1/1", help="every N-th of them, from the I-th on: I/N")
    parser.add_argument("--unplanted", action="store_true", help="plant nothing: the tests must pass")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at a time")
    arguments = parser.parse_args()
    faults, missed = chosen(arguments), []
    right, wrong = ("passes", "FAILS") if arguments.unplanted else ("caught", "MISSED")
    with tempfile.TemporaryDirectory() as base:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(scratch_copy(Path(base) / str(number) / "tree"))

        def examine(fault: Fault) -> tuple[Fault, bool, str, float]:
            folder, start = copies.get(), time.perf_counter()
            try:
                return fault, *outcome(fault, folder, not arguments.unplanted), time.perf_counter() - start
            finally:
                copies.put(folder)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            for fault, found, output, seconds in pool.map(examine, faults):
                print(f"{right if found else wrong} {seconds:5.0f} s  {fault.file}: {fault.what}", flush=True)
                if not found:
                    missed.append(fault)
                    print(output)
    print(f"{len(faults) - len(missed)} of {len(faults)}: {right}.")
    for fault in missed:
        print(f"{wrong}: {fault.file}: {fault.what}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
