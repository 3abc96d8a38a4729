"""Run tests on a modified copy of the repository, in a process forked from one that has imported the dependencies."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

# Imported before the fork, which saves five seconds per run.
import datasets  # noqa: F401
import hypothesis.strategies  # noqa: F401
import matplotlib.figure  # noqa: F401
import pytest
import scipy.stats  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch
from torch.utils import data  # noqa: F401
from transformers import AutoModelForSeq2SeqLM, LogitsProcessorList, Trainer  # noqa: F401

ROOT = Path(__file__).parents[2]
TEST_LIMIT = 120  # seconds, with fixtures; tests that are not `slow` take about 4 s
_COMPLETED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True)
class TestRun:
    """Result of a pytest run that stopped at the first failure.

    Attributes:
        failed_test: Node id of the test (or file) that failed, or what failed before any test; None if all passed.
        output: End of pytest's output.
    """

    __test__ = False
    failed_test: str | None
    output: str


class _FirstFailure:
    """pytest plugin that records the first failed test or the first file that could not be collected.

    A test that takes more than `test_limit` seconds fails: it is assumed not to terminate.
    """

    node_id: str | None = None

    def __init__(self, test_limit: int) -> None:
        self.test_limit = test_limit
        signal.signal(signal.SIGALRM, self._fail_test)

    def _fail_test(self, *_: object) -> None:
        pytest.fail(f"The test took more than {self.test_limit} s.")

    def pytest_collectstart(self) -> None:
        signal.alarm(self.test_limit)

    def pytest_runtest_logstart(self) -> None:
        signal.alarm(self.test_limit)

    def pytest_collection_finish(self) -> None:
        signal.alarm(0)

    def pytest_runtest_logfinish(self) -> None:
        signal.alarm(0)  # or pytest's own work after the last test would be interrupted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.node_id is None:
            self.node_id = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.node_id is None:
            self.node_id = report.nodeid


def scratch_copy(target: Path) -> Path:
    """Copy the files that git tracks or does not ignore to `target`, with the real data that some tests read."""
    listing = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in listing.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for shared in (ROOT / "shared", ROOT.parent / "shared"):
        if shared.is_dir() and not (target.parent / "shared").exists():
            (target.parent / "shared").symlink_to(shared)
    return target


def run_in_fork(
    tree: Path,
    tests: Sequence[str],
    keyword: str = "",
    time_limit: float | None = None,
    test_limit: int = TEST_LIMIT,
) -> TestRun | None:
    """Run tests of a scratch copy until the first failure; None if all tests pass for `time_limit` seconds.

    A test that takes more than `test_limit` seconds fails.

    Raises:
        RuntimeError: pytest could not run the tests, for example because a file is missing.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(tree, tests, keyword, test_limit, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit):
            return None
        status, node_id, output = receiver.recv()
    except EOFError:
        return TestRun("crash of the test process", "")
    finally:
        process.kill()
        process.join()
    if status == pytest.ExitCode.INTERNAL_ERROR and node_id is None:  # plugins of the tests import the package
        return TestRun("import of the tests' plugins", output)
    if status not in _COMPLETED and node_id is None:
        raise RuntimeError(f"pytest exited with {status} for {' '.join(tests)} -k {keyword!r}:\n{output}")
    return TestRun(node_id, output)


def _run_tests(tree: Path, tests: Sequence[str], keyword: str, test_limit: int, result: Connection) -> None:
    os.chdir(tree)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(tree)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hf_ctxmodels")]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")  # or every process that a test starts would import the main script
    torch.set_num_threads(1)
    output, first_failure = io.StringIO(), _FirstFailure(test_limit)
    with redirect_stdout(output), redirect_stderr(output):
        options = ["-x", "-q", "-m", "not slow or matrix", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
        selection = ["-k", keyword] if keyword else []
        status = pytest.main([*options, *selection, *tests], plugins=[first_failure])
    result.send((int(status), first_failure.node_id, output.getvalue()[-2000:]))
