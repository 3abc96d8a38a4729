"""Suite `seq2seq`: model and reference have equal outputs, generations and gradients at a tiny size."""

from dataclasses import replace

import pytest
import torch
from benchmarks import cases, encoders, report, seq2seq
from benchmarks.settings import Settings

CPU = torch.device("cpu")
TINY = [
    replace(case, layers=2, width=64, length=25, batch=6, config={"vocab_size": 300})
    for case in cases.SEQ2SEQ_CASES
    if case.width == 256  # both sizes are equal at the tiny size
]


def test_all_families_are_measured() -> None:
    assert {case.family for case in TINY} == {"t5", "bart", "mass", "unilm", "ernie_gen"}


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.family}-{case.name}")
def test_model_and_reference_have_equal_outputs(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "matmul_flops", lambda *arguments: 1e10)
    monkeypatch.setattr(encoders, "NEW_TOKENS", 6)
    (result,) = encoders.run(Settings(repeats=1), cases=[case], build=seq2seq.build_comparison)
    assert result.difference < 1e-5
    assert min(result.model.seconds, result.reference.seconds, result.utilization) > 0
    assert min(result.model.peak_bytes, result.reference.peak_bytes) > 0
    header, _, row = report.table([result]).splitlines()
    assert row.count("|") == header.count("|")
    if case.is_generation:
        torch.manual_seed(0)
        comparison = seq2seq.build_comparison(case, "sdpa")
        generated = [
            encoders.generation_step(model, comparison.batches[name], torch.float32, case.workload)()
            for name, model in (("model", comparison.model), ("reference", comparison.reference))
        ]
        torch.testing.assert_close(*generated)
        assert generated[0].shape == (case.batch, 1 + encoders.NEW_TOKENS)


@pytest.mark.parametrize(
    "case", [case for case in TINY if case.has_backward and case.fill < 1], ids=lambda case: case.family
)
def test_model_and_reference_have_equal_gradients(case: cases.Case) -> None:
    """Compare gradients of the word embeddings, which depend on all layers."""
    torch.manual_seed(0)
    comparison = seq2seq.build_comparison(case, "sdpa")
    gradients = []
    for name, model in (("model", comparison.model), ("reference", comparison.reference)):
        model.eval()(**comparison.batches[name]).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    assert float(gradients[0].abs().max()) > 1e-4
