"""The table of ways to share parameters: their numbers are those of the paper, and every way has a row."""

from dataclasses import replace

import pytest
import torch
from benchmarks import encoders, sharing

# Lan et al. 2019, table 3, in millions: all shared, nothing shared.
PUBLISHED = {64: (10, 87), 128: (12, 89), 256: (16, 93), 768: (31, 108)}


def test_every_scope_at_every_width_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sharing.CASE, layers=3, width=64, length=25, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(sharing, "CASE", tiny)
    results = list(sharing.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa"))
    rows = sharing.table(results).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + 4 * len(sharing.WIDTHS)
    for start in range(0, len(results), 4):
        parameters = {result.case.config["parameter_sharing"]: result.parameters for result in results[start:][:4]}
        assert parameters["all"] < parameters["ffn"] < parameters["attention"] < parameters["none"]
        assert all(result.encoder_parameters < result.parameters for result in results)


@pytest.mark.parametrize("width", sharing.WIDTHS)
def test_parameters_are_those_of_the_paper(width: int) -> None:
    """Without the pooler, and without the projection where the paper has none (E = H)."""
    for scope, expected in zip(("all", "none"), PUBLISHED[width], strict=True):
        config = {"embedding_size": width, "parameter_sharing": scope}
        with torch.device("meta"):
            model = encoders.build_model(replace(sharing.CASE, work="inference", config=config))
        left_out = ["pooler", "projection"] if width == sharing.CASE.width else ["pooler"]
        counted = [p for name, p in model.named_parameters() if not any(part in name for part in left_out)]
        assert abs(sum(parameter.numel() for parameter in counted) / 1e6 - expected) < 1


def test_a_width_is_chosen_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sharing.CASE, layers=2, width=64, length=9, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(sharing, "CASE", tiny)
    results = list(sharing.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa", only="E=128"))
    assert {result.case.config["embedding_size"] for result in results} == {128}
