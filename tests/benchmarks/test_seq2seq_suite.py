"""The suite `seq2seq` compares like with like: every case, made tiny, gives equal outputs on both sides, and a row."""

from dataclasses import replace

import pytest
import torch
from benchmarks import cases, encoders, report, seq2seq

CPU = torch.device("cpu")
TINY = [
    replace(case, layers=2, width=64, length=25, batch=6, config={"vocab_size": 300})
    for case in cases.SEQ2SEQ_CASES
    if case.width == 256  # made tiny, the sizes are one
]


def test_both_sides_compute_the_same(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "matmul_flops", lambda *arguments: 1e10)
    monkeypatch.setattr(encoders, "NEW_TOKENS", 6)
    assert {case.family for case in TINY} == {"t5", "bart", "mass", "unilm", "ernie_gen"}
    for case in TINY:
        with subtests.test(f"{case.family} {case.name}"):
            (result,) = encoders.run(CPU, torch.float32, 1, "sdpa", cases=[case], build=seq2seq.build_sides)
            assert result.difference < 1e-5
            assert min(result.ours.seconds, result.peer.seconds, result.utilisation) > 0
            assert min(result.ours.peak_bytes, result.peer.peak_bytes) > 0
            header, _, row = report.table([result]).splitlines()
            assert row.count("|") == header.count("|")
            if case.generates:
                torch.manual_seed(0)
                sides = seq2seq.build_sides(case, "sdpa")
                written = [
                    encoders.generation_step(model, sides.batches[side], torch.float32, case.work)()
                    for side, model in (("ours", sides.ours), ("peer", sides.peer))
                ]
                torch.testing.assert_close(*written)
                assert written[0].shape == (case.batch, 1 + encoders.NEW_TOKENS)


def test_gradients_of_both_sides_are_the_same(subtests: pytest.Subtests) -> None:
    """Of the word embeddings, on which every part of a model depends."""
    for case in TINY:
        if case.trains and case.fill < 1:
            with subtests.test(case.family):
                torch.manual_seed(0)
                sides = seq2seq.build_sides(case, "sdpa")
                found = []
                for side, model in (("ours", sides.ours), ("peer", sides.peer)):
                    model.eval()(**sides.batches[side]).loss.backward()
                    found.append(model.get_input_embeddings().weight.grad)
                torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)
                assert float(found[0].abs().max()) > 1e-4
