"""Suite `bands`: banded attention equals attention with a band mask, and the table has one row per length."""

import pytest
import torch
from benchmarks import bands


def test_outputs_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "WINDOW", 40)
    monkeypatch.setattr(bands, "TARGETS", {150: (None, 1.0), 200: (3.0, None)})
    cpu = torch.device("cpu")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        outputs = {name: step() for name, step in bands.steps(200, cpu, dtype).items()}
        torch.testing.assert_close(outputs["band"], outputs["mask"], atol=tolerance, rtol=tolerance)
        assert not torch.allclose(outputs["band"], outputs["causal"], atol=1e-2)
    rows = bands.table(list(bands.run(cpu, torch.float32, repeats=2, attention="sdpa"))).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["150", "200"]
    (result,) = bands.run(cpu, torch.float32, repeats=1, attention="sdpa", only="T=150")
    assert result.length == 150
