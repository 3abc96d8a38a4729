"""`make test-transformers`: strict expected failures, and the version of the downloaded tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "transformers_suite"


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"transformers_suite_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # required by dataclasses
    spec.loader.exec_module(module)
    return module


def outcome(checker: Any, test: str, *reports: tuple[str, str, bool]) -> tuple[str, bool]:
    """Outcome of the last report, and whether it is an expected failure; reports are (outcome, text, is_subtest)."""
    for result, text, is_subtest in reports:
        report = SimpleNamespace(nodeid=test, when="call", outcome=result, longreprtext=text, longrepr=text)
        vars(report).update(
            passed=result == "passed", failed=result == "failed", **{"context": 1} if is_subtest else {}
        )
        checker.pytest_runtest_logreport(report)
    return report.outcome, hasattr(report, "wasxfail")


def test_expected_failures_are_strict() -> None:
    conftest = load_module("conftest")
    expected_failure = conftest.ExpectedFailure

    def make_checker() -> Any:
        entries = [expected_failure(["test_a*"], ["bert-*"], "shapes", "why"), expected_failure(["x"], ["y"], "", "")]
        checker = conftest.ExpectedFailureChecker(entries)
        items = [
            SimpleNamespace(name=name, nodeid=name, parent=SimpleNamespace(name="bert-x")) for name in ["test_ab", "b"]
        ]
        assert checker.match_items(items) == checker.entries[1:], "entries without a test"
        return checker

    assert outcome(make_checker(), "test_ab", ("failed", "other shapes", False)) == ("skipped", True)
    assert outcome(make_checker(), "test_ab", ("failed", "out of memory", False)) == ("failed", False)
    assert outcome(make_checker(), "test_ab", ("passed", "", False)) == ("failed", False)
    assert outcome(make_checker(), "test_ab", ("skipped", "no GPU", False)) == ("failed", False)
    assert outcome(make_checker(), "test_ab", ("failed", "shapes", True), ("passed", "", False)) == ("passed", False)
    assert outcome(make_checker(), "test_ab", ("passed", "", True), ("passed", "", False)) == ("failed", False)
    assert outcome(make_checker(), "b", ("failed", "shapes", False)) == ("failed", False)
    entries = [expected_failure(["*"], ["*"], "", "one"), expected_failure(["*"], ["*"], "", "two")]
    ambiguous = conftest.ExpectedFailureChecker(entries)
    with pytest.raises(pytest.UsageError, match="several entries"):
        ambiguous.match_items([SimpleNamespace(name="b", nodeid="b", parent=None)])


def test_fetched_version_matches_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is also the installed one; with existing tests, no package index is needed."""
    fetch = load_module("fetch")
    version = fetch.validated_version()
    assert fetch.pinned_version(FOLDER.parents[1] / "constraints.txt") == version
    folder = tmp_path / f"transformers-{version}" / "tests"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch.fetch(tmp_path) == folder
    (folder / "__init__.py").unlink()  # incompletely unpacked
    with pytest.raises(fetch.FetchError, match="package index"):
        fetch.fetch(tmp_path)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\ntransformers==4.0.0\n")
    with pytest.raises(fetch.FetchError, match=r"has 4\.0\.0"):
        fetch.validated_version(constraints=constraints)
