"""`hf-ctxmodels export`: exported models equal the original, also with quantized weights."""

import math
import string
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification, CtxBertTokenizer, CtxError
from hf_ctxmodels.cli import export
from hf_ctxmodels.compression.int8.modules import HAS_INT8_PRODUCT
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.compression.low_bits.quantizer import (
    find_quantizable_modules,
    pack_model,
    replace_with_fake_quantized,
)
from hf_ctxmodels.inference import exporting
from hf_ctxmodels.registry import FAMILIES


def classifier(kind: str, folder: Path, layers: int = 1) -> CtxBertForSequenceClassification:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    CtxBertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    # fewer positions than tokens in the example texts
    changes = {"initializer_range": 0.2, "num_hidden_layers": layers, "max_position_embeddings": 20}
    sizes = FAMILIES["bert"].sizes["tiny"] | changes
    model = CtxBertForSequenceClassification(CtxBertConfig(**sizes, vocab_size=len(words))).eval()
    if kind == "low bits":
        replace_with_fake_quantized(model, dict.fromkeys(find_quantizable_modules(model)[0], 3), 8)
        model = pack_model(model)
    elif kind != "float32":
        quantize_model(model, CtxInt8Config(activations=kind))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model


def test_programs(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the difference of the outputs, and writes no file if it is large."""
    for number, kind in enumerate(("float32", "token", "low bits", "tensor")):
        folder = tmp_path / str(number)
        model, file = classifier(kind, folder), folder / "model.pt2"
        flags = ["export torch", "--model", str(folder), "--output", str(file)]
        monkeypatch.setattr(sys, "argv", flags)
        with subtests.test(kind=kind):
            if kind == "tensor":
                with pytest.raises(CtxError, match=r"scale per tensor have no graph(.|\n)*--activations token"):
                    export.graph("torch")
                continue
            export.graph("torch")
            assert "largest difference" in capsys.readouterr().out
            batch = {name: torch.ones(2, 7, dtype=torch.long) for name in ("input_ids", "attention_mask")}
            batch["token_type_ids"] = torch.zeros(2, 7, dtype=torch.long)
            logits = torch.export.load(file).module()(**batch).logits
            with exporting._FloatProducts() if kind == "token" else nullcontext():
                torch.testing.assert_close(logits, model(**batch).logits, rtol=1e-4, atol=1e-4)
            with pytest.raises(CtxError, match="file exists"):
                export.graph("torch")
            if kind == "float32":
                monkeypatch.setattr(sys, "argv", [*flags[:-1], str(folder / "other.pt2")])
                monkeypatch.setattr(exporting, "MAX_RELATIVE_DIFFERENCE", -1.0)
                with pytest.raises(CtxError, match=r"differs by .*; no file was saved"):
                    export.graph("torch")
                assert not (folder / "other.pt2").exists()
                monkeypatch.setattr(exporting, "MAX_RELATIVE_DIFFERENCE", 1e-4)
                monkeypatch.setattr(exporting, "write_program", with_nan(exporting.write_program))
                with pytest.raises(CtxError, match="differs by inf"):
                    export.graph("torch")
                assert not (folder / "other.pt2").exists()
                monkeypatch.undo()


def test_comparison_of_int8_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast products differ in the last digit, so that some inputs of later layers have another int8 code."""
    model = classifier("token", tmp_path, layers=4)
    batches = exporting.example_batches(AutoTokenizer.from_pretrained(tmp_path), model)
    with torch.no_grad(), monkeypatch.context() as without:
        without.setattr("hf_ctxmodels.compression.int8.modules.HAS_INT8_PRODUCT", False)
        slow = [model(**batch).logits for batch in batches]
    with torch.no_grad():
        fast = [model(**batch).logits for batch in batches]
        if HAS_INT8_PRODUCT:
            assert max(float((one - other).abs().max()) for one, other in zip(slow, fast, strict=True)) > 1e-3
        outputs = iter(slow)
        assert exporting.max_relative_difference(model, lambda batch: [next(outputs)], batches) < 1e-6


def with_nan(write: Callable[..., exporting.Run]) -> Callable[..., exporting.Run]:
    """Wraps a writer; the first output for the last batch, a single example, is NaN."""

    def broken(*arguments: Any) -> exporting.Run:
        run = write(*arguments)

        def run_once(batch: exporting.Batch) -> list[Tensor]:
            outputs = [output.clone() for output in run(batch)]
            if len(outputs[0]) == 1:
                outputs[0][0, 0] = math.nan
            return outputs

        return run_once

    return broken


def test_onnx(subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 8 and of 3 bits keep their types in the file."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}, which the extra `onnx` brings")
    import onnx

    for kind, stored in (("token", onnx.TensorProto.INT8), ("low bits", onnx.TensorProto.UINT8)):
        with subtests.test(kind=kind):
            folder = tmp_path / kind
            classifier(kind, folder)
            export_by_command(monkeypatch, "onnx", "--model", folder, "--output", folder / "model.onnx")
            graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
            types = [tensor.data_type for tensor in graph.initializer]
            assert types.count(stored) >= 3, types  # the exporter folds small constants


def test_encoder_decoders(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Encoder and decoder together equal the whole model, for other batch sizes, lengths and steps; models without a
    separable decoder are refused."""
    family = FAMILIES["bart"]
    tokenizer = family.tokenizer.train([" ".join(exporting._WORDS)] * 20, vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = family.sizes["tiny"] | {"num_hidden_layers": 1, "vocab_size": len(tokenizer), "initializer_range": 0.2}
    model = family.models["AutoModelForSeq2SeqLM"](family.config(**sizes)).eval()
    model.save_pretrained(tmp_path)
    onnx = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    for part, form in (("encoder", "torch"), ("decoder", "torch"), ("model", "onnx" if onnx else "torch")):
        with subtests.test(part=part, form=form):
            file = tmp_path / f"{part}.{'pt2' if form == 'torch' else form}"
            flags = ["--model", tmp_path, "--part", part, "--output", file]
            export_by_command(monkeypatch, form, *flags)  # compares the outputs of file and model
            assert ("decoder_input_ids" in capsys.readouterr().out) == (part != "encoder")
    encoder, decoder = (torch.export.load(tmp_path / f"{part}.pt2").module() for part in ("encoder", "decoder"))
    text = {"input_ids": torch.randint(5, 20, (4, 6)), "attention_mask": torch.ones(4, 6, dtype=torch.long)}
    text["attention_mask"][1, 2:] = 0
    target = torch.randint(5, 20, (4, 13))
    expected = model(**text, decoder_input_ids=target).logits
    states = encoder(**text).last_hidden_state
    parts = {"encoder_hidden_states": states, "attention_mask": text["attention_mask"], "decoder_input_ids": target}
    torch.testing.assert_close(decoder(**parts)["logits"], expected, rtol=1e-4, atol=1e-4)
    classifier("float32", tmp_path / "encoder")
    unilm = FAMILIES["unilm"]
    generator = unilm.models["AutoModelForSeq2SeqLM"](unilm.config(**unilm.sizes["tiny"]))
    with pytest.raises(CtxError, match=r"needs more inputs than the encoder's states(.|\n)*--part decoder"):
        exporting.check_exportable_as(generator, tmp_path / "x.pt2", "torch", "decoder")
    with pytest.raises(CtxError, match="no generating decoder"):
        export_by_command(
            monkeypatch, "onnx", "--model", tmp_path / "encoder", "--part", "encoder", "--output", tmp_path / "x"
        )


def export_by_command(monkeypatch: pytest.MonkeyPatch, form: str, *flags: object) -> None:
    monkeypatch.setattr(sys, "argv", ["export", *map(str, flags)])
    export.graph(form)
