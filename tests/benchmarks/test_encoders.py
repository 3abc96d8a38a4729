"""Suites `encoders` and `decoders`: model and reference have equal outputs in all cases at a tiny size."""

from dataclasses import replace

import pytest
import torch
from benchmarks import cases, encoders, report
from benchmarks.settings import Settings

CPU = torch.device("cpu")
# Compiled inference is slow and covered by tests/models. Cases that differ in shape only are equal at the tiny size.
COMPARED_CASES = {
    (case.family, case.workload, case.fill, case.sampling): case
    for case in [*cases.CASES, *cases.LANGUAGE_MODEL_CASES, *cases.GENERATION_CASES]
    if case.workload != "compiled inference"
}


@pytest.fixture
def short_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate few tokens and skip the slow measurement of the matrix product, which the last test runs."""
    monkeypatch.setattr(encoders, "matmul_flops", lambda *arguments: 1e10)
    monkeypatch.setattr(encoders, "NEW_TOKENS", 6)


def tiny_case(case: cases.Case) -> cases.Case:
    return replace(case, layers=2, width=64, length=25, batch=3, config=case.config | {"vocab_size": 300})


@pytest.mark.usefixtures("short_measurement")
@pytest.mark.parametrize("case", COMPARED_CASES.values(), ids=lambda case: f"{case.family}-{case.name}")
def test_model_and_reference_have_equal_outputs(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "CASES", [tiny_case(case)])
    (result,) = encoders.run(Settings(repeats=2))
    assert result.difference < 1e-5
    assert min(result.model.seconds, result.reference.seconds) > 0
    assert min(result.model.peak_bytes, result.reference.peak_bytes) > 0


def test_case_selection_and_missed_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable, trivial = (
        replace(tiny_case(cases.CASES[0]), min_speedup=target, max_memory_ratio=None) for target in (1e9, 0.0)
    )
    monkeypatch.setattr(encoders, "CASES", [tiny_case(case) for case in cases.CASES])
    with monkeypatch.context() as context:
        context.setattr(encoders, "matmul_flops", lambda *arguments: 1e10)
        results = list(encoders.run(Settings(repeats=2, only="bert pretraining")))
    assert [result.case.workload for result in results] == ["pretraining", "pretraining"]
    monkeypatch.setattr(encoders, "CASES", [unreachable, trivial])
    rows = report.table(list(encoders.run(Settings(repeats=2)))).splitlines()
    assert [("missed" in row) for row in rows[2:]] == [True, False]
    assert len({row.count("|") for row in rows}) == 1
    table = report.without_targets("\n".join(rows))
    assert len({row.count("|") for row in table.splitlines()}) == 1
    assert "speedup" in table
    assert "target" not in table
    assert "missed" not in table
