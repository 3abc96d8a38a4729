"""Plants the one-line faults of `faults.py` one by one in a scratch copy and shows that the suite catches each.

    python tests/faults/plant.py [--only TEXT] [--jobs N]

Prints a line per fault and exits with 1 if one was not caught. torch and transformers are imported once: every fault
runs in a process forked from this one, so that a fault costs its tests and not their start.
"""

import argparse
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
TESTS_FAILED = 1  # pytest's exit status; others say that the tests could not be run


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


def caught(fault: Fault, folder: Path) -> tuple[bool, str]:
    """Whether the tests fail with the fault planted, and what they said."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.planted(text), encoding="utf-8")
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
        path.write_text(text, encoding="utf-8")
    return status == TESTS_FAILED, output


def main() -> int:
    """Run the faults; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults with this text in their file or description")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at a time")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if arguments.only in f"{fault.file} {fault.what}"]
    missed = 0
    with tempfile.TemporaryDirectory() as base:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(scratch_copy(Path(base) / str(number) / "tree"))

        def examine(fault: Fault) -> tuple[Fault, bool, str, float]:
            folder, start = copies.get(), time.perf_counter()
            try:
                return fault, *caught(fault, folder), time.perf_counter() - start
            finally:
                copies.put(folder)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            for fault, found, output, seconds in pool.map(examine, chosen):
                print(f"{'caught' if found else 'MISSED'} {seconds:5.0f} s  {fault.file}: {fault.what}", flush=True)
                if not found:
                    missed += 1
                    print(output)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
