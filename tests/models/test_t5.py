"""T5: released checkpoints of both versions, mT5, UMT5, encoder model, initialization, float16, and FlexAttention."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForTextEncoding,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
)
from transformers.integrations.flex_attention import WrappedFlexAttention
from zoo import (
    Case,
    assert_close,
    assert_same_gradients,
    assert_same_weights,
    gradients,
    load_strict,
    make_batch,
    with_random_parameters,
)

import hf_ctxmodels
from hf_ctxmodels import (
    CtxT5Config,
    CtxT5EncoderModel,
    CtxT5ForConditionalGeneration,
    CtxT5Model,
    CtxT5Tokenizer,
    get_family,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.transformer import GatedFeedForward
from hf_ctxmodels.training.model_loading import new_config

SHAPE = {"vocab_size": 61, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3}
SHAPE |= {"num_heads": 3, "dropout_rate": 0.0, "decoder_start_token_id": 0}
V1_1: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SEQ2SEQ = Case(get_family("t5"), "AutoModelForSeq2SeqLM")


def batch() -> dict[str, torch.Tensor]:
    """Sources of several lengths, and labels."""
    inputs = make_batch(SEQ2SEQ, (12, 7, 1, 9))
    labels = inputs.pop("decoder_input_ids")
    labels[1, 3:] = -100
    return {**inputs, "labels": labels}


def save_released(folder: Path, version: dict[str, Any]) -> Path:
    """A checkpoint like the released ones: version 1.1 has an untied output layer; old files contain copies of the word
    embeddings and an unused bias."""
    torch.manual_seed(0)
    reference = with_random_parameters(T5ForConditionalGeneration(T5Config(**SHAPE, **version)), 0)
    reference.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    copies = {f"{stack}.embed_tokens.weight": weights["shared.weight"].clone() for stack in ("encoder", "decoder")}
    weights |= copies | {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 3)}
    if version:
        weights["lm_head.weight"] = 0.3 * torch.randn(61, 24)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)
    config["tie_word_embeddings"] = not version
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("version", [{}, V1_1], ids=["1.0", "1.1"])
def test_released_checkpoints(version: dict[str, Any], tmp_path: Path) -> None:
    """Logits, loss and gradients match transformers; an untied output layer stays untied; exports are bit-exact."""
    source = save_released(tmp_path / "released", version)
    reference = T5ForConditionalGeneration.from_pretrained(source).eval()
    model = load_strict(CtxT5ForConditionalGeneration, source)
    assert model.config.tie_word_embeddings is not bool(version)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is not bool(version)
    expected, outputs = reference(**batch()), model(**batch(), return_logits=True)
    assert_close(outputs.logits, expected.logits)
    assert_close(model(**batch(), return_logits=False).loss, expected.loss)
    expected.loss.backward()
    outputs.loss.backward()
    model.export_reference(tmp_path / "export")
    exported = load_strict(T5ForConditionalGeneration, tmp_path / "export")
    assert exported.config.scale_decoder_outputs is not bool(version)
    assert_same_weights(exported, reference)
    model.save_pretrained(tmp_path / "native")
    assert_same_weights(CtxT5ForConditionalGeneration.from_pretrained(tmp_path / "native"), model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.export_reference(tmp_path / "gradients")
    gradients = T5ForConditionalGeneration.from_pretrained(tmp_path / "gradients")
    assert_close([*gradients.parameters()], [parameter.grad for parameter in reference.parameters()], "gradients")


@pytest.mark.parametrize("tied", [True, False])
def test_mt5_checkpoints(tied: bool, tmp_path: Path) -> None:
    """transformers saves all mT5 configurations with `tie_word_embeddings`, even with a separate output layer."""
    torch.manual_seed(0)
    reference = with_random_parameters(MT5ForConditionalGeneration(MT5Config(**SHAPE)), 0)
    if not tied:
        reference.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(61, 24))
    reference.save_pretrained(tmp_path / "mt5")
    reference = MT5ForConditionalGeneration.from_pretrained(tmp_path / "mt5").eval()
    model = load_strict(CtxT5ForConditionalGeneration, tmp_path / "mt5")
    expected, outputs = reference(**batch()), model.eval()(**batch(), return_logits=True)
    assert_close(outputs.logits, expected.logits)
    assert_close(outputs.loss, expected.loss)
    assert CtxT5Config(**reference.config.to_dict()).scale_decoder_outputs is False
    model.save_pretrained(tmp_path / "native")
    for folder in ("mt5", "native"):  # must not load the output layer's weights
        encoder = CtxT5EncoderModel.from_pretrained(tmp_path / folder)
        assert torch.equal(encoder.get_input_embeddings().weight, reference.shared.weight)
    reloaded = CtxT5ForConditionalGeneration.from_pretrained(tmp_path / "native").eval()
    assert_close(reloaded(**batch(), return_logits=True).logits, expected.logits)


def test_released_umt5_checkpoint(tmp_path: Path) -> None:
    """Its output layer is separate, and its input is not scaled as in transformers 5.23; generated ids are equal."""
    torch.manual_seed(0)
    config = UMT5Config(**SHAPE | {"num_decoder_layers": 2})  # its caches need equal numbers of layers
    source = with_random_parameters(transformers.UMT5ForConditionalGeneration(config), 0)
    source.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(61, 24))
    source.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference = transformers.UMT5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    model = load_strict(CtxT5ForConditionalGeneration, tmp_path)
    with torch.no_grad():
        assert_close(model(**batch(), return_logits=True).logits, reference(**batch()).logits * 24**0.5)
    inputs = make_batch(SEQ2SEQ, (12, 7, 1, 9))
    del inputs["decoder_input_ids"]
    expected, generated = (network.generate(**inputs, max_new_tokens=9, num_beams=1) for network in (reference, model))
    assert torch.equal(generated, expected)
    with pytest.raises(CtxError, match="scale_decoder_outputs"):
        model.export_reference(tmp_path / "export")


@pytest.mark.parametrize("head", ["Model", "EncoderModel", "ForConditionalGeneration", "ForSequenceClassification"])
def test_umt5_checkpoints(head: str, tmp_path: Path) -> None:
    """Each layer has a position bias. Outputs and gradients match transformers, and exports are bit-exact."""
    torch.manual_seed(0)
    reference = with_random_parameters(getattr(transformers, f"UMT5{head}")(UMT5Config(**SHAPE)), 0).eval()
    reference.save_pretrained(tmp_path / "umt5")
    model = load_strict(getattr(hf_ctxmodels, f"CtxT5{head}"), tmp_path / "umt5")
    inputs = batch() if head == "ForConditionalGeneration" else make_batch(SEQ2SEQ, (12, 7, 1, 9))
    if head in ("EncoderModel", "ForSequenceClassification"):
        del inputs["decoder_input_ids"]
    if head == "ForSequenceClassification":
        inputs["input_ids"].clamp_(min=2).scatter_(1, inputs["attention_mask"].sum(1, keepdim=True) - 1, 1)  # </s>
    options = {"return_logits": True} if head == "ForConditionalGeneration" else {}
    expected, outputs = reference(**inputs)[0], model(**inputs, **options)[0]
    if head == "EncoderModel":  # padding positions are not computed
        expected, outputs = (output[inputs["attention_mask"].bool()] for output in (expected, outputs))
    assert_close(outputs, expected)
    expected.square().mean().backward()
    outputs.square().mean().backward()
    model.export_reference(tmp_path / "export")
    assert_same_weights(load_strict(type(reference), tmp_path / "export"), reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.export_reference(tmp_path / "gradients")
    gradients = type(reference).from_pretrained(tmp_path / "gradients")
    assert_close([*gradients.parameters()], [parameter.grad for parameter in reference.parameters()], "gradients")


def test_tied_output_layer_without_scaling() -> None:
    tied = CtxT5ForConditionalGeneration(CtxT5Config(**SHAPE, scale_decoder_outputs=False))
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert tied.reference_config()["scale_decoder_outputs"] is False


def test_encoder_model(tmp_path: Path) -> None:
    """Matches the encoder of the full model and of transformers; packed and padded batches; export."""
    source, inputs = save_released(tmp_path / "released", V1_1), batch()
    inputs.pop("labels")
    encoder = load_strict(CtxT5EncoderModel, source)
    model = CtxT5Model.from_pretrained(source).eval()
    reference = T5EncoderModel.from_pretrained(source).eval()
    mask = inputs["attention_mask"] == 1
    expected = reference(**inputs).last_hidden_state[mask]
    states = encoder(**inputs).last_hidden_state
    assert_close(states[mask], expected)
    assert_close(model.encoder(**inputs).last_hidden_state, states)
    encoder.export_reference(tmp_path / "export")
    assert_same_weights(load_strict(T5EncoderModel, tmp_path / "export"), reference)
    encoder.save_pretrained(tmp_path / "native")
    reloaded = AutoModelForTextEncoding.from_pretrained(tmp_path / "native", unpad=False)
    assert_close(reloaded.eval()(**inputs).last_hidden_state[mask], expected)
    rows = inputs["input_ids"][mask].split(inputs["attention_mask"].sum(1).tolist())
    sequence_ids = torch.cat([torch.full((len(row),), number + 1) for number, row in enumerate(rows)])
    packed = encoder(input_ids=torch.cat(rows)[None], sequence_ids=sequence_ids[None])
    assert_close(packed.last_hidden_state[0], expected)
    output_mask = mask & (torch.arange(mask.shape[1]) % 3 == 0)
    assert_close(encoder(**inputs, output_mask=output_mask).last_hidden_state, states[output_mask])


@torch.no_grad()
def test_first_layers_with_a_bias_for_each_layer() -> None:
    """Without the last layer, the states of the remaining layers are unchanged."""
    fields = SHAPE | {"num_layers": 3, "layerwise_position_bias": True}
    encoder = with_random_parameters(CtxT5EncoderModel(CtxT5Config(**fields)), 0).eval().encoder
    inputs = batch()
    inputs.pop("labels")
    expected = encoder(**inputs, output_hidden_states=True).hidden_states
    encoder.layers = encoder.layers[:2]
    assert_close(encoder(**inputs, output_hidden_states=True).hidden_states[:2], expected[:2])


def test_initialization_matches_released_code() -> None:
    """Standard deviations of mesh-tensorflow's T5 for all types of weights."""
    torch.manual_seed(0)
    fields = {"vocab_size": 500, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_attention_heads": 8}
    model = CtxT5ForConditionalGeneration(CtxT5Config(**fields, hidden_act="gated-gelu", tie_word_embeddings=False))
    queries, keys, values = model.t5.decoder.layers[0].attention.qkv_proj.weight.chunk(3)
    layer = model.t5.decoder.layers[1]
    expected_std = [
        (queries, (64 * 16) ** -0.5),
        (keys, 64**-0.5),
        (values, 64**-0.5),
        (layer.attention.out_proj.weight, 128**-0.5),
        (layer.cross_attention.q_proj.weight, (64 * 16) ** -0.5),
        (layer.cross_attention.kv_proj.weight, 64**-0.5),
        (layer.feed_forward.gate_proj.weight, 64**-0.5),
        (layer.feed_forward.up_proj.weight, 64**-0.5),
        (layer.feed_forward.down_proj.weight, 128**-0.5),
        (model.t5.encoder.word_embeddings.weight, 1.0),
        (model.t5.encoder.position_bias.buckets.weight, 64**-0.5),
        (model.lm_head.weight, 64**-0.5),
    ]
    for number, (weight, std) in enumerate(expected_std):
        assert float(weight.detach().std() / std) == pytest.approx(1, abs=4 / weight.numel() ** 0.5), number
    assert all(float(norm.detach().std()) == 0 for name, norm in model.named_parameters() if "norm" in name)


def test_clamping_in_float16() -> None:
    """Residual stream and gated layers are clamped in a model whose activations overflow in float16."""
    outputs = {}
    for clamp in (False, True):
        torch.manual_seed(0)
        config = CtxT5Config(**SHAPE, feed_forward_proj="gated-gelu", clamp_half_precision=clamp)
        model = CtxT5ForConditionalGeneration(config).half().eval()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, GatedFeedForward):
                    module.down_proj.weight.mul_(3e4)
            outputs[clamp] = model(**batch(), return_logits=True)
    assert not outputs[False].logits.isfinite().all()
    assert outputs[True].logits.isfinite().all()
    assert outputs[True].loss.isfinite()


def test_configuration_defaults() -> None:
    config = CtxT5Config(d_model=512, num_heads=6, num_layers=8)  # version 1.1: heads do not divide the width
    assert (config.decoder_layers, config.decoder_start_token_id, config.scale_decoder_outputs) == (8, 0, True)
    assert CtxT5Config(pad_token_id=7).decoder_start_token_id == 7
    assert CtxT5Config(hidden_act="gated-gelu").activation == "gelu_new"
    assert CtxT5Config(hidden_act="gelu").activation == "gelu"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{number}", -1.0) for number in range(30))]
    config = new_config(get_family("t5"), CtxT5Tokenizer(vocab=CtxT5Tokenizer.reorder_vocabulary(pieces)), "v1_1_tiny")
    assert (config.vocab_size, config.eos_token_id, config.tie_word_embeddings) == (256, 1, False)  # for 133 tokens
    with pytest.raises(CtxError, match="position_ids"):
        CtxT5Model(CtxT5Config(**SHAPE))(torch.tensor([[4, 5]]), position_ids=torch.tensor([[0, 1]]))


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operation."""
        outputs = func(*args, **kwargs or {})
        sizes = [tensor.numel() for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return outputs


class TestFlexAttention:
    @pytest.fixture(autouse=True)
    def _uncompiled(self, uncompiled_flex: None) -> None: ...

    @pytest.fixture
    def model(self) -> CtxT5ForConditionalGeneration:
        """A model whose position bias has a bucket for all distances of 6 or more."""
        buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
        torch.manual_seed(0)
        model = with_random_parameters(CtxT5ForConditionalGeneration(CtxT5Config(**SHAPE, **buckets)), 0)
        for stack in (model.t5.encoder, model.t5.decoder):
            torch.nn.init.normal_(stack.position_bias.buckets.weight)
        return model.eval()

    def test_bias_is_read_by_distance(
        self, model: CtxT5ForConditionalGeneration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outside the kernel, no tensor has an element per head, query and key, in training with packed sequences."""
        monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: lambda query, *args, **kwargs: query)
        model.set_attn_implementation("flex_attention")
        length = 128
        ids = torch.randint(3, 61, (2, length))
        sequence_ids = (torch.arange(length) // 50).expand(2, -1) + 1
        with LargestTensor() as largest:
            loss = model(input_ids=ids, labels=ids, sequence_ids=sequence_ids, decoder_sequence_ids=sequence_ids).loss
            loss.backward()
        assert largest.num_elements < model.config.num_attention_heads * length * length

    def test_gradients_equal_eager(self, model: CtxT5ForConditionalGeneration) -> None:
        """Also of the position bias, with padding, with padding between tokens, and packed."""
        inputs = batch()
        gaps = inputs["attention_mask"].clone()
        gaps[0, 3:6] = gaps[1, :2] = 0
        ids, sequence_ids = torch.randint(3, 61, (1, 22)), torch.tensor([[1] * 9 + [2] * 13])
        packed = {"input_ids": ids, "sequence_ids": sequence_ids, "labels": ids, "decoder_sequence_ids": sequence_ids}
        for name, arguments in {"padded": inputs, "gaps": inputs | {"attention_mask": gaps}, "packed": packed}.items():
            losses, parameter_gradients = {}, {}
            for implementation in ("eager", "flex_attention"):
                model.set_attn_implementation(implementation)
                losses[implementation] = model(**arguments).loss
                parameter_gradients[implementation] = gradients(model, losses[implementation])
            assert_close(losses["flex_attention"], losses["eager"], f"loss, {name}")
            assert_same_gradients(
                parameter_gradients["flex_attention"], parameter_gradients["eager"], where=f"by flex attention, {name}"
            )
            assert parameter_gradients["eager"]["t5.encoder.position_bias.buckets.weight"].any()

    def test_generated_logits_equal_eager(self, model: CtxT5ForConditionalGeneration) -> None:
        """With caches, whose queries have an offset, also of fixed length."""
        inputs = batch()
        inputs.pop("labels")
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
        for mode in ({}, {"cache_implementation": "static", "disable_compile": True}):
            model.set_attn_implementation("eager")
            expected = model.generate(**inputs, **options, **mode)
            model.set_attn_implementation("flex_attention")
            actual = model.generate(**inputs, **options, **mode)
            assert torch.equal(actual.sequences, expected.sequences)
            assert_close(actual.logits, expected.logits, f"logits, {mode}")

    def test_attention_dropout_raises(self) -> None:
        """FlexAttention has no dropout; other dropout is unaffected."""
        for dropout in (None, 0.0):
            config = CtxT5Config(**SHAPE | {"dropout_rate": 0.1}, attention_probs_dropout_prob=dropout)
            model = CtxT5ForConditionalGeneration(config).train()
            model.set_attn_implementation("flex_attention")
            if dropout is None:
                with pytest.raises(ValueError, match="turn off the attention dropout"):
                    model(**batch())
            else:
                model(**batch()).loss.backward()
