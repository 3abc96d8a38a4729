"""Holds the results against expected_failures.toml: those tests fail with those errors, and no other test fails."""

import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Marks of transformers' tests.
MARKERS = (
    "accelerate_tests",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "is_training_test",
    "order",
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
        return any(fnmatchcase(item.name, each) for each in self.tests) and any(
            fnmatchcase(case, each) for each in self.cases
        )


EXPECTED = [
    Expected(**entry)
    for entry in tomllib.loads((Path(__file__).parent / "expected_failures.toml").read_text("utf-8"))["expected"]
]


class Judge:
    """Turns an expected failure into an xfail, and everything else that happens to such a test into a failure."""

    def __init__(self) -> None:
        self.expected: dict[str, Expected] = {}
        self.failed: set[str] = set()

    def learn(self, items: list[pytest.Item]) -> list[Expected]:
        """Note which failures are expected of which tests; gives the entries without a test."""
        for item in items:
            entries = [entry for entry in EXPECTED if entry.covers(item)]
            if len(entries) > 1:
                raise pytest.UsageError(f"{item.nodeid} is in two entries: {[entry.reason for entry in entries]}")
            if entries:
                self.expected[item.nodeid] = entries[0]
        used = list(self.expected.values())
        return [entry for entry in EXPECTED if entry not in used]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Before the report is counted, or sent to the process that counts."""
        entry = self.expected.get(report.nodeid)
        if entry is None or (report.when != "call" and report.passed):
            return
        if report.failed and re.search(entry.error, report.longreprtext):
            self.failed.add(report.nodeid)
            report.outcome, report.wasxfail = "skipped", entry.reason
        elif report.failed:
            report.sections.append(("expected another error", entry.error))
        elif not hasattr(report, "context") and report.nodeid not in self.failed:  # not a part of a test
            report.longrepr = f"expected to fail ({entry.reason}), but {report.outcome}: {report.longrepr or ''}"
            report.outcome = "failed"


def pytest_configure(config: pytest.Config) -> None:
    for name in MARKERS:
        config.addinivalue_line("markers", name)
    if not hasattr(config.option, "dist") or hasattr(config, "workerinput") or config.option.dist == "no":
        config.pluginmanager.register(Judge(), "judge")  # where the tests run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    judge = config.pluginmanager.get_plugin("judge")
    unused = judge.learn(items) if judge else []
    if unused and Path(config.args[0]).resolve() == Path(__file__).parent:
        raise pytest.UsageError("expected_failures.toml names no test here: " + "; ".join(map(str, unused)))
