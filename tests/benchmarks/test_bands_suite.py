"""The table of bands: the band gives what the mask gives, dense attention does not, and every length has a row."""

import pytest
import torch
from benchmarks import bands


def test_every_length_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "WINDOW", 40)
    monkeypatch.setattr(bands, "EXPECTED", {150: (None, 1.0), 200: (3.0, None)})
    cpu = torch.device("cpu")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        outputs = {name: step() for name, step in bands.steps(200, cpu, dtype).items()}
        torch.testing.assert_close(outputs["band"], outputs["mask"], atol=tolerance, rtol=tolerance)
        assert not torch.allclose(outputs["band"], outputs["causal"], atol=1e-2)
    rows = bands.table(list(bands.run(cpu, torch.float32, repeats=2, attention="sdpa"))).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["150", "200"]
    (chosen,) = bands.run(cpu, torch.float32, repeats=1, attention="sdpa", only="T=150")
    assert chosen.length == 150
