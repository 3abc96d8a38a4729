"""`torch.export` and ONNX with dynamic shapes, the examples of the how-to page, and `hf-ctxmodels export`."""

import math
import re
import runpy
import string
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import command_output, run_command
from fork_server import ForkServer
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    MT5Config,
    MT5EncoderModel,
    MT5ForConditionalGeneration,
    PreTrainedModel,
)

from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification, CtxBertTokenizer, CtxError
from hf_ctxmodels.compression.int8.modules import HAS_INT8_PRODUCT
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.compression.low_bits.quantizer import (
    find_quantizable_modules,
    pack_model,
    replace_with_fake_quantized,
)
from hf_ctxmodels.core.output_files import TOKENIZER_FILES
from hf_ctxmodels.downstream.adapters import add_adapter, add_fusion, set_active_adapters
from hf_ctxmodels.inference import exporting
from hf_ctxmodels.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "export.md"
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "check_export.py"))
SEQUENCES, SEQ2SEQ = "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"
slow = partial(pytest.param, marks=pytest.mark.slow)
# (family, head, part) with different graphs: attention with and without position bias, two streams, a recurrence, and
# a classifier that derives the decoder's inputs from the encoder's. The slow test covers all families.
EXPORTS = [
    ("bert", SEQUENCES, "model"),
    *(slow(family, SEQUENCES, "model") for family in ("ulmfit", "xlnet", "bart")),
    slow("t5", SEQ2SEQ, "decoder"),
]
SMALL_T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
SMALL_BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
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


def test_model_with_a_fusion_of_adapters_is_exported(tmp_path: Path) -> None:
    """torch separates the module names of a program by commas, which the name of a fusion contains."""
    model = SCRIPT["tiny_model"](FAMILIES["bert"], SEQUENCES)
    for name in ("polarity", "rating"):
        add_adapter(model, name, "pfeiffer")
    add_fusion(model, ["polarity", "rating"])
    set_active_adapters(model, [["polarity", "rating"]])
    batches = SCRIPT["make_batches"](model, SEQUENCES, "model")
    assert SCRIPT["check_program"](model, *batches, tmp_path) < TOLERANCE


def operators(program: Path) -> set[str]:
    """Names of the ATen operators of a saved program."""
    graph = torch.export.load(program).graph
    return {str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten.")}


@pytest.mark.slow
@pytest.mark.usefixtures("onnxruntime")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_models_are_exported(family: str) -> None:
    """About ten seconds per model."""
    for name, part in SCRIPT["export_cases"](FAMILIES[family]):
        result = SCRIPT["check"](FAMILIES[family], name, part, onnx=True)
        assert isinstance(result.program, float), result
        assert isinstance(result.onnx, float), result
        assert max(result.program, result.onnx) < TOLERANCE, result


@pytest.mark.slow
def test_exported_program_needs_only_torch(tmp_path: Path) -> None:
    model = SCRIPT["tiny_model"](FAMILIES["infersent"], SEQUENCES)
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


def test_page_table_matches_script_cases() -> None:
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
def page_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Working directory with the models that the page assumes: a classifier and a summarizer."""
    save_classifier("float32", tmp_path / "my-classifier", max_position_embeddings=512)
    summarizer = FAMILIES["t5"].models[SEQ2SEQ](FAMILIES["t5"].config(**FAMILIES["t5"].sizes["tiny"], vocab_size=20))
    summarizer.save_pretrained(tmp_path / "my-summarizer")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("page_workspace")
def test_torch_export_examples_run() -> None:
    torch_export, _, encoder_decoder = examples()
    exec(compile(torch_export + encoder_decoder, str(PAGE), "exec"), {})


@pytest.mark.slow
@pytest.mark.usefixtures("page_workspace", "onnxruntime")
def test_all_page_examples_run() -> None:
    exec(compile("".join(examples()), str(PAGE), "exec"), {})


def save_classifier(precision: str, folder: Path, **overrides: int) -> CtxBertForSequenceClassification:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    CtxBertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    # fewer positions than tokens in the example texts
    fields = {"initializer_range": 0.2, "num_hidden_layers": 1, "max_position_embeddings": 20, **overrides}
    sizes = FAMILIES["bert"].sizes["tiny"] | fields
    model = CtxBertForSequenceClassification(CtxBertConfig(**sizes, vocab_size=len(words))).eval()
    if precision == "low bits":
        replace_with_fake_quantized(model, dict.fromkeys(find_quantizable_modules(model)[0], 3), 8)
        model = pack_model(model)
    elif precision != "float32":
        quantize_model(model, CtxInt8Config(activations=precision))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("precision", ["float32", "tensor", *(slow(precision) for precision in ("token", "low bits"))])
def test_export_command_output_equals_model(precision: str, tmp_path: Path) -> None:
    """The command reports the largest difference of the outputs."""
    model, file = save_classifier(precision, tmp_path), tmp_path / "model.pt2"
    flags = {"model": tmp_path, "output": file}
    if precision == "tensor":
        error = command_output("export torch", **flags, fails=True)
        assert re.search(r"scale per tensor have no graph(.|\n)*--activations token", error)
        return
    assert "largest difference" in command_output("export torch", **flags)
    batch = {name: torch.ones(2, 7, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["token_type_ids"] = torch.zeros(2, 7, dtype=torch.long)
    logits = torch.export.load(file).module()(**batch).logits
    with exporting._FloatProducts() if precision == "token" else nullcontext():
        torch.testing.assert_close(logits, model(**batch).logits, rtol=1e-4, atol=1e-4)
    assert "file exists" in command_output("export torch", **flags, fails=True)


@pytest.mark.parametrize(
    ("error", "message"), [(0.01, r"differs by 1\.\de-02 .*; no file was saved"), (math.nan, "inf")]
)
def test_differing_outputs_are_not_saved(
    error: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output of the last batch, which has a single example, differs or is NaN."""

    def write_program(model: torch.nn.Module, batch: exporting.Batch, file: Path) -> exporting.Run:
        def run(inputs: exporting.Batch) -> list[Tensor]:
            logits = model(**inputs).logits
            return [logits + error * logits.abs().max() * (len(logits) == 1)]

        return run

    monkeypatch.setitem(exporting.WRITERS, "torch", write_program)
    save_classifier("float32", tmp_path)
    flags = {"model": tmp_path, "output": tmp_path / "model.pt2"}
    assert re.search(message, command_output("export torch", **flags, fails=True))
    assert not (tmp_path / "model.pt2").exists()


def test_int8_comparison_excludes_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The int8 kernel differs in the last digit, so some activations of later layers get another int8 code."""
    model = save_classifier("token", tmp_path, num_hidden_layers=4)
    batches = exporting.example_batches(AutoTokenizer.from_pretrained(tmp_path), model)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr("hf_ctxmodels.compression.int8.modules.HAS_INT8_PRODUCT", False)
        expected = [model(**batch).logits for batch in batches]
    with torch.no_grad():
        actual = [model(**batch).logits for batch in batches]
        if HAS_INT8_PRODUCT:
            assert max(float((x - y).abs().max()) for x, y in zip(expected, actual, strict=True)) > 1e-3
        outputs = iter(expected)
        assert exporting.max_relative_difference(model, lambda batch: [next(outputs)], batches) < 1e-6


@pytest.mark.usefixtures("onnxruntime")
@pytest.mark.parametrize(("precision", "type_name"), [("token", "INT8"), slow("low bits", "UINT8")])
def test_quantized_weight_types_in_onnx(precision: str, type_name: str, tmp_path: Path) -> None:
    """Weights of 8 and 3 bits are stored as integers."""
    import onnx

    save_classifier(precision, tmp_path)
    command_output("export onnx", model=tmp_path, output=tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    types = [tensor.data_type for tensor in graph.initializer]
    assert types.count(getattr(onnx.TensorProto, type_name)) >= 3, types  # the exporter folds small constants


@pytest.mark.slow
@pytest.mark.usefixtures("onnxruntime")
@pytest.mark.parametrize("family", ["bert", "xlnet", "bart", "elmo"])
def test_openvino_export(family: str, tmp_path: Path) -> None:
    """Outputs for other shapes are compared before the model and its weights are written."""
    pytest.importorskip("openvino", reason="needs openvino, which the extra `openvino` brings")
    model = SCRIPT["tiny_model"](FAMILIES[family], SEQUENCES)
    example, other_batches = SCRIPT["make_batches"](model, SEQUENCES, "model")
    assert exporting.export_model(model, [example, *other_batches], tmp_path / "model.xml", "openvino") < TOLERANCE
    assert {path.name for path in tmp_path.iterdir()} == {"model.xml", "model.bin"}


@pytest.mark.slow
def test_separate_encoder_and_decoder_equal_model(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """For other batch sizes, lengths and numbers of steps."""
    family = FAMILIES["bart"]
    tokenizer = family.tokenizer.train([" ".join(exporting._WORDS)] * 20, vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = family.sizes["tiny"] | {"num_hidden_layers": 1, "vocab_size": len(tokenizer), "initializer_range": 0.2}
    model = family.models["AutoModelForSeq2SeqLM"](family.config(**sizes)).eval()
    model.save_pretrained(tmp_path)
    onnx = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    for part, backend in (("encoder", "torch"), ("decoder", "torch"), ("model", "onnx" if onnx else "torch")):
        with subtests.test(part=part, form=backend):
            file = tmp_path / f"{part}.{'pt2' if backend == 'torch' else backend}"
            output = command_output(f"export {backend}", model=tmp_path, part=part, output=file)  # compares the outputs
            assert ("decoder_input_ids" in output) == (part != "encoder")
    encoder, decoder = (torch.export.load(tmp_path / f"{part}.pt2").module() for part in ("encoder", "decoder"))
    source = {"input_ids": torch.randint(5, 20, (4, 6)), "attention_mask": torch.ones(4, 6, dtype=torch.long)}
    source["attention_mask"][1, 2:] = 0
    target = torch.randint(5, 20, (4, 13))
    expected = model(**source, decoder_input_ids=target).logits
    states = encoder(**source).last_hidden_state
    inputs = {"encoder_hidden_states": states, "attention_mask": source["attention_mask"], "decoder_input_ids": target}
    torch.testing.assert_close(decoder(**inputs)["logits"], expected, rtol=1e-4, atol=1e-4)


def test_models_without_separable_decoder_raise(tmp_path: Path) -> None:
    save_classifier("float32", tmp_path / "encoder")
    unilm = FAMILIES["unilm"]
    generator = unilm.models["AutoModelForSeq2SeqLM"](unilm.config(**unilm.sizes["tiny"]))
    with pytest.raises(CtxError, match=r"needs more inputs than the encoder's states(.|\n)*--part decoder"):
        exporting.check_exportable_as(generator, tmp_path / "x.pt2", "torch", "decoder")
    flags = {"model": tmp_path / "encoder", "part": "encoder", "output": tmp_path / "x"}
    assert "no generating decoder" in command_output("export onnx", **flags, fails=True)


def test_encoder_of_a_model_without_head(tmp_path: Path) -> None:
    family = FAMILIES["t5"]
    model = family.models["AutoModel"](family.config(**family.sizes["tiny"])).eval()
    tokenizer = family.tokenizer.train([" ".join(exporting._WORDS)] * 20, vocab_size=300)
    batches = exporting.example_batches(tokenizer, model, "encoder")
    exporting.export_model(model, batches, tmp_path / "encoder.pt2", "torch", "encoder")  # compares the outputs
    encoder = torch.export.load(tmp_path / "encoder.pt2").module()
    is_token = batches[1]["attention_mask"].bool()
    expected = model(**batches[1]).encoder_last_hidden_state[is_token]
    torch.testing.assert_close(encoder(**batches[1]).last_hidden_state[is_token], expected, rtol=1e-4, atol=1e-4)


def test_export_to_transformers(process_without_package: ForkServer, tmp_path: Path) -> None:
    """The transformers class has the same outputs; a model without such a class is rejected."""
    save_classifier("float32", tmp_path / "model")
    flags = {"model": tmp_path / "model", "output_dir": tmp_path / "exported"}
    assert "as BertForSequenceClassification" in command_output("export transformers", **flags)
    program = """
import sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
print(type(model).__name__, *model.eval()(**tokenizer("one two", return_tensors="pt")).logits[0].tolist(), sep="\\n")
"""
    result = process_without_package.run("-c", program, tmp_path / "exported")
    assert result.returncode == 0, result.stderr
    name, *logits = result.stdout.split("\n")[:-1]
    assert name == "BertForSequenceClassification"
    model = CtxBertForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = model(**tokenizer("one two", return_tensors="pt")).logits[0]
    torch.testing.assert_close(torch.tensor(list(map(float, logits))), expected, rtol=1e-5, atol=1e-5)
    exported_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported_tokenizer.model_max_length == model.config.max_sequence_length < tokenizer.model_max_length
    assert "already holds" in command_output("export transformers", **flags, fails=True)
    FAMILIES["mass"].models["AutoModel"](FAMILIES["mass"].config(**FAMILIES["mass"].sizes["tiny"])).save_pretrained(
        tmp_path / "mass"
    )
    flags = {"model": tmp_path / "mass", "output_dir": tmp_path / "no"}
    assert "transformers has no class for CtxMassModel" in command_output("export transformers", **flags, fails=True)


@pytest.mark.parametrize(
    ("reference", "architecture"),
    [
        (MT5ForConditionalGeneration(MT5Config(**SMALL_T5)), "T5ForConditionalGeneration"),
        (MT5EncoderModel(MT5Config(**SMALL_T5)), "T5EncoderModel"),
        (BertModel(BertConfig(**SMALL_BERT), add_pooling_layer=False), "BertModel"),
    ],
    ids=["mT5", "mT5 encoder", "encoder without pooler"],
)
def test_export_of_reference_checkpoint(reference: PreTrainedModel, architecture: str, tmp_path: Path) -> None:
    """The checkpoint of a class, or of a related class, is exported with its weights; a lacking head is an error."""
    reference.eval().save_pretrained(tmp_path / "reference")
    flags = {"model": tmp_path / "reference", "output_dir": tmp_path / "exported"}
    assert f"as {architecture}" in command_output("export transformers", **flags)
    options = {"add_pooling_layer": False} if architecture == "BertModel" else {}
    exported = getattr(transformers, architecture).from_pretrained(tmp_path / "exported", **options).eval()
    ids = torch.arange(3, 12)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if "Generation" in architecture else {})
    with torch.no_grad():
        torch.testing.assert_close(exported(**inputs)[0], reference(**inputs)[0], rtol=1e-5, atol=1e-5)
    if architecture == "BertModel":
        assert not any("pooler" in name for name in load_file(tmp_path / "exported" / "model.safetensors"))
        config = tmp_path / "reference" / "config.json"
        config.write_text(config.read_text().replace("BertModel", "BertForTokenClassification"))
        error = command_output("export transformers", "--overwrite", **flags, fails=True)
        assert "lacks 2 weights of CtxBertForTokenClassification" in error


def test_export_to_transformers_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_classifier("float32", tmp_path / "model")
    for file in TOKENIZER_FILES:
        (tmp_path / "model" / file).unlink(missing_ok=True)
    flags = {"model": tmp_path / "model", "output_dir": tmp_path / "exported"}
    assert run_command("export", "transformers", **flags) == 0
    assert "The tokenizer is not saved" in capsys.readouterr().err
    assert not (tmp_path / "exported" / "tokenizer.json").exists()  # transformers would save an empty one
    flags["output_dir"] = tmp_path / "model"
    assert "directory of the model" in command_output("export transformers", "--overwrite", **flags, fails=True)


def test_export_to_transformers_rejects_adapters(tmp_path: Path) -> None:
    save_classifier("float32", tmp_path / "model")
    model = CtxBertForSequenceClassification.from_pretrained(tmp_path / "model")
    add_adapter(model, "polarity", "pfeiffer")
    set_active_adapters(model, "polarity")
    model.save_pretrained(tmp_path / "model")
    flags = {"model": tmp_path / "model", "output_dir": tmp_path / "exported"}
    assert "The model has adapters" in command_output("export transformers", **flags, fails=True)
