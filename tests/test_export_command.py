"""`hf-ctxmodels export`: what was written computes the same, with weights of few bits too, or is an error."""

import string
import sys
from pathlib import Path

import pytest
import torch

from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification, CtxBertTokenizer, CtxError
from hf_ctxmodels.commands import export
from hf_ctxmodels.inference import exporting
from hf_ctxmodels.layers.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.layers.low_bits.quantizer import packed_model, quantizable, train_with_bits
from hf_ctxmodels.registry import FAMILIES


def classifier(kind: str, folder: Path) -> CtxBertForSequenceClassification:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    CtxBertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = FAMILIES["bert"].sizes["tiny"] | {"initializer_range": 0.2, "num_hidden_layers": 1}
    model = CtxBertForSequenceClassification(CtxBertConfig(**sizes, vocab_size=len(words))).eval()
    if kind == "low bits":
        train_with_bits(model, dict.fromkeys(quantizable(model)[0], 3), 8)
        model = packed_model(model)
    elif kind != "float32":
        quantize_model(model, CtxInt8Config(activations=kind))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model


def test_programs(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says how far it is off, and the file gives the model's outputs; what differs is not written."""
    for number, kind in enumerate(("float32", "token", "low bits", "tensor")):
        folder = tmp_path / str(number)
        model, file = classifier(kind, folder), folder / "model.pt2"
        flags = ["export", "--model", str(folder), "--format", "torch", "--output", str(file)]
        monkeypatch.setattr(sys, "argv", flags)
        with subtests.test(kind=kind):
            if kind == "tensor":
                with pytest.raises(CtxError, match="not in a graph"):
                    export.main()
                continue
            export.main()
            assert "largest difference" in capsys.readouterr().out
            batch = {name: torch.ones(2, 7, dtype=torch.long) for name in ("input_ids", "attention_mask")}
            batch["token_type_ids"] = torch.zeros(2, 7, dtype=torch.long)
            found = torch.export.load(file).module()(**batch).logits
            torch.testing.assert_close(found, model(**batch).logits, rtol=1e-4, atol=1e-4)
            with pytest.raises(CtxError, match="file exists"):
                export.main()
            if kind == "float32":
                monkeypatch.setattr(sys, "argv", [*flags[:-1], str(folder / "other.pt2")])
                monkeypatch.setattr(exporting, "LARGEST_DIFFERENCE", -1.0)
                with pytest.raises(CtxError, match="differs from the model"):
                    export.main()
                assert not (folder / "other.pt2").exists()
                monkeypatch.setattr(exporting, "LARGEST_DIFFERENCE", 1e-4)


def test_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model with weights of 8 bits, which stay 8 bits in the file."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}, which the extra `onnx` brings")
    import onnx

    classifier("token", tmp_path)
    file = tmp_path / "model.onnx"
    monkeypatch.setattr(sys, "argv", ["export", "--model", str(tmp_path), "--output", str(file)])
    export.main()
    assert "largest difference" in capsys.readouterr().out
    kinds = [each.data_type for each in onnx.load(file, load_external_data=False).graph.initializer]
    assert kinds.count(onnx.TensorProto.INT8) >= 4
