"""The list of faults fits the code; `make test-faults` plants them."""

from pathlib import Path

import pytest
from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.planted(text) != text
    assert all((ROOT / test).exists() for test in fault.tests)
