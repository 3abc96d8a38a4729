"""The table of compression: every side has a row, its file's size and its cosine; a missed expectation is marked."""

import pytest
import torch
from benchmarks import compression
from benchmarks.cases import Case


def test_every_side_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "EXPECTED", {128: (1e9, None)})
    case = Case("bert", "inference", 1, 128, 16, 2, 1.0, None, None, config={"vocab_size": 2000})
    (result,) = compression.run(torch.device("cpu"), torch.float32, 2, "sdpa", cases=[case])
    sizes = result.sizes
    assert sizes["ours, float32"] > 1.9 * sizes["ours, bfloat16"] > 1.9 * 1.8 * sizes["ours, int8 by token"]
    assert result.cosines["transformers, float32"] == pytest.approx(1, abs=1e-5)
    assert 0.99 < result.cosines["ours, int8 by token"] < 0.999999
    rows = compression.table([result]).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert [row.split("|")[2].strip() for row in rows[2:]] == [*result.measured]
    assert [("missed" in row) for row in rows[2:]] == [("int8" in name) for name in result.measured]
    assert not [*compression.run(torch.device("cpu"), torch.float32, 2, "sdpa", only="no such", cases=[case])]
