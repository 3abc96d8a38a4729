"""Weights of 8 bits: the product against integers, files of every family, errors, and the command."""

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
from hf_ctxmodels.cli import export
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


def by_integers(states: Tensor, weight: Tensor, bias: Tensor | None, activations: str) -> Tensor:
    """The map in whole numbers and double precision, row by row."""
    rows = []
    least, largest = min(0.0, float(states.min())), max(0.0, float(states.max()))
    for row in states:
        scale = float(row.abs().max()) / 127 if activations == "token" else (largest - least) / 255
        zero = 128 if activations == "token" else round(-least / scale)
        codes = torch.floor(row.float() * (1 / scale) + 0.5 + zero).long()
        assert 0 <= int(codes.min()) <= int(codes.max()) <= 255
        outputs = []
        for out, row_weight in enumerate(weight):
            step = float(row_weight.abs().max()) / 127
            product = int(((codes - zero) * (row_weight / step).round().long()).sum())
            outputs.append(product * scale * step + (0.0 if bias is None else float(bias[out])))
        rows.append(outputs)
    return torch.tensor(rows, dtype=torch.float64)


@torch.no_grad()
def test_maps_multiply_whole_numbers(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fast and on the slow path, with all kinds of scales, and a range of the outputs."""
    torch.manual_seed(0)
    states, weight = torch.randn(9, 24) * torch.logspace(-3, 2, 9)[:, None], torch.randn(17, 24)
    assert modules.HAS_INT8_PRODUCT or not torch.cpu._is_vnni_supported()
    for activations in ("token", "tensor", "static"):
        for bias in (None, torch.randn(17)):
            limits = (min(0.0, float(states.min())), float(states.max())) if activations == "static" else None
            module = Int8Linear.from_weight(weight, bias, activations, limits)  # type: ignore[arg-type]
            expected = by_integers(states, weight, bias, activations)
            for fast in {modules.HAS_INT8_PRODUCT, False}:
                with subtests.test(activations=activations, bias=bias is not None, fast=fast):
                    monkeypatch.setattr(modules, "HAS_INT8_PRODUCT", fast)
                    outputs = module(states)
                    largest = expected.abs().amax(1, keepdim=True) if activations == "token" else expected.abs().max()
                    share = (outputs - expected).abs() / largest
                    assert float(share.max()) < 1e-5, share
                    torch.testing.assert_close(linear(module, states, 3, 11), outputs[:, 3:11])
                    assert module(states.view(3, 3, 24)).shape == (3, 3, 17)
                    assert module(states[:0]).shape == (0, 17)
            monkeypatch.undo()
    expected = Int8Linear.from_weight(weight, None)(states)
    with torch.inference_mode():  # whose tensors count no changes
        torch.testing.assert_close(Int8Linear.from_weight(weight, None)(states), expected)


@torch.no_grad()
def test_codes_of_rows() -> None:
    """Rows do not depend on each other; zeros, and NaNs stay as they are."""
    states = torch.randn(300, 700)
    states[3] = 0
    quantized = quantize_tokens(states)
    alone = torch.cat([quantize_tokens(row[None]).dequantize() for row in states])
    assert torch.equal(quantized.dequantize(), alone)
    assert bool(((alone - states).abs() <= 0.5001 * quantized.scale).all())
    codes, scale = quantize_rows(states)
    assert codes[3].count_nonzero() == 0
    assert scale[3] == 1
    assert bool(((codes * scale[:, None] - states).abs() <= 0.5001 * scale[:, None]).all())
    for activations in ("token", "tensor"):
        wrong = torch.ones(2, 24)
        wrong[1, 5] = math.nan
        outputs = Int8Linear.from_weight(torch.randn(17, 24), None, activations)(wrong)  # type: ignore[arg-type]
        assert bool(outputs[1].isnan().all()), activations


@as_subtests(REPRESENTATIVES)
@torch.no_grad()
def test_saved_and_opened(case: Case, tmp_path: Path) -> None:
    """By its Auto class and as its encoder; near the model, with and without labels, and the same after opening."""
    model, batch, folder = case.model(), make_batch(case), tmp_path / str(case)
    targets = batch | make_targets(case, batch)
    expected, loss = tensors_of(model(**batch)), float(model(**targets).loss)
    before = export.stored_bytes(model)
    quantize_model(model, CtxInt8Config())
    outputs = tensors_of(model(**batch))
    for name, value in outputs.items():
        cosine = F.cosine_similarity(value.flatten().float(), expected[name].flatten().float(), 0)
        assert float(cosine) > 0.99, f"{name}: {float(cosine)}"
    assert abs(float(model(**targets).loss) - loss) < 0.1 * max(loss, 1.0)
    model.save_pretrained(folder)
    opened, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    for name, value in tensors_of(opened(**batch)).items():
        assert torch.equal(value, outputs[name]), name
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size < before, f"{size} of {before} bytes"  # of these sizes, names and scales are much of the file
    encoder = AutoModel.from_pretrained(folder)
    assert any(isinstance(module, Int8Linear | Int8Embedding) for module in encoder.modules())


def test_sizes() -> None:
    """Of shapes as they are used: a quarter; tied tables are stored once."""
    fields = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    for name, head, options in (
        ("bert", "AutoModelForMaskedLM", fields),
        ("ulmfit", "AutoModelForCausalLM", {"vocab_size": 9000}),
        ("elmo", "AutoModelForPreTraining", {}),
    ):
        family = FAMILIES[name]
        model = family.models[head](family.config(**(family.sizes["tiny"] | options)))
        before = export.stored_bytes(model)
        quantize_model(model, CtxInt8Config())
        assert 3.5 < before / export.stored_bytes(model) < 4, f"{name}: {before / export.stored_bytes(model)}"


@torch.no_grad()
def test_other_ways_to_open(tmp_path: Path) -> None:
    """A plain checkpoint is quantized when it is opened; a new head on a quantized encoder is in single precision;
    copies act as their model."""
    case = Case(FAMILIES["bert"], "AutoModel")
    plain, batch = case.model(), make_batch(case)
    plain.save_pretrained(tmp_path / "plain")
    opened = AutoModel.from_pretrained(tmp_path / "plain", quantization_config=CtxInt8Config())
    opened.save_pretrained(tmp_path / "int8")
    again = AutoModel.from_pretrained(tmp_path / "int8", dtype=torch.bfloat16)
    assert again.layers[0].feed_forward.up_proj.code_scale.dtype is torch.float32
    half = copy.deepcopy(plain).bfloat16()  # what has no codes is in single precision, whatever was asked for
    quantize_model(half, CtxInt8Config())
    expected = plain(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    for other in (half, again):
        states = other(**batch).last_hidden_state
        assert states.dtype is torch.float32
        assert F.cosine_similarity(states[real], expected[real], dim=-1).min() > 0.99
    reopened = AutoModel.from_pretrained(tmp_path / "int8")
    for other in (reopened, copy.deepcopy(opened)):
        assert torch.equal(other(**batch).last_hidden_state, opened(**batch).last_hidden_state)
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "int8", num_labels=40)
    assert isinstance(head.bert.layers[0].attention.qkv_proj, Int8Linear)
    assert type(head.classifier) is nn.Linear
    assert bool(head.classifier.weight.isfinite().all())


def test_errors_say_what_to_do(tmp_path: Path) -> None:
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
def test_many_rows_are_mapped_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with a scale for each token, which makes the rows independent; the values are the same as in one part."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    states = torch.randn(70, 16) * torch.logspace(-2, 1, 70)[:, None]
    for activations, in_parts in (("token", True), ("tensor", False)):
        model = CtxBertModel(CtxBertConfig(vocab_size=20, **sizes)).eval()
        quantize_model(model, CtxInt8Config(activations=activations))  # type: ignore[arg-type]
        network, parts = model.layers[0].feed_forward, list[int]()
        expected = network(states)
        monkeypatch.setattr(cpu_linear, "_CHUNK_ROWS", 32)
        compute = network.transform
        monkeypatch.setattr(
            network, "transform", lambda rows, compute=compute, parts=parts: parts.append(len(rows)) or compute(rows)
        )
        assert torch.equal(network(states), expected)
        assert parts == ([32, 32, 6] if in_parts else [70])
        monkeypatch.undo()


@as_subtests([*REPRESENTATIVES, Case(FAMILIES["word2vec"], "AutoModelForSequenceClassification")])
def test_no_code_is_trained(case: Case) -> None:
    """Training raises an error for every quantized model, also one with tables alone; without gradients it runs."""
    model, batch = case.model(), make_batch(case)
    quantize_model(model, CtxInt8Config())
    with pytest.raises(CtxError, match="cannot be trained"):
        model.train()(**batch, **make_targets(case, batch))
    with torch.no_grad():
        model(**batch)


@as_subtests([case for case in REPRESENTATIVES if case.is_seq2seq or case.has_choices])
@torch.no_grad()
def test_texts_alone_are_read_by_every_head(case: Case) -> None:
    """As a calibration gives them: with a target where one is written, and as a question's only choice."""
    batch, names = make_batch(case), ("input_ids", "attention_mask", "token_type_ids")
    texts = {name: batch[name] for name in names if name in batch}
    if case.has_choices:
        texts = {name: value.flatten(0, 1) for name, value in texts.items()}
    rows, length = texts["input_ids"].shape[:2]
    logits = case.model()(**inputs_for_texts(case.model(), texts)).logits
    assert logits.shape[:2] == ((rows, 1) if case.has_choices else (rows, length + 2))


def test_the_command(tmp_path: Path) -> None:
    """Static scales of a calibration, and errors of its flags."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    FAMILIES["bert"].tokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path)
    fields = {**FAMILIES["bert"].sizes["tiny"], "vocab_size": len(words), "initializer_range": 0.2}
    config = CtxBertConfig(**fields)
    CtxBertForSequenceClassification(config).save_pretrained(tmp_path)
    texts = tmp_path / "texts.txt"
    texts.write_text("a b c d\n" * 3, encoding="utf-8")
    output, static = tmp_path / "int8", f"static:file={texts}"
    flags = {"model": tmp_path, "output_dir": output}
    for wrong, message in (
        (static, "got 3"),
        ("static", "static needs file"),
        (f"token:file={texts}", "Unknown option 'file'"),
    ):
        assert message in command_output("export int8", **flags, activations=wrong, fails=True)
    texts.write_text("a b c d e\nf g h\n" * 10, encoding="utf-8")
    assert "times smaller" in command_output("export int8", **flags, activations=static, skip="pooler")
    assert json.loads((output / "config.json").read_text())["quantization_config"]["activations"] == "static"
    model = CtxBertForSequenceClassification.from_pretrained(tmp_path)
    opened = AutoModelForSequenceClassification.from_pretrained(output)
    batch = {"input_ids": torch.tensor([[2, 5, 6, 7, 3]])}
    assert F.cosine_similarity(opened(**batch).logits, model(**batch).logits).item() > 0.98
    assert isinstance(CtxBertModel.from_pretrained(output).layers[0].attention.qkv_proj.input_zero_point, Tensor)
    assert "already holds" in command_output("export int8", **flags, fails=True)
    FAMILIES["bert"].models["AutoModelForMultipleChoice"](config).save_pretrained(tmp_path)
    command_output("export int8", "--overwrite", **flags, activations=static)
    chooser = AutoModelForMultipleChoice.from_pretrained(output)
    assert float(chooser.bert.pooler.dense.input_scale) > 0
