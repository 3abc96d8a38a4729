"""Table of the suite `compression`: one row per implementation, file sizes and cosines; missed targets are marked."""

import pytest
import torch
from benchmarks import compression
from benchmarks.cases import Case


def test_table_has_one_row_per_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "TARGETS", {128: (1e9, None)})
    case = Case("bert", "inference", 1, 128, 16, 2, 1.0, None, None, config={"vocab_size": 2000})
    (result,) = compression.run(torch.device("cpu"), torch.float32, 2, "sdpa", cases=[case])
    sizes = result.sizes
    assert (
        sizes["hf_ctxmodels, float32"]
        > 1.9 * sizes["hf_ctxmodels, bfloat16"]
        > 1.9 * 1.8 * sizes["hf_ctxmodels, int8 by token"]
    )
    assert result.cosines["transformers, float32"] == pytest.approx(1, abs=1e-5)
    assert 0.99 < result.cosines["hf_ctxmodels, int8 by token"] < 0.999999
    rows = compression.table([result]).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert [row.split("|")[2].strip() for row in rows[2:]] == [*result.measurements]
    assert [("missed" in row) for row in rows[2:]] == [("int8" in name) for name in result.measurements]
    assert not [*compression.run(torch.device("cpu"), torch.float32, 2, "sdpa", only="no such", cases=[case])]
