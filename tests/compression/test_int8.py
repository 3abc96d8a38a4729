"""8-bit quantization: integer products, checkpoints of all architectures, errors, and the command."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from commands import command_output
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMultipleChoice, AutoModelForSequenceClassification
from zoo import REPRESENTATIVES, Case, as_subtests, make_batch, make_targets, tensors_of

from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification, CtxBertModel, CtxError
from hf_ctxmodels.compression.int8 import modules
from hf_ctxmodels.compression.int8.modules import Int8Embedding, Int8Linear, quantize_rows, quantize_tokens
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.downstream.adapters import add_adapter, delete_adapter, train_adapter
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_saved_model
from hf_ctxmodels.inference.exporting import inputs_for_texts
from hf_ctxmodels.layers.cpu import linear as cpu_linear
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.registry import FAMILIES

BERT = Case(FAMILIES["bert"], "AutoModelForSequenceClassification")


def integer_linear(states: Tensor, weight: Tensor, bias: Tensor | None, activations: str) -> Tensor:
    """Linear layer with integer products and double precision scales, row by row."""
    rows = []
    minimum, maximum = min(0.0, float(states.min())), max(0.0, float(states.max()))
    for row in states:
        scale = float(row.abs().max()) / 127 if activations == "token" else (maximum - minimum) / 255
        zero_point = 128 if activations == "token" else round(-minimum / scale)
        codes = torch.floor(row.float() * (1 / scale) + 0.5 + zero_point).long()
        assert 0 <= int(codes.min()) <= int(codes.max()) <= 255
        outputs = []
        for index, row_weight in enumerate(weight):
            weight_scale = float(row_weight.abs().max()) / 127
            product = int(((codes - zero_point) * (row_weight / weight_scale).round().long()).sum())
            outputs.append(product * scale * weight_scale + (0.0 if bias is None else float(bias[index])))
        rows.append(outputs)
    return torch.tensor(rows, dtype=torch.float64)


@torch.no_grad()
def test_int8_linear_equals_integer_product(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fast and slow path, with all activation scales, and for a range of outputs."""
    torch.manual_seed(0)
    states, weight = torch.randn(9, 24) * torch.logspace(-3, 2, 9)[:, None], torch.randn(17, 24)
    assert modules.HAS_INT8_PRODUCT or not torch.cpu._is_vnni_supported()
    for activations in ("token", "tensor", "static"):
        for bias in (None, torch.randn(17)):
            limits = (min(0.0, float(states.min())), float(states.max())) if activations == "static" else None
            module = Int8Linear.from_weight(weight, bias, activations, limits)  # type: ignore[arg-type]
            expected = integer_linear(states, weight, bias, activations)
            for fast in {modules.HAS_INT8_PRODUCT, False}:
                with subtests.test(activations=activations, bias=bias is not None, fast=fast):
                    monkeypatch.setattr(modules, "HAS_INT8_PRODUCT", fast)
                    outputs = module(states)
                    largest = expected.abs().amax(1, keepdim=True) if activations == "token" else expected.abs().max()
                    relative_error = (outputs - expected).abs() / largest
                    assert float(relative_error.max()) < 1e-5, relative_error
                    torch.testing.assert_close(linear(module, states, 3, 11), outputs[:, 3:11])
                    assert module(states.view(3, 3, 24)).shape == (3, 3, 17)
                    assert module(states[:0]).shape == (0, 17)
            monkeypatch.undo()
    expected = Int8Linear.from_weight(weight, None)(states)
    with torch.inference_mode():  # inference tensors have no version counter
        torch.testing.assert_close(Int8Linear.from_weight(weight, None)(states), expected)


@torch.no_grad()
def test_exported_int8_linear_has_no_cpu_kernel() -> None:
    """The exported program also runs where oneDNN has no int8 product."""
    torch.manual_seed(0)
    module, states = Int8Linear.from_weight(torch.randn(17, 24), None), torch.randn(9, 24)
    program = torch.export.export(module, (states,))
    assert not [node for node in program.graph.nodes if "onednn" in str(node.target)]
    torch.testing.assert_close(program.module()(states), module(states))


@torch.no_grad()
def test_row_quantization() -> None:
    """Rows are quantized independently; zeros and NaNs are preserved."""
    states = torch.randn(300, 700)
    states[3] = 0
    quantized = quantize_tokens(states)
    single_rows = torch.cat([quantize_tokens(row[None]).dequantize() for row in states])
    assert torch.equal(quantized.dequantize(), single_rows)
    assert bool(((single_rows - states).abs() <= 0.5001 * quantized.scale).all())
    codes, scale = quantize_rows(states)
    assert codes[3].count_nonzero() == 0
    assert scale[3] == 1
    assert bool(((codes * scale[:, None] - states).abs() <= 0.5001 * scale[:, None]).all())
    for activations in ("token", "tensor"):
        with_nan = torch.ones(2, 24)
        with_nan[1, 5] = math.nan
        outputs = Int8Linear.from_weight(torch.randn(17, 24), None, activations)(with_nan)  # type: ignore[arg-type]
        assert bool(outputs[1].isnan().all()), activations


@pytest.mark.fast_families("bert", "t5", "elmo")
@as_subtests(REPRESENTATIVES)
@torch.no_grad()
def test_save_and_reload(case: Case, tmp_path: Path) -> None:
    """Outputs and loss are close to the float model and equal after reloading; `AutoModel` loads the encoder, and saves
    it, so that it can be loaded with a new head."""
    model, batch, folder = case.model(), make_batch(case), tmp_path / str(case)
    targets = batch | make_targets(case, batch)
    expected, loss = tensors_of(model(**batch)), float(model(**targets).loss)
    full_size = model.get_memory_footprint()
    quantize_model(model, CtxInt8Config())
    outputs = tensors_of(model(**batch))
    for name, value in outputs.items():
        cosine = F.cosine_similarity(value.flatten().float(), expected[name].flatten().float(), 0)
        assert float(cosine) > 0.99, f"{name}: {float(cosine)}"
    assert abs(float(model(**targets).loss) - loss) < 0.1 * max(loss, 1.0)
    model.save_pretrained(folder)
    reloaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    for name, value in tensors_of(reloaded(**batch)).items():
        assert torch.equal(value, outputs[name]), name
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size < full_size, f"{size} of {full_size} bytes"  # names and scales are much of a tiny file
    encoder = AutoModel.from_pretrained(folder)
    assert any(isinstance(module, Int8Linear | Int8Embedding) for module in encoder.modules())
    encoder.save_pretrained(folder / "encoder")
    weights = encoder.state_dict()
    for name, weight in type(model).from_pretrained(folder / "encoder").base_model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_compression_ratio() -> None:
    """About 4 for realistic shapes; tied embeddings are stored once."""
    fields = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    for name, head, options in (
        ("bert", "AutoModelForMaskedLM", fields),
        ("ulmfit", "AutoModelForCausalLM", {"vocab_size": 9000}),
        ("elmo", "AutoModelForPreTraining", {}),
    ):
        family = FAMILIES[name]
        model = family.models[head](family.config(**(family.sizes["tiny"] | options)))
        full_size = model.get_memory_footprint()
        quantize_model(model, CtxInt8Config())
        assert 3.5 < full_size / model.get_memory_footprint() < 4, f"{name}: {full_size / model.get_memory_footprint()}"


@torch.no_grad()
def test_quantization_when_loading(tmp_path: Path) -> None:
    """A float checkpoint can be quantized when it is loaded; a new head on a quantized encoder is float32; copies have
    equal outputs."""
    case = Case(FAMILIES["bert"], "AutoModel")
    float_model, batch = case.model(), make_batch(case)
    float_model.save_pretrained(tmp_path / "plain")
    quantized = AutoModel.from_pretrained(tmp_path / "plain", quantization_config=CtxInt8Config())
    quantized.save_pretrained(tmp_path / "int8")
    reloaded_bf16 = AutoModel.from_pretrained(tmp_path / "int8", dtype=torch.bfloat16)
    assert reloaded_bf16.layers[0].feed_forward.up_proj.code_scale.dtype is torch.float32
    quantized_bf16 = copy.deepcopy(float_model).bfloat16()  # unquantized weights become float32, whatever the dtype
    quantize_model(quantized_bf16, CtxInt8Config())
    expected = float_model(**batch).last_hidden_state
    is_token = batch["attention_mask"].bool()
    for variant in (quantized_bf16, reloaded_bf16):
        states = variant(**batch).last_hidden_state
        assert states.dtype is torch.float32
        assert F.cosine_similarity(states[is_token], expected[is_token], dim=-1).min() > 0.99
    reloaded = AutoModel.from_pretrained(tmp_path / "int8")
    for variant in (reloaded, copy.deepcopy(quantized)):
        assert torch.equal(variant(**batch).last_hidden_state, quantized(**batch).last_hidden_state)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "int8", num_labels=40)
    assert isinstance(classifier.bert.layers[0].attention.qkv_proj, Int8Linear)
    assert type(classifier.classifier) is nn.Linear
    assert bool(classifier.classifier.weight.isfinite().all())


def test_invalid_quantization_raises(tmp_path: Path) -> None:
    model = BERT.model()
    with pytest.raises(CtxError, match=r"no module 'clasifier'"):
        quantize_model(model, CtxInt8Config(skip=["clasifier"]))
    with pytest.raises(CtxError, match=r"(?s)activations='row' is unknown.*token, tensor, static"):
        CtxInt8Config(activations="row")  # type: ignore[arg-type]
    with pytest.raises(CtxError, match=r"(?s)embeddings='int4' is unknown.*int8, float32"):
        CtxInt8Config(embeddings="int4")  # type: ignore[arg-type]
    with pytest.raises(CtxError, match="skip is 'pooler'"):
        CtxInt8Config(skip="pooler")  # type: ignore[arg-type]
    with pytest.raises(CtxError, match=r"no input in the calibration"):
        quantize_model(BERT.model(), CtxInt8Config(activations="static"), {})
    quantize_model(model, CtxInt8Config(skip=["layers.0", "pooler"]))
    assert type(model.bert.layers[0].feed_forward.up_proj) is nn.Linear
    assert isinstance(model.bert.layers[1].feed_forward.up_proj, Int8Linear)
    with pytest.raises(CtxError, match="quantized already"):
        quantize_model(model, CtxInt8Config())
    with pytest.raises(CtxError, match="has no gradients"):
        model.bert.layers[1].feed_forward(torch.randn(2, 3, 32, requires_grad=True))
    with pytest.raises(CtxError, match="plain weights"):
        model.export_reference(tmp_path)
    add_adapter(model, "a")
    with pytest.raises(CtxError, match="cannot be trained"):
        train_adapter(model, "a")
    delete_adapter(model, "a")
    model.save_pretrained(tmp_path)
    with pytest.raises(CtxError, match="CPU only"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, device_map="cuda:0")
    with pytest.raises(CtxError, match="quantized already"):
        quantize_model(load_saved_model(str(tmp_path)), CtxInt8Config())


@torch.no_grad()
def test_long_inputs_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with one scale per token, which makes rows independent; outputs equal those of a single chunk."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    states = torch.randn(70, 16) * torch.logspace(-2, 1, 70)[:, None]
    for activations, is_chunked in (("token", True), ("tensor", False)):
        model = CtxBertModel(CtxBertConfig(vocab_size=20, **sizes)).eval()
        quantize_model(model, CtxInt8Config(activations=activations))  # type: ignore[arg-type]
        layer, chunks = model.layers[0].feed_forward, list[int]()
        expected = layer(states)
        monkeypatch.setattr(cpu_linear, "CHUNK_ROWS", 32)
        compute = layer.transform
        monkeypatch.setattr(
            layer, "transform", lambda rows, compute=compute, chunks=chunks: chunks.append(len(rows)) or compute(rows)
        )
        assert torch.equal(layer(states), expected)
        assert chunks == ([32, 32, 6] if is_chunked else [70])
        monkeypatch.undo()


@as_subtests([*REPRESENTATIVES, Case(FAMILIES["word2vec"], "AutoModelForSequenceClassification")])
def test_training_quantized_model_raises(case: Case) -> None:
    """Also with quantized embeddings only; the forward pass works without gradients."""
    model, batch = case.model(), make_batch(case)
    quantize_model(model, CtxInt8Config())
    with pytest.raises(CtxError, match="cannot be trained"):
        model.train()(**batch, **make_targets(case, batch))
    with torch.no_grad():
        model(**batch)


@as_subtests([case for case in REPRESENTATIVES if case.is_seq2seq or case.has_choices])
@torch.no_grad()
def test_calibration_inputs_of_all_heads(case: Case) -> None:
    """Seq2seq models get a target, and multiple-choice models a single choice."""
    batch, names = make_batch(case), ("input_ids", "attention_mask", "token_type_ids")
    texts = {name: batch[name] for name in names if name in batch}
    if case.has_choices:
        texts = {name: value.flatten(0, 1) for name, value in texts.items()}
    rows, length = texts["input_ids"].shape[:2]
    logits = case.model()(**inputs_for_texts(case.model(), texts)).logits
    assert logits.shape[:2] == ((rows, 1) if case.has_choices else (rows, length + 2))


def test_export_int8_command(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    FAMILIES["bert"].tokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path)
    fields = {**FAMILIES["bert"].sizes["tiny"], "vocab_size": len(words), "initializer_range": 0.2}
    config = CtxBertConfig(**fields)
    torch.manual_seed(0)
    CtxBertForSequenceClassification(config).save_pretrained(tmp_path)
    texts = tmp_path / "texts.txt"
    texts.write_text("a b c d\n" * 3, encoding="utf-8")
    output, static = tmp_path / "int8", f"static:file={texts}"
    flags = {"model": tmp_path, "output_dir": output}
    for activations, message in (
        (static, "got 3"),
        ("static", "static needs file"),
        (f"token:file={texts}", "Unknown option 'file'"),
    ):
        assert message in command_output("export int8", **flags, activations=activations, fails=True)
    texts.write_text("a b c d e\nf g h\n" * 10, encoding="utf-8")
    assert "times smaller" in command_output("export int8", **flags, activations=static, skip="pooler")
    assert json.loads((output / "config.json").read_text())["quantization_config"]["activations"] == "static"
    model = CtxBertForSequenceClassification.from_pretrained(tmp_path)
    quantized = AutoModelForSequenceClassification.from_pretrained(output)
    batch = {"input_ids": torch.tensor([[2, 5, 6, 7, 3]])}
    assert F.cosine_similarity(quantized(**batch).logits, model(**batch).logits).item() > 0.98
    assert isinstance(CtxBertModel.from_pretrained(output).layers[0].attention.qkv_proj.input_zero_point, Tensor)
    assert "already holds" in command_output("export int8", **flags, fails=True)
    FAMILIES["bert"].models["AutoModelForMultipleChoice"](config).save_pretrained(tmp_path)
    command_output("export int8", "--overwrite", **flags, activations=static)
    multiple_choice_model = AutoModelForMultipleChoice.from_pretrained(output)
    assert float(multiple_choice_model.bert.pooler.dense.input_scale) > 0
