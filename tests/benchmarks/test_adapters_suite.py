"""Table of the suite `adapters`: one row per case, and the number of adapter parameters."""

from dataclasses import replace

import pytest
import torch
from benchmarks import adapters


def test_table_has_one_row_per_case(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(adapters.CASES[0], layers=2, width=64, length=9, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(adapters, "CASES", [tiny, replace(tiny, fill=1.0)])
    results = list(adapters.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa"))
    rows = adapters.table(results).splitlines()
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1
    assert {result.parameters for result in results} == {2 * (2 * 64 * 4 + 4 + 64)}
