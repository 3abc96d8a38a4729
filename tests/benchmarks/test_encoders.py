"""The benchmark compares like with like: every case, made tiny, gives equal outputs on both sides, and a row."""

from dataclasses import replace

import pytest
import torch
from benchmarks import cases, encoders, report

CPU = torch.device("cpu")
# Compiling takes longer than the rest together; tests/models compiles every encoder. Made tiny, cases that differ in
# their shape alone are one.
COMPARED = {
    (case.family, case.work, case.fill, case.wiring): case
    for case in [*cases.CASES, *cases.LANGUAGE_MODEL_CASES, *cases.GENERATION_CASES]
    if case.work != "compiled inference"
}


@pytest.fixture
def known_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of a large matrix product, which takes a second: `test_a_missed_figure_is_marked` measures it."""
    monkeypatch.setattr(encoders, "matmul_flops", lambda *arguments: 1e10)


def tiny(case: cases.Case) -> cases.Case:
    return replace(case, layers=2, width=64, length=25, batch=3, config=case.config | {"vocab_size": 300})


@pytest.mark.usefixtures("known_ceiling")
@pytest.mark.parametrize("case", COMPARED.values(), ids=lambda case: f"{case.family}-{case.name}")
def test_both_sides_compute_the_same(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "CASES", [tiny(case)])
    (result,) = encoders.run(CPU, torch.float32, repeats=2, attention="sdpa")
    assert result.difference < 1e-5
    assert min(result.ours.seconds, result.peer.seconds) > 0
    assert min(result.ours.peak_bytes, result.peer.peak_bytes) > 0


@pytest.mark.usefixtures("known_ceiling")
def test_cases_are_chosen_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "CASES", [tiny(case) for case in cases.CASES])
    chosen = list(encoders.run(CPU, torch.float32, repeats=2, attention="sdpa", only="bert pretraining"))
    assert [result.case.work for result in chosen] == ["pretraining", "pretraining"]


def test_a_missed_figure_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible, trivial = (replace(tiny(cases.CASES[0]), speed=speed, memory=None) for speed in (1e9, 0.0))
    monkeypatch.setattr(encoders, "CASES", [impossible, trivial])
    rows = report.table(list(encoders.run(CPU, torch.float32, repeats=2, attention="sdpa"))).splitlines()
    assert [("missed" in row) for row in rows[2:]] == [True, False]
    assert len({row.count("|") for row in rows}) == 1
