"""Gated and pruned attention heads."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close
from zoo import BASES, HEADS, Case, as_subtests, make_batch, select_non_padding

from hf_ctxmodels import CtxError, inspection_mode
from hf_ctxmodels.core.attention_heads import attention_layers, parse_heads, prune_heads
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.layers.attention.head_gates import disabled_heads
from hf_ctxmodels.registry import FAMILIES

CASES = [case for case in BASES if issubclass(case.family.config, CtxTransformerConfig)]
DISABLED_HEADS = (1, 3)


def all_layers(model: nn.Module) -> dict[int | str, list[int]]:
    """The heads to disable in each layer; a decoder may have fewer heads than the encoder."""
    layers = attention_layers(model)
    return {name: [head for head in DISABLED_HEADS if head in layer.heads] for name, layer in layers.items()}


def run(model: nn.Module, batch: dict[str, Tensor], **kwargs: Any) -> Any:
    """Outputs of a model at tokens, without padding."""
    with torch.no_grad():
        outputs = model(**batch, **kwargs)
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            outputs[name] = select_non_padding(value, batch.get("attention_mask"))
    return outputs


def tensors(outputs: Any) -> list[Tensor]:
    return [value for value in outputs.values() if isinstance(value, Tensor)]


def assert_equal_outputs(actual: Any, expected: Any, message: str, atol: float = 1e-6) -> None:
    for actual_tensor, expected_tensor in zip(tensors(actual), tensors(expected), strict=True):
        assert_close(actual_tensor, expected_tensor, atol=atol, rtol=1e-5, msg=lambda text: f"{message}: {text}")


@torch.no_grad()
def with_zeroed_heads(model: nn.Module) -> nn.Module:
    """A copy whose output projections have zero weights for the disabled heads."""
    model = copy.deepcopy(model)
    for layer, heads in zip(attention_layers(model).values(), all_layers(model).values(), strict=True):
        weight = layer.out_proj.weight
        weight.view(weight.shape[0], len(layer.heads), -1)[:, heads] = 0
    return model


@as_subtests(CASES)
def test_zero_mode_equals_zeroed_projections(case: Case) -> None:
    """In packed, padded, prepacked and two-stream layers."""
    model, batch = case.model(), make_batch(case)
    baseline = run(model, batch)
    expected = run(with_zeroed_heads(model), batch)
    heads = all_layers(model)
    with disabled_heads(model, heads):
        assert_equal_outputs(run(model, batch), expected, f"{case} packed")
        with inspection_mode(model):
            assert_equal_outputs(run(model, batch), expected, f"{case} eager", 1e-5)
        model.config.unpad = False
        assert_equal_outputs(run(model, batch), expected, f"{case} padded", 1e-5)
        model.config.unpad = True
        if case.family.name == "xlnet":
            targets = batch["attention_mask"].argmax(1, keepdim=True)
            order = torch.randperm(batch["input_ids"].shape[1]).expand(len(targets), -1)
            streams = batch | {"target_positions": targets, "permutation_order": order}
            assert_equal_outputs(run(model, streams), run(with_zeroed_heads(model), streams), f"{case} two streams")
    assert_equal_outputs(run(model, batch), baseline, f"{case} after the context", 0)
    model.prepare_for_inference()
    with disabled_heads(model, heads):
        assert_equal_outputs(run(model, batch), expected, f"{case} prepacked", 1e-5)
    assert not any(torch.allclose(*pair) for pair in zip(tensors(baseline), tensors(expected), strict=True)), case


@as_subtests(CASES)
def test_uniform_mode_attention_weights(case: Case) -> None:
    """Rows of a disabled head are 1 / L over the L visible keys; other heads of the first layer do not change."""
    model, batch = case.model(), make_batch(case)
    layers = attention_layers(model)
    names = [name for name in ("0", "decoder.0") if name in layers]  # the first layers, whose inputs do not change
    heads = {name: all_layers(model)[name] for name in names}
    fields = {"0": "encoder_attentions" if case.is_encoder_decoder else "attentions", "decoder.0": "decoder_attentions"}
    with inspection_mode(model):
        baseline = run(model, batch, output_attentions=True)
        with disabled_heads(model, heads, mode="uniform"):
            gated = run(model, batch, output_attentions=True)
            for name in names:
                expected, actual = baseline[fields[name]][0].clone(), gated[fields[name]][0]
                visible = (expected > 0).float()
                uniform = visible / visible.sum(-1, keepdim=True).clamp(min=1)
                expected[:, heads[name]] = uniform[:, heads[name]]
                token_mask = batch["attention_mask"].bool() if "attention_mask" in batch else batch["input_ids"] != 0
                rows = token_mask[:, None, :].expand(-1, expected.shape[1], -1)
                assert_close(actual[rows], expected[rows], atol=1e-5, rtol=1e-4, msg=lambda text: f"{case}: {text}")
    with disabled_heads(model, all_layers(model), mode="uniform"):
        packed = run(model, batch)
        with inspection_mode(model):
            assert_equal_outputs(packed, run(model, batch), f"{case} packed", 1e-4)


@as_subtests(CASES)
def test_pruned_model_equals_disabled_heads(case: Case, tmp_path: Path) -> None:
    """A pruned model also has fewer weights, and can be saved and reloaded."""
    model, batch = case.model(), make_batch(case)
    heads = all_layers(model)
    with disabled_heads(model, heads):
        expected = run(model, batch)
    size = model.num_parameters()
    assert "pruned_heads" not in model.config.to_dict()
    prune_heads(model, {name: numbers[:1] for name, numbers in heads.items()})
    prune_heads(model, {name: numbers[1:] for name, numbers in heads.items()})  # the heads keep their numbers
    assert model.num_parameters() < size
    assert_equal_outputs(run(model, batch), expected, f"{case} pruned", 1e-5)
    directory = tmp_path / case.family.name
    model.save_pretrained(directory)
    reloaded = transformers.AutoModel.from_pretrained(directory).eval()
    assert reloaded.num_parameters() == model.num_parameters()
    assert_equal_outputs(run(reloaded, batch), run(model, batch), f"{case} reopened", 1e-6)
    assert_equal_outputs(run(reloaded.prepare_for_inference(), batch), expected, f"{case} prepacked", 1e-5)
    if case.model_class.reference_model_type is not None:
        with pytest.raises(CtxError, match="no layout for pruned heads"):
            model.export_reference(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [("bert", "zero"), ("t5", "uniform")])
def test_compiled_graphs_respect_disabled_heads(family: str, mode: Any) -> None:
    """Graphs compiled before the heads are disabled are not used, nor those compiled within the context."""
    case = next(case for case in CASES if case.family.name == family)
    model, batch = case.model(num_hidden_layers=1), make_batch(case)
    compiled = torch.compile(model, backend="eager")
    baseline, heads = run(compiled, batch), all_layers(model)
    with disabled_heads(model, heads, mode):
        assert_equal_outputs(run(compiled, batch), run(model, batch), f"{family} {mode}", 1e-5)
    assert_equal_outputs(run(compiled, batch), baseline, family, 1e-5)
    if family == "t5":
        prune_heads(model, heads)
        assert_equal_outputs(run(compiled, batch), run(model, batch), f"{family} pruned", 1e-5)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_generation_with_disabled_and_pruned_heads(family: str) -> None:
    """With a cache, the generated text equals that of the model with zeroed projections."""
    name = "AutoModelForCausalLM" if family == "gpt2" else "AutoModelForSeq2SeqLM"
    case = next(case for case in HEADS if case.family.name == family and name == case.auto_name)
    model, ids = case.model(), torch.tensor([[7, 9, 12, 30]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    expected = with_zeroed_heads(model).generate(ids, use_cache=False, **options)
    with disabled_heads(model, all_layers(model)):
        assert torch.equal(model.generate(ids, **options), expected)
    prune_heads(model, all_layers(model))
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_disabled_heads_of_shared_layers() -> None:
    """One of ALBERT's shared layers can be disabled alone, also with activation checkpointing, but not pruned alone."""
    albert = FAMILIES["albert"]
    case = next(case for case in CASES if case.family is albert)
    shared = case.model()
    separate = case.model(parameter_sharing="none", num_hidden_groups=1)
    for layer in separate.layers:
        layer.load_state_dict(next(iter(shared.layers)).state_dict())
    separate.embeddings.load_state_dict(shared.embeddings.state_dict())
    batch, heads = make_batch(case), {1: [0], 2: [3]}
    for mode in ("zero", "uniform"):
        with disabled_heads(separate, heads, mode), disabled_heads(shared, heads, mode):
            expected = run(separate, batch).last_hidden_state
            assert_close(run(shared, batch).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
            shared.activation_checkpointing_enable()
            shared.train()(**batch).last_hidden_state.sum().backward()
            gradients = {name: parameter.grad for name, parameter in shared.embeddings.named_parameters()}
            separate.train()(**batch).last_hidden_state.sum().backward()
            for name, parameter in separate.embeddings.named_parameters():
                assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-3)
            shared.eval().zero_grad(), separate.eval().zero_grad()
            shared.activation_checkpointing_disable()
    with pytest.raises(CtxError, match="share their weights"):
        prune_heads(shared, heads)


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(vocab_size=40, intermediate_size=32),
        transformers.T5Config(vocab_size=40, d_ff=32, d_kv=8, num_layers=2, num_heads=4, d_model=32),
        transformers.GPT2Config(vocab_size=40, n_layer=2, n_head=4, n_embd=32),
        transformers.BartConfig(
            vocab_size=40, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
        ),
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ],
    ids=lambda config: type(config).__name__,
)  # fmt: skip
def test_disabled_heads_of_transformers_models(config: Any) -> None:
    """The mode "uniform" needs separate query projections."""
    if config.model_type == "bert":
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 32, 2, 4
    model = transformers.AutoModel.from_config(config).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    expected_model = copy.deepcopy(model)
    for layer in attention_layers(expected_model).values():
        weight = layer.out_proj.weight.data
        heads_first = weight.T if type(layer.out_proj) is nn.Linear else weight
        heads_first.unflatten(0, (4, 8))[list(DISABLED_HEADS)] = 0
    with disabled_heads(model, all_layers(model)):
        assert_close(run(model, inputs)[0], run(expected_model, inputs)[0], atol=1e-6, rtol=1e-5)
    if config.model_type in ("t5", "gpt2"):  # relative positions, fused projections
        with pytest.raises(CtxError, match="does not support the mode"), disabled_heads(model, {0: [1]}, "uniform"):
            pass
    else:
        model.set_attn_implementation("eager")
        with disabled_heads(model, {0: [1, 2]}, "uniform"):
            outputs = run(model, inputs, output_attentions=True)
        attention = outputs["encoder_attentions" if config.is_encoder_decoder else "attentions"][0]
        is_uniform = [bool((rows.amax(-1) - rows.sum(-1) / (rows > 0).sum(-1) < 1e-6).all()) for rows in attention[0]]
        assert is_uniform == [False, True, True, False]
    with pytest.raises(CtxError, match="cannot be pruned"):
        prune_heads(model, {0: [1]})


def test_invalid_heads_raise() -> None:
    bert, elmo = (next(case for case in BASES if case.family.name == name).model() for name in ("bert", "elmo"))
    for model, heads, mode, message in (
        (bert, {3: [0]}, "zero", "no attention in a layer '3'"),
        (bert, {0: [4, 9]}, "zero", "has no head 4, 9"),
        (bert, {0: [0]}, "half", "mode='half'"),
        (elmo, {0: [0]}, "zero", "no attention heads"),
    ):
        with pytest.raises(CtxError, match=message), disabled_heads(model, heads, mode):
            pass
    with pytest.raises(CtxError, match="Layer 1 would have no head"):
        prune_heads(bert, {1: range(4)})
    prune_heads(bert, {1: [2]})
    with pytest.raises(CtxError, match="has no head 2"):
        prune_heads(bert, {1: [2]})
    assert parse_heads("0:1,3; cross.2:5") == {"0": [1, 3], "cross.2": [5]}
    for text in ("", "0", "0:", "0:1;a:2", "0:1-3"):
        with pytest.raises(CtxError, match="select"):
            parse_heads(text)
