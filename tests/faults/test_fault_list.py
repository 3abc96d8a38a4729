"""The list of faults fits the code; `make test-faults` plants them."""

from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).parents[2]


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert fault.planted(text) != text, fault.what
        assert all((ROOT / test).exists() for test in fault.tests), fault.what
