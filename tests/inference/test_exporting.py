"""Export to a full disk; `tests/test_export.py` tests exported models."""

import resource
from pathlib import Path

import pytest
import torch
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference.exporting import export_model
from hf_ctxmodels.registry import FAMILIES


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
