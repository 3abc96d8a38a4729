"""Compares results with expected_failures.toml: the listed tests must fail with the listed errors, all others pass."""

import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Markers of the tests of transformers.
MARKERS = ("accelerate_tests", "flash_attn_3_test", "flash_attn_4_test", "flash_attn_test", "torch_compile_test")


@dataclass(frozen=True)
class ExpectedFailure:
    """Expected failures of tests whose names and classes match patterns, with a common reason."""

    tests: list[str]
    cases: list[str]
    error: str  # regular expression
    reason: str

    def covers(self, item: pytest.Item) -> bool:
        case = item.parent.name if item.parent is not None else ""
        return _matches(item.name, self.tests) and _matches(case, self.cases)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ExpectedFailureChecker:
    """Plugin that reports expected failures as xfail, and any other result of these tests as a failure."""

    def __init__(self, entries: list[ExpectedFailure]) -> None:
        self.entries = entries
        self.expected: dict[str, ExpectedFailure] = {}  # by test id
        self.failed: set[str] = set()  # ids of tests, or tests with subtests, that have failed as expected

    def match_items(self, items: list[pytest.Item]) -> list[ExpectedFailure]:
        """Assign entries to tests; returns the entries without a test."""
        for item in items:
            entries = [entry for entry in self.entries if entry.covers(item)]
            if len(entries) > 1:
                raise pytest.UsageError(f"{item.nodeid} matches several entries: {[entry.reason for entry in entries]}")
            if entries:
                self.expected[item.nodeid] = entries[0]
        matched = list(self.expected.values())
        return [entry for entry in self.entries if entry not in matched]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Change the report before it is counted or sent to the controller process."""
        entry = self.expected.get(report.nodeid)
        if entry is None or (report.when != "call" and report.passed):
            return
        is_subtest = hasattr(report, "context")  # the test itself is reported afterwards
        if report.failed and re.search(entry.error, report.longreprtext):
            self.failed.add(report.nodeid)
            report.outcome, report.wasxfail = "skipped", entry.reason
        elif report.failed:
            report.longrepr = f"{report.longreprtext}\n\nExpected error: {entry.error!r}"
        elif not is_subtest and report.nodeid not in self.failed:
            report.longrepr = f"{report.outcome}, but was expected to fail: {entry.reason}. {report.longrepr or ''}"
            report.outcome = "failed"


def pytest_configure(config: pytest.Config) -> None:
    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: marker of the tests of transformers")
    is_controller = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not is_controller:
        table = tomllib.loads((HERE / "expected_failures.toml").read_text("utf-8"))
        entries = [ExpectedFailure(**entry) for entry in table["expected"]]
        config.pluginmanager.register(ExpectedFailureChecker(entries), "expected_failures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    checker = config.pluginmanager.get_plugin("expected_failures")
    unused = checker.match_items(items) if checker else []
    if unused and [Path(argument).resolve() for argument in config.args] == [HERE]:
        raise pytest.UsageError("entries of expected_failures.toml without a test: " + "; ".join(map(str, unused)))
