"""Holds the results against expected_failures.toml: those tests fail with those errors, and no other test fails."""

import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Marks that the tests of transformers carry.
MARKERS = (
    "accelerate_tests",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "torch_compile_test",
)


@dataclass(frozen=True)
class Expected:
    """Failures with one reason.

    Attributes:
        tests: Patterns of names of tests.
        cases: Patterns of names of test classes.
        error: A regular expression that the failure's text holds.
        reason: Why this is no fault of ours.
    """

    tests: list[str]
    cases: list[str]
    error: str
    reason: str

    def covers(self, item: pytest.Item) -> bool:
        """Whether this is one of the tests."""
        case = item.parent.name if item.parent is not None else ""
        return _fits(item.name, self.tests) and _fits(case, self.cases)


def _fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def read_expected() -> list[Expected]:
    """The entries of the file."""
    table = tomllib.loads((HERE / "expected_failures.toml").read_text("utf-8"))
    return [Expected(**entry) for entry in table["expected"]]


class Judge:
    """Turns an expected failure into an xfail, and everything else that happens to such a test into a failure.

    Attributes:
        entries: All entries.
        expected: Test -> its entry.
        failed: Tests that have failed, or a part of which has, as expected.
    """

    def __init__(self, entries: list[Expected]) -> None:
        self.entries = entries
        self.expected: dict[str, Expected] = {}
        self.failed: set[str] = set()

    def learn(self, items: list[pytest.Item]) -> list[Expected]:
        """Note which failures are expected of which tests; gives the entries without a test."""
        for item in items:
            entries = [entry for entry in self.entries if entry.covers(item)]
            if len(entries) > 1:
                raise pytest.UsageError(f"{item.nodeid} is in two entries: {[entry.reason for entry in entries]}")
            if entries:
                self.expected[item.nodeid] = entries[0]
        used = list(self.expected.values())
        return [entry for entry in self.entries if entry not in used]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Before the report is counted, or sent to the process that counts."""
        entry = self.expected.get(report.nodeid)
        if entry is None or (report.when != "call" and report.passed):
            return
        is_part = hasattr(report, "context")  # of a test with several, which is reported itself at the end
        if report.failed and re.search(entry.error, report.longreprtext):
            self.failed.add(report.nodeid)
            report.outcome, report.wasxfail = "skipped", entry.reason
        elif report.failed:
            report.longrepr = f"{report.longreprtext}\n\nAnother error was expected: {entry.error!r}"
        elif not is_part and report.nodeid not in self.failed:
            report.longrepr = f"{report.outcome}, but was expected to fail: {entry.reason}. {report.longrepr or ''}"
            report.outcome = "failed"


def pytest_configure(config: pytest.Config) -> None:
    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: a mark of the tests of transformers")
    counts_for_others = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not counts_for_others:
        config.pluginmanager.register(Judge(read_expected()), "judge")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    judge = config.pluginmanager.get_plugin("judge")
    unused = judge.learn(items) if judge else []
    if unused and [Path(each).resolve() for each in config.args] == [HERE]:
        raise pytest.UsageError("expected_failures.toml names no test here: " + "; ".join(map(str, unused)))
