"""The table of docs/ecosystem.md has one row per check, all of which passed."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import check_ecosystem
import pytest
from ecosystem_checks import CHECKS, Check, CheckContext

ROOT = Path(__file__).resolve().parents[2]


def test_table_has_all_checks() -> None:
    page = (ROOT / "docs" / "ecosystem.md").read_text("utf-8")
    _, *rows = (line for line in page.splitlines() if line.startswith("| "))
    for row, check in zip(rows, CHECKS, strict=True):
        tool, versions, description, outcome, note = (cell.strip() for cell in row.strip("|").split("|"))
        assert (tool, description) == (check.tool, " ".join(check.run.__doc__.split()))
        assert re.sub(r" [\d.]+(\+\w+)?", "", versions).split(", ") == [*check.packages]
        assert outcome == ("works with a note" if note else "works"), tool


def test_versions_match_the_constraints() -> None:
    pinned = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    versions = {name.replace("_", "-").lower(): version for name, version in pinned}
    page = (ROOT / "docs" / "ecosystem.md").read_text("utf-8")
    for check in CHECKS:
        for name in check.packages:
            assert f"{name} {versions[name.replace('_', '-').lower()]}" in page, name


def test_check_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that pass, return a note, fail, or lack a package."""
    context = CheckContext(tmp_path)

    def fail(_: CheckContext) -> str:
        raise ValueError("first line\nlast line")

    assert check_ecosystem.run(Check("a", ("torch",), lambda _: ""), context) == ("works", "")
    assert check_ecosystem.run(Check("a", ("torch",), lambda _: "note"), context) == ("works with a note", "note")
    assert check_ecosystem.run(Check("a", ("torch",), fail), context) == ("fails", "ValueError: last line")

    def raise_not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(check_ecosystem, "version", raise_not_found)
    assert check_ecosystem.run(Check("a", ("torch",), fail), context) == ("not run", "torch is not installed")
