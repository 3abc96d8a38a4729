"""`torch.export` and ONNX with a dynamic batch and length, for encoders and heads; and the how-to page's examples."""

import re
import runpy
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification, CtxBertTokenizer
from hf_ctxmodels.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "check_export.py"))
HEADS = ("AutoModel", "AutoModelForSequenceClassification")


@pytest.fixture
def onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}, which the extra `onnx` brings")


@pytest.mark.parametrize("family", SCRIPT["CHECKED"])
def test_programs_are_written_and_read_and_run_on_other_shapes(family: str) -> None:
    results = [SCRIPT["check"](FAMILIES[family], name, onnx=False) for name in HEADS]
    assert all(isinstance(each.exported, float) and each.exported < 1e-5 for each in results), results
