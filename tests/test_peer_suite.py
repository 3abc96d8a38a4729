"""`make test-peer`: its strictness about expected failures, and the version it fetches."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "peer"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def outcome(judge: Any, test: str, *reports: tuple[str, str, bool]) -> tuple[str, bool]:
    """Of the last report, and whether it counts as an expected failure; (outcome, text, is a part) each."""
    for result, text, is_part in reports:
        report = SimpleNamespace(nodeid=test, when="call", outcome=result, longreprtext=text, longrepr=text)
        vars(report).update(passed=result == "passed", failed=result == "failed", **{"context": 1} if is_part else {})
        judge.pytest_runtest_logreport(report)
    return report.outcome, hasattr(report, "wasxfail")


def test_expected_failures_are_strict() -> None:
    peer = load("conftest")

    def judge() -> Any:
        made = peer.Judge(
            [peer.Expected(["test_a*"], ["bert-*"], "shapes", "why"), peer.Expected(["x"], ["y"], "", "")]
        )
        items = [
            SimpleNamespace(name=name, nodeid=name, parent=SimpleNamespace(name="bert-x")) for name in ["test_ab", "b"]
        ]
        assert made.learn(items) == made.entries[1:], "entries without a test"
        return made

    assert outcome(judge(), "test_ab", ("failed", "other shapes", False)) == ("skipped", True)
    assert outcome(judge(), "test_ab", ("failed", "out of memory", False)) == ("failed", False)
    assert outcome(judge(), "test_ab", ("passed", "", False)) == ("failed", False)
    assert outcome(judge(), "test_ab", ("skipped", "no GPU", False)) == ("failed", False)
    assert outcome(judge(), "test_ab", ("failed", "shapes", True), ("passed", "", False)) == ("passed", False)
    assert outcome(judge(), "test_ab", ("passed", "", True), ("passed", "", False)) == ("failed", False)
    assert outcome(judge(), "b", ("failed", "shapes", False)) == ("failed", False)
    twice = peer.Judge([peer.Expected(["*"], ["*"], "", "one"), peer.Expected(["*"], ["*"], "", "two")])
    with pytest.raises(pytest.UsageError, match="two entries"):
        twice.learn([SimpleNamespace(name="b", nodeid="b", parent=None)])


def test_fetched_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of constraints.txt and of the environment; what is fetched already needs no index."""
    fetch = load("fetch")
    version = fetch.checked_version()
    assert fetch.pinned_version(FOLDER.parents[1] / "constraints.txt") == version
    folder = tmp_path / f"transformers-{version}" / "tests"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch.fetch(tmp_path) == folder
    (folder / "__init__.py").unlink()  # unpacked in part
    with pytest.raises(fetch.FetchError, match="needs a package index"):
        fetch.fetch(tmp_path)
    other = tmp_path / "constraints.txt"
    other.write_text("torch==2.13.0\ntransformers==4.0.0\n")
    with pytest.raises(fetch.FetchError, match=r"has 4\.0\.0"):
        fetch.checked_version(constraints=other)
