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
PAGE = ROOT / "docs" / "how-to" / "export.md"
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "check_export.py"))
SEQUENCES, SEQ2SEQ = "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"
EXPORTED = ("bert", "roberta", "albert", "electra", "xlnet", "elmo", "ulmfit")
"""Families of the ordinary suite; the slow tests have all."""
SHARE = 1e-4
"""Largest difference of an output, as a share of its largest value."""


@pytest.fixture
def onnxruntime() -> None:
    """What the tests of ONNX need."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}, which the extra `onnx` brings")


@pytest.mark.parametrize("family", EXPORTED)
def test_programs_are_written_and_read_and_run_on_other_shapes(family: str, tmp_path: Path) -> None:
    model = SCRIPT["tiny_model"](FAMILIES[family], SEQUENCES)
    assert SCRIPT["check_program"](model, *SCRIPT["make_batches"](model), tmp_path) < SHARE


@pytest.mark.usefixtures("onnxruntime")
def test_onnxruntime_computes_the_same_on_other_shapes(tmp_path: Path) -> None:
    """For ELMo, whose recurrence is an operator of its own; the slow test has the other families."""
    model = SCRIPT["tiny_model"](FAMILIES["elmo"], SEQUENCES)
    assert SCRIPT["check_onnx"](model, *SCRIPT["make_batches"](model), tmp_path) < SHARE


def test_encoder_decoders_are_exported_whole_and_in_parts(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """BART's classifier makes the decoder's input of the encoder's, and reads a column; T5 has a bias."""
    for family, name, part in (("bart", SEQUENCES, "model"), ("mass", SEQ2SEQ, "model"), ("t5", SEQ2SEQ, "decoder")):
        with subtests.test(f"{family} {name} {part}"):
            model = SCRIPT["tiny_model"](FAMILIES[family], name)
            batches = SCRIPT["make_batches"](model, name, part)
            assert SCRIPT["check_program"](SCRIPT["PARTS"][part](model), *batches, tmp_path) < SHARE
            assert not {"cummax", "cummin"} & operators(tmp_path / "model.pt2"), "ONNX has no such operator"


def operators(program: Path) -> set[str]:
    """Names of the operators of a written program."""
    graph = torch.export.load(program).graph
    return {str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten.")}


@pytest.mark.slow
@pytest.mark.usefixtures("onnxruntime")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_the_table(family: str) -> None:
    """About ten seconds for each model."""
    for name, part in SCRIPT["export_cases"](FAMILIES[family]):
        result = SCRIPT["check"](FAMILIES[family], name, part, onnx=True)
        assert isinstance(result.program, float), result
        assert isinstance(result.onnx, float), result
        assert max(result.program, result.onnx) < SHARE, result


def test_a_program_with_plain_outputs_needs_torch_alone(tmp_path: Path) -> None:
    model = SCRIPT["tiny_model"](FAMILIES["elmo"], SEQUENCES)
    batch, _ = SCRIPT["make_batches"](model)
    program = torch.export.export(model, (), kwargs=batch | {"return_dict": False})
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save({"batch": batch, "logits": model(**batch).logits}, tmp_path / "batch.pt")
    code = """
import sys, torch
given = torch.load("batch.pt")
found = torch.export.load("model.pt2").module()(**given["batch"], return_dict=False)
torch.testing.assert_close(found[0], given["logits"])
assert not {"transformers", "hf_ctxmodels"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)


def examples() -> list[str]:
    """The Python code of the page: what needs torch alone, and what needs onnxruntime too."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)


def test_the_table_of_the_page_is_of_what_the_script_checks() -> None:
    rows = re.findall(r"^\| (\w+) \| `([\w.]+)` \| (\S+) \| (\S+) \|$", PAGE.read_text("utf-8"), re.M)
    checked = {
        (family, f"{spec.models[name].__name__}.{part}".removesuffix(".model"))
        for family, spec in FAMILIES.items()
        for name, part in SCRIPT["export_cases"](spec)
    }
    assert {row[:2] for row in rows} <= checked
    assert {row[0] for row in rows} == {*FAMILIES}
    assert all(float(share) < SHARE for row in rows for share in row[2:])


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the page assumes: a fine-tuned classifier, and a model for summaries."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    tokenizer = CtxBertTokenizer(vocab={word: number for number, word in enumerate(words)})
    torch.manual_seed(0)
    model = CtxBertForSequenceClassification(CtxBertConfig(**FAMILIES["bert"].sizes["tiny"], vocab_size=len(words)))
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "my-classifier")
    summarizer = FAMILIES["t5"].models[SEQ2SEQ](FAMILIES["t5"].config(**FAMILIES["t5"].sizes["tiny"], vocab_size=20))
    summarizer.save_pretrained(tmp_path / "my-summarizer")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("classifier")
def test_the_examples_of_torch_export_run() -> None:
    first, _, parts = examples()
    exec(compile(first + parts, str(PAGE), "exec"), {})


@pytest.mark.slow
@pytest.mark.usefixtures("classifier", "onnxruntime")
def test_all_examples_of_the_page_run() -> None:
    exec(compile("".join(examples()), str(PAGE), "exec"), {})
