"""The page of tools has the rows that the script checks, none of them failed or left out."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import check_ecosystem
import pytest
from ecosystem_checks import CHECKS, Check, Workplace

ROOT = Path(__file__).resolve().parents[2]


def test_page_has_the_rows_of_the_script() -> None:
    page = (ROOT / "docs" / "ecosystem.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    rows = rows[1:]
    for cells, one in zip(rows, CHECKS, strict=True):
        tool, versions, checked, outcome, note = cells
        assert (tool, checked) == (one.tool, " ".join(one.run.__doc__.split()))
        assert re.sub(r" [\d.]+(\+\w+)?", "", versions).split(", ") == [*one.packages]
        assert outcome == ("works with a note" if note else "works"), tool


def test_versions_of_the_page_are_those_of_the_constraints() -> None:
    pinned = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    versions = {name.replace("_", "-").lower(): version for name, version in pinned}
    page = (ROOT / "docs" / "ecosystem.md").read_text("utf-8")
    for one in CHECKS:
        for name in one.packages:
            assert f"{name} {versions[name.replace('_', '-').lower()]}" in page, name


def test_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of checks that pass, tell something, fail, and lack a package."""
    place = Workplace(tmp_path)

    def fail(_: Workplace) -> str:
        raise ValueError("first line\nlast line")

    assert check_ecosystem.run(Check("a", ("torch",), lambda _: ""), place) == ("works", "")
    assert check_ecosystem.run(Check("a", ("torch",), lambda _: "note"), place) == ("works with a note", "note")
    assert check_ecosystem.run(Check("a", ("torch",), fail), place) == ("fails", "ValueError: last line")

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(check_ecosystem, "version", absent)
    assert check_ecosystem.run(Check("a", ("torch",), fail), place) == ("not run", "torch is not installed")
