"""Example batches, packages and full disks; `tests/test_export.py` tests exported models."""

import resource
import shutil
from pathlib import Path

import pytest
import torch
from commands import tiny_pair
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import exporting
from hf_ctxmodels.inference.exporting import example_batches, export_model
from hf_ctxmodels.registry import FAMILIES


def test_only_whole_encoder_decoders_have_decoder_inputs() -> None:
    """Encoders, and the encoder of an encoder-decoder, have none."""
    for family, auto_class, part, expected in (
        ("t5", "AutoModelForSeq2SeqLM", "model", True),
        ("t5", "AutoModelForSeq2SeqLM", "decoder", True),
        ("t5", "AutoModelForSeq2SeqLM", "encoder", False),
        ("bert", "AutoModel", "model", False),
    ):
        model, tokenizer = tiny_pair(family, auto_class, ["the cat sat on the mat"])
        for batch in example_batches(tokenizer, model, part):
            assert ("decoder_input_ids" in batch) == expected, (family, part)


def test_packages_of_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    packages: list[tuple[str, ...]] = []
    monkeypatch.setattr(exporting, "require_packages", lambda *names, **_: packages.append(names))
    for format, file in (("torch", "a.pt2"), ("onnx", "a.onnx"), ("openvino", "a.xml")):
        exporting.check_export_file(file, format)
    assert packages == [("onnx", "onnxscript", "onnxruntime"), ("onnx", "onnxscript", "openvino")]


def test_weights_replace_old_files_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted export leaves no model without its weights."""

    def write(model: torch.nn.Module, batch: exporting.Batch, file: Path) -> exporting.Run:
        for path in (file, Path(f"{file}.data")):
            path.write_text("new")
        return lambda batch: []

    def replace(path: Path, target: Path) -> None:
        if target.suffix == ".onnx":
            raise KeyboardInterrupt
        shutil.move(path, target)

    monkeypatch.setattr(exporting, "require_packages", lambda *names, **_: None)
    monkeypatch.setitem(exporting.WRITERS, "onnx", write)
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        export_model(Case(FAMILIES["bert"], "AutoModel").model(), [{}], tmp_path / "model.onnx", "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx.data"]


@pytest.mark.parametrize(
    ("format", "suffix"), [("torch", ".pt2"), pytest.param("onnx", ".onnx", marks=pytest.mark.slow)]
)
def test_export_to_full_disk_raises(format: str, suffix: str, tmp_path: Path) -> None:
    """torch's own writer would abort the process."""
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"needs {package}, which the extra `onnx` brings")
    batches = [
        {"input_ids": torch.full(shape, 5), "attention_mask": torch.ones(shape, dtype=torch.long)}
        for shape in ((3, 7), (2, 4))
    ]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CtxError, match="Writing failed"):
            export_model(Case(FAMILIES["bert"], "AutoModel").model(), batches, tmp_path / f"model{suffix}", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []
