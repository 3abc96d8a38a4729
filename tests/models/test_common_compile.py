"""`torch.compile` with its defaults: two graphs for all lengths, the packed path, and equal outputs and gradients.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from zoo import (
    HEADS,
    NETWORKS,
    Case,
    assert_same_gradients,
    assert_same_outputs,
    gradients,
    labeled_batch,
    make_batch,
    scalar_loss,
)

from hf_ctxmodels.layers.attention import compiled_attention

# Tracing takes up to twenty seconds: of the encoders, only these are not marked slow.
COMPILED = ("bert", "ulmfit", "glove")
each_compiled = pytest.mark.parametrize(
    "network_case",
    [pytest.param(case, marks=() if case.family.name in COMPILED else pytest.mark.slow) for case in NETWORKS],
    ids=str,
)
# The heads that Trainer compiles without a break: the models of the suite `compile` of scripts/benchmark.py.
UNBROKEN = [
    "bert-AutoModelForPreTraining",
    "albert-AutoModelForPreTraining",
    "electra-AutoModelForPreTraining",
    "xlnet-AutoModelForCausalLM",
    "t5-AutoModelForSeq2SeqLM",
    "gpt2-AutoModelForCausalLM",
    "unilm-AutoModelForMaskedLM",
]


class TestCompile:
    """Mostly with the backend aot_eager, which has the same graph and guards as inductor, but no code generation."""

    SHAPES = ((12, 7, 3, 9), (15, 4, 6), (8, 20, 5, 6, 7), (9, 9))

    def _run_over_shapes(self, case: Case, backend: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        graphs = set()
        with torch.no_grad():
            for lengths in self.SHAPES:
                batch = make_batch(case, lengths)
                assert_same_outputs(compiled(**batch), model(**batch), batch["attention_mask"])
                graphs.add(counter.frame_count)
        assert len(graphs) == 1, "recompiled for another shape"

    @each_compiled
    def test_encoder_is_one_graph_for_all_shapes(self, network_case: Case) -> None:
        self._run_over_shapes(network_case, "aot_eager")

    @pytest.mark.slow
    def test_head_is_one_graph_for_all_shapes(self, head_case: Case) -> None:
        """Takes some seconds of tracing per head."""
        self._run_over_shapes(head_case, "aot_eager")

    @pytest.mark.slow
    def test_code_generation(self, network_case: Case) -> None:
        """Takes a minute to compile C++."""
        self._run_over_shapes(network_case, "inductor")

    @pytest.mark.slow
    @pytest.mark.parametrize("case", [case for case in HEADS if str(case) in UNBROKEN], ids=str)
    def test_training_with_default_options(self, case: Case) -> None:
        """As Trainer compiles: without `fullgraph`, sizes become dynamic when they change."""
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounterWithBackend("aot_eager")
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, backend=counter)
        for lengths in ((12, 7, 3, 9), (15, 4, 6, 2), (8, 20, 5, 6), (9, 9, 11, 9)):
            batch = labeled_batch(case, lengths)
            expected = gradients(model, scalar_loss(case, model, batch))
            assert_same_gradients(gradients(model, scalar_loss(case, compiled, batch)), expected)
        assert not counters["graph_break"]
        assert counter.frame_count <= 2

    def test_padding_is_not_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        case = next(case for case in NETWORKS if case.family.name == "bert")
        attend, numbers = compiled_attention.attend, []

        def record(query: Tensor, *inputs: Any, **options: Any) -> Any:
            numbers.append(len(query))
            return attend(query, *inputs, **options)

        monkeypatch.setattr(compiled_attention, "attend", record)
        compiled = torch.compile(case.model(num_hidden_layers=1), backend="eager", dynamic=True)
        with torch.no_grad():
            compiled(**make_batch(case, (12, 7, 3)))
        assert numbers == [12 + 7 + 3]

    def _train_one_step(self, case: Case) -> None:
        torch._dynamo.reset()
        batch = labeled_batch(case)
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, dynamic=True, backend="aot_eager")
        expected = gradients(model, scalar_loss(case, model, batch))
        assert_same_gradients(gradients(model, scalar_loss(case, compiled, batch)), expected)

    @each_compiled
    def test_training_step_of_the_encoder(self, network_case: Case) -> None:
        self._train_one_step(network_case)

    @pytest.mark.slow
    def test_training_step(self, head_case: Case) -> None:
        """Takes minutes to trace the backward pass of all heads."""
        self._train_one_step(head_case)
