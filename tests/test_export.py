"""`torch.export` and ONNX with dynamic batch size and length, and the examples of the how-to page."""

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
PAGE = ROOT / "docs" / "how-to" / "export.md"
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "check_export.py"))
SEQUENCES, SEQ2SEQ = "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"
# (family, head, part) with different graphs: attention with and without position bias, two streams, a recurrence, and
# a classifier that derives the decoder's inputs from the encoder's. The slow test covers all families.
EXPORTS = (
    ("bert", SEQUENCES, "model"),
    ("xlnet", SEQUENCES, "model"),
    ("ulmfit", SEQUENCES, "model"),
    ("bart", SEQUENCES, "model"),
    ("t5", SEQ2SEQ, "decoder"),
)
TOLERANCE = 1e-4  # largest difference of an output, relative to its largest value


@pytest.fixture
def onnxruntime() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}, which the extra `onnx` brings")


@pytest.mark.parametrize(("family", "head", "part"), EXPORTS)
def test_exported_program_runs_on_other_shapes(family: str, head: str, part: str, tmp_path: Path) -> None:
    model = SCRIPT["tiny_model"](FAMILIES[family], head)
    batches = SCRIPT["make_batches"](model, head, part)
    assert SCRIPT["check_program"](SCRIPT["PARTS"][part](model), *batches, tmp_path) < TOLERANCE
    assert not {"cummax", "cummin"} & operators(tmp_path / "model.pt2"), "ONNX has no such operator"


def operators(program: Path) -> set[str]:
    """Names of the ATen operators of a saved program."""
    graph = torch.export.load(program).graph
    return {str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten.")}


@pytest.mark.slow
@pytest.mark.usefixtures("onnxruntime")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_models_of_a_family(family: str) -> None:
    """About ten seconds for each model."""
    for name, part in SCRIPT["export_cases"](FAMILIES[family]):
        result = SCRIPT["check"](FAMILIES[family], name, part, onnx=True)
        assert isinstance(result.program, float), result
        assert isinstance(result.onnx, float), result
        assert max(result.program, result.onnx) < TOLERANCE, result


def test_exported_program_needs_only_torch(tmp_path: Path) -> None:
    model = SCRIPT["tiny_model"](FAMILIES["elmo"], SEQUENCES)
    batch, _ = SCRIPT["make_batches"](model)
    program = torch.export.export(model, (), kwargs=batch | {"return_dict": False})
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save({"batch": batch, "logits": model(**batch).logits}, tmp_path / "batch.pt")
    code = """
import sys, torch
reference = torch.load("batch.pt")
outputs = torch.export.load("model.pt2").module()(**reference["batch"], return_dict=False)
torch.testing.assert_close(outputs[0], reference["logits"])
assert not {"transformers", "hf_ctxmodels"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


def examples() -> list[str]:
    """Python blocks of the page: export to torch, ONNX, and an encoder-decoder in two parts."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)


def test_table_of_the_page_lists_cases_of_the_script() -> None:
    rows = re.findall(r"^\| (\w+) \| `([\w.]+)` \| (\S+) \| (\S+) \|$", PAGE.read_text("utf-8"), re.M)
    checked = {
        (family, f"{spec.models[name].__name__}.{part}".removesuffix(".model"))
        for family, spec in FAMILIES.items()
        for name, part in SCRIPT["export_cases"](spec)
    }
    assert {row[:2] for row in rows} <= checked
    assert {row[0] for row in rows} == {*FAMILIES}
    assert all(float(difference) < TOLERANCE for row in rows for difference in row[2:])


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Working directory with what the page assumes: a fine-tuned classifier and a summarization model."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    tokenizer = CtxBertTokenizer(vocab={word: number for number, word in enumerate(words)})
    torch.manual_seed(0)
    model = CtxBertForSequenceClassification(CtxBertConfig(**FAMILIES["bert"].sizes["tiny"], vocab_size=len(words)))
    tokenizer.save_pretrained(tmp_path / "my-classifier")
    model.save_pretrained(tmp_path / "my-classifier")
    summarizer = FAMILIES["t5"].models[SEQ2SEQ](FAMILIES["t5"].config(**FAMILIES["t5"].sizes["tiny"], vocab_size=20))
    summarizer.save_pretrained(tmp_path / "my-summarizer")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("classifier")
def test_torch_export_examples_run() -> None:
    torch_export, _, encoder_decoder = examples()
    exec(compile(torch_export + encoder_decoder, str(PAGE), "exec"), {})


@pytest.mark.slow
@pytest.mark.usefixtures("classifier", "onnxruntime")
def test_all_examples_run() -> None:
    exec(compile("".join(examples()), str(PAGE), "exec"), {})
