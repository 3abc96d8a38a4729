"""`prepare_for_inference`: equal outputs, and the ordinary forward pass after any change."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers import prepacked_block
from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.prepacked_block import PrepackedBlock
from hf_ctxmodels.layers.transformer import TransformerBlock
from hf_ctxmodels.registry import FAMILIES

pytestmark = pytest.mark.skipif(not cpu_linear.HAS_ONEDNN, reason="this torch has no oneDNN")
LENGTHS = {"one sentence": (7,), "equal lengths": (6, 6, 6), "padded": (9, 4, 1, 6)}


@pytest.fixture(autouse=True)
def is_prepacked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was computed by the prepacked block; tiny weights are prepacked as well."""
    monkeypatch.setattr(cpu_linear, "_MIN_MULTIPLICATIONS", 0)
    forward, is_prepacked = PrepackedBlock.forward, []

    def record(*args: Any) -> Tensor | None:
        output = forward(*args)
        is_prepacked.append(output is not None)
        return output

    monkeypatch.setattr(PrepackedBlock, "forward", record)
    return is_prepacked


def build_model(family: str = "bert", **options: Any) -> CtxPreTrainedModel:
    torch.manual_seed(0)
    spec = FAMILIES[family]
    model = spec.models["AutoModel"](spec.config(**spec.sizes["tiny"] | options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def batch(lengths: tuple[int, ...] = LENGTHS["padded"]) -> dict[str, Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(5, 20, mask.shape), "attention_mask": mask}


@torch.no_grad()
def assert_equal_states(model: nn.Module, expected_model: nn.Module, inputs: dict[str, Tensor]) -> None:
    outputs, expected = (m(**inputs).last_hidden_state for m in (model, expected_model))
    assert (outputs - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=[*LENGTHS])
@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "gpt3", "t5", "xlnet"])
def test_prepared_model_equals_original(
    family: str, lengths: tuple[int, ...], is_prepacked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(family)
    prepared = copy.deepcopy(model).prepare_for_inference()
    inputs = batch(lengths) | ({"decoder_input_ids": torch.tensor([[5, 6]] * len(lengths))} if family == "t5" else {})
    assert_equal_states(prepared, model, inputs)
    if family not in ("t5", "xlnet"):  # t5 has cross-attention, xlnet another layer class
        assert is_prepacked == [True] * model.config.num_hidden_layers
    else:
        copies = [module for module in prepared.modules() if "prepacked_weight" in module.__dict__]
        assert copies, "only the linear layers are prepacked"
    monkeypatch.setattr(prepacked_block, "CHUNK_ROWS", 3)
    assert_equal_states(prepared, model, inputs)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_activations(activation: str, is_prepacked: list[bool]) -> None:
    model = build_model(hidden_act=activation)
    assert_equal_states(copy.deepcopy(model).prepare_for_inference(), model, batch())
    assert all(is_prepacked)


@pytest.mark.parametrize("options", [{"output_hidden_states": True}, {"sequence_ids": True}, {"output_mask": True}])
def test_forward_options(options: dict[str, Any], is_prepacked: list[bool]) -> None:
    model, inputs = build_model(), batch()
    mask = inputs["attention_mask"]
    tensors = {"sequence_ids": mask * (1 + torch.arange(9) // 3), "output_mask": (mask == 1) & (torch.arange(9) < 3)}
    inputs |= {name: tensors.get(name, value) for name, value in options.items()}
    assert_equal_states(copy.deepcopy(model).prepare_for_inference(), model, inputs)
    assert is_prepacked == [True] * (model.config.num_hidden_layers - 1) + ["output_mask" not in options]


def _double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return 2 * output if isinstance(output, Tensor) else None


def _replace_linear(block: TransformerBlock) -> None:
    block.feed_forward.up_proj = copy.deepcopy(block.feed_forward.up_proj)
    nn.init.ones_(block.feed_forward.up_proj.weight)


def _replace_weight(block: TransformerBlock) -> None:
    block.attention.out_proj.weight = nn.Parameter(torch.ones_like(block.attention.out_proj.weight))


def _replace_forward(block: TransformerBlock) -> None:
    block.attention_residual.forward = lambda hidden_states, output, norm, layer_index: norm(output)


CHANGES: dict[str, Callable[[TransformerBlock], Any]] = {
    "weight in place": lambda block: nn.init.ones_(block.attention.qkv_proj.weight),
    "new weight": _replace_weight,
    "loaded weights": lambda block: block.load_state_dict({n: 2 * t for n, t in block.state_dict().items()}),
    "linear layer": _replace_linear,
    "activation": lambda block: setattr(block.feed_forward, "activation", nn.Tanh()),
    "forward of a module": _replace_forward,
    "parametrization": lambda block: parametrize.register_parametrization(block.attention_norm, "weight", nn.Tanh()),
    **{
        f"hook on {name}": lambda block, name=name: block.get_submodule(name).register_forward_hook(_double_output)
        for name in ("attention.out_proj", "attention_norm", "feed_forward", "feed_forward.activation", "dropout")
    },
    "pruning": lambda block: prune.l1_unstructured(block.feed_forward.up_proj, "weight", 0.5),
    "hook on a residual": lambda block: block.feed_forward_residual.register_forward_pre_hook(
        lambda module, args: (0 * args[0], *args[1:])
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=[*CHANGES])
def test_modified_block_is_not_prepacked(change: Callable[[TransformerBlock], Any], is_prepacked: list[bool]) -> None:
    model = build_model()
    prepared, unchanged = copy.deepcopy(model).prepare_for_inference(), copy.deepcopy(model)
    for network in (model, prepared):
        change(network.layers[0])
    inputs = batch()
    assert_equal_states(prepared, model, inputs)
    assert is_prepacked[0] is False
    assert all(is_prepacked[1:])
    with torch.no_grad():
        assert not torch.allclose(model(**inputs)[0], unchanged(**inputs)[0]), "the change had no effect"


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_training_and_second_preparation(is_prepacked: list[bool], options: dict[str, bool]) -> None:
    """Also with a fused optimizer, whose steps do not increment the versions of the weights."""
    model = build_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    prepared, inputs = copy.deepcopy(model).prepare_for_inference(), batch()
    for network in (model, prepared):
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), 0.01, **options)
        network(**inputs)[0].square().mean().backward()
        optimizer.step()
        network.eval()
    assert_equal_states(prepared, model, inputs)
    assert not any(is_prepacked)
    assert_equal_states(prepared.prepare_for_inference(), model, inputs)
    assert is_prepacked[-1]


def test_monte_carlo_dropout(is_prepacked: list[bool]) -> None:
    model = build_model().prepare_for_inference()
    model.layers[0].dropout.train()
    with torch.no_grad():
        first, second = (model(**batch((5,)))[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert not is_prepacked[0]


def test_copies_and_other_precisions_use_ordinary_forward(is_prepacked: list[bool]) -> None:
    model, inputs = build_model(), batch()
    prepared = copy.deepcopy(model).prepare_for_inference()
    assert [*prepared.state_dict()] == [*model.state_dict()]
    for duplicate in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert_equal_states(duplicate, model, inputs)
    assert not is_prepacked, "copies are not prepacked"
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_states(prepared, model, inputs)
    assert_equal_states(prepared.double(), model.double(), inputs)
    assert not any(is_prepacked)


def test_compiled_and_exported_graphs() -> None:
    model, inputs = build_model(), batch()
    prepared = copy.deepcopy(model).prepare_for_inference()
    compiled = torch.compile(prepared, fullgraph=True, backend="eager")
    assert_equal_states(compiled, model, inputs)
    with torch.no_grad():
        program = torch.export.export(prepared, (), kwargs=inputs)
    assert not any("mkldnn" in str(node.target) for node in program.graph.nodes)


@pytest.mark.skipif(not cpu_linear.HAS_BFLOAT16_PRODUCT, reason="this CPU has no products in bfloat16")
def test_bfloat16_block(is_prepacked: list[bool]) -> None:
    model, inputs = build_model().bfloat16(), batch()
    with torch.no_grad():
        expected = model(**inputs)[0]
        outputs = model.prepare_for_inference()(**inputs)[0]
    torch.testing.assert_close(outputs, expected, atol=0.1, rtol=0.05)
    assert all(is_prepacked)
