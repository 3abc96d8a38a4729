"""Suite `sharing`: parameter counts as in the paper, and one row per scope and embedding size."""

from dataclasses import replace

import pytest
import torch
from benchmarks import encoders, sharing

# Lan et al. 2019, table 3, in millions: all parameters shared, none shared.
PUBLISHED = {64: (10, 87), 128: (12, 89), 256: (16, 93), 768: (31, 108)}


def test_table_has_one_row_per_scope_and_embedding_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sharing.CASE, layers=3, width=64, length=25, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(sharing, "CASE", tiny)
    results = list(sharing.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa"))
    rows = sharing.table(results).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 2 + 4 * len(sharing.EMBEDDING_SIZES)
    for start in range(0, len(results), 4):
        parameters = {result.case.config["parameter_sharing"]: result.parameters for result in results[start:][:4]}
        assert parameters["all"] < parameters["ffn"] < parameters["attention"] < parameters["none"]
        assert all(result.encoder_parameters < result.parameters for result in results)


@pytest.mark.parametrize("width", sharing.EMBEDDING_SIZES)
def test_parameter_counts_match_the_paper(width: int) -> None:
    """Exclude the pooler, and the projection if E = H, where the paper has none."""
    for scope, expected in zip(("all", "none"), PUBLISHED[width], strict=True):
        config = {"embedding_size": width, "parameter_sharing": scope}
        with torch.device("meta"):
            model = encoders.build_model(replace(sharing.CASE, workload="inference", config=config))
        excluded = ["pooler", "projection"] if width == sharing.CASE.width else ["pooler"]
        parameters = [p for name, p in model.named_parameters() if not any(word in name for word in excluded)]
        assert abs(sum(parameter.numel() for parameter in parameters) / 1e6 - expected) < 1


def test_embedding_sizes_are_selected_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sharing.CASE, layers=2, width=64, length=9, batch=2, config={"vocab_size": 300})
    monkeypatch.setattr(sharing, "CASE", tiny)
    results = list(sharing.run(torch.device("cpu"), torch.float32, repeats=2, attention="sdpa", only="E=128"))
    assert {result.case.config["embedding_size"] for result in results} == {128}
