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

# Tracing an encoder takes up to 20 seconds; encoders of all other families are marked slow.
FAST_FAMILIES = ("bert", "glove")
compiled_network_cases = pytest.mark.parametrize(
    "network_case",
    [pytest.param(case, marks=() if case.family.name in FAST_FAMILIES else pytest.mark.slow) for case in NETWORKS],
    ids=str,
)
# Heads that Trainer compiles without graph breaks: the models of the `compile` suite of scripts/benchmark.py, and
# others whose losses select targets in several ways.
HEADS_WITHOUT_GRAPH_BREAKS = [
    "bert-AutoModelForPreTraining",
    "albert-AutoModelForPreTraining",
    "electra-AutoModelForPreTraining",
    "xlnet-AutoModelForCausalLM",
    "t5-AutoModelForSeq2SeqLM",
    "gpt2-AutoModelForCausalLM",
    "unilm-AutoModelForMaskedLM",
    "spanbert-AutoModelForPreTraining",
    "unilm-AutoModelForSeq2SeqLM",
    "transformer_xl-AutoModelForCausalLM",
    "elmo-AutoModelForPreTraining",
]


class TestCompile:
    """Mostly with the aot_eager backend: same graph and guards as inductor, but no code generation."""

    SHAPES = ((12, 7, 3, 9), (15, 4, 6), (8, 20, 5, 6, 7), (9, 9))

    def _assert_one_graph_for_all_shapes(self, case: Case, backend: str) -> None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        graph_counts = set()
        with torch.no_grad():
            for lengths in self.SHAPES:
                batch = make_batch(case, lengths)
                assert_same_outputs(compiled(**batch), model(**batch), batch["attention_mask"])
                graph_counts.add(counter.frame_count)
        assert len(graph_counts) == 1, "recompiled for a new shape"

    @compiled_network_cases
    def test_encoder_compiles_to_one_graph_for_all_shapes(self, network_case: Case) -> None:
        self._assert_one_graph_for_all_shapes(network_case, "aot_eager")

    @pytest.mark.slow
    def test_head_compiles_to_one_graph_for_all_shapes(self, head_case: Case) -> None:
        """Takes some seconds of tracing per head."""
        self._assert_one_graph_for_all_shapes(head_case, "aot_eager")

    @pytest.mark.slow
    def test_inductor_matches_eager(self, network_case: Case) -> None:
        """Takes a minute to compile C++."""
        self._assert_one_graph_for_all_shapes(network_case, "inductor")

    @pytest.mark.slow
    @pytest.mark.parametrize("case", [case for case in HEADS if str(case) in HEADS_WITHOUT_GRAPH_BREAKS], ids=str)
    def test_compiled_training_with_default_options(self, case: Case) -> None:
        """The defaults of Trainer: without `fullgraph`, sizes become dynamic when they change."""
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

    def test_compiled_attention_skips_padding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        case = next(case for case in NETWORKS if case.family.name == "bert")
        attend, num_queries = compiled_attention.attend, []

        def record(query: Tensor, *inputs: Any, **options: Any) -> Any:
            num_queries.append(len(query))
            return attend(query, *inputs, **options)

        monkeypatch.setattr(compiled_attention, "attend", record)
        compiled = torch.compile(case.model(num_hidden_layers=1), backend="eager", dynamic=True)
        with torch.no_grad():
            compiled(**make_batch(case, (12, 7, 3)))
        assert num_queries == [12 + 7 + 3]

    def _train_one_step(self, case: Case) -> None:
        torch._dynamo.reset()
        batch = labeled_batch(case)
        model = case.model(num_hidden_layers=1)
        compiled = torch.compile(model, dynamic=True, backend="aot_eager")
        expected = gradients(model, scalar_loss(case, model, batch))
        assert_same_gradients(gradients(model, scalar_loss(case, compiled, batch)), expected)

    @pytest.mark.slow
    def test_compiled_encoder_training_step(self, network_case: Case) -> None:
        self._train_one_step(network_case)

    @pytest.mark.slow
    def test_compiled_head_training_step(self, head_case: Case) -> None:
        """Takes minutes to trace the backward pass of all heads."""
        self._train_one_step(head_case)
