r"""Run models of this package with the tools around it, and write a table of what works.

    pip install 'hf_ctxmodels[ecosystem]'
    python scripts/check_ecosystem.py [--only TEXT] [--output docs/ecosystem.md]

Every check trains, exports, adapts, quantizes or explains a small model, and compares what comes out. One whose package
is not installed is skipped and says so. Exits with 1 if a check fails.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

import hf_ctxmodels
from hf_ctxmodels import CtxBertConfig, CtxBertTokenizer

ROOT = Path(__file__).parents[1]
TEXTS = ["a cat sat on the mat", "the dog ran to the river", "rain fell on the old bridge", "nobody saw a boat"]
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        tool: What is checked.
        packages: What it needs; their versions are in the table.
        run: Takes the workplace and returns a note, empty for none; raises if something does not work.
    """

    tool: str
    packages: tuple[str, ...]
    run: Callable[["Workplace"], str]


CHECKS: list[Check] = []


def check(tool: str, *packages: str) -> Callable[[Callable[["Workplace"], str]], Callable[["Workplace"], str]]:
    """Enter a function as a row."""

    def enter(run: Callable[["Workplace"], str]) -> Callable[["Workplace"], str]:
        CHECKS.append(Check(tool, packages, run))
        return run

    return enter


class Workplace:
    """A folder with a tokenizer and small saved models, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = CtxBertTokenizer.train(TEXTS * 3, vocab_size=120)

    def save(self, auto_class: Any, **fields: Any) -> str:
        """The directory of a saved BERT with this head."""
        directory = self.folder / auto_class.__name__
        if not directory.exists():
            torch.manual_seed(0)
            config = CtxBertConfig(vocab_size=len(self.tokenizer), initializer_range=0.1, **SHAPE, **fields)
            auto_class.from_config(config).save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)
        return str(directory)

    def classifier(self) -> Any:
        """A classifier of two classes, in evaluation mode."""
        directory = self.save(AutoModelForSequenceClassification)
        return AutoModelForSequenceClassification.from_pretrained(directory).eval()

    def batch(self, texts: Sequence[str] = TEXTS) -> dict[str, Tensor]:
        """The tokenized texts."""
        return dict(self.tokenizer(list(texts), padding=True, return_tensors="pt"))

    def launch(self, *arguments: str) -> str:
        """What a Python process of its own prints.

        Raises:
            RuntimeError: It failed; the end of what it printed.
        """
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        return done.stdout

    def pretrain(self, config_file: str, *arguments: str) -> None:
        """A short distributed run of `pretrain`, whose model opens afterwards."""
        tokenizer = self.save(AutoModelForMaskedLM)
        text, output = self.folder / "text.txt", self.folder / config_file.removesuffix(".yaml")
        text.write_text("\n\n".join(TEXTS * 20), encoding="utf-8")
        launcher = ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "scripts/accelerate" / config_file))
        sizes = ("--family", "bert", "--config", "tiny", "--max_length", "32", "--max_steps", "4")
        paths = ("--dataset", str(text), "--tokenizer", tokenizer, "--output_dir", str(output))
        self.launch(*launcher, *arguments, "-m", "hf_ctxmodels", "pretrain", *sizes, *paths)
        AutoModel.from_pretrained(output)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Raise AssertionError unless equal within the tolerance."""
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@check("transformers Trainer", "transformers")
def trainer(place: Workplace) -> str:
    """Training, evaluation with metrics and resume."""
    from transformers import Trainer, TrainingArguments

    rows = [{**place.tokenizer(text), "labels": number % 2} for number, text in enumerate(TEXTS * 4)]
    output = str(place.folder / "trainer")
    options = {"output_dir": output, "max_steps": 4, "save_steps": 2, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(**options, per_device_train_batch_size=4, disable_tqdm=True)
    made = Trainer(
        place.classifier(), arguments, train_dataset=rows, eval_dataset=rows, processing_class=place.tokenizer
    )
    made.train()
    assert "eval_loss" in made.evaluate()
    assert made.train(resume_from_checkpoint=True).global_step == 4
    return "several-term heads under accumulation: `CtxTrainer`"


@check("Accelerate, DDP", "accelerate")
def ddp(place: Workplace) -> str:
    """Two processes on the CPU."""
    place.pretrain("ddp_cpu.yaml")
    return ""


@check("Accelerate, FSDP2", "accelerate")
def fsdp2(place: Workplace) -> str:
    """Two processes on the CPU."""
    place.pretrain("fsdp2.yaml", "--num_processes", "2", "--mixed_precision", "no")
    return ""


@check("PEFT", "peft")
def peft(place: Workplace) -> str:
    """LoRA with the default target modules: training, merging, saving."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(place.classifier(), LoraConfig(task_type="SEQ_CLS"))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(**place.batch(), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        optimizer.step()
    model.eval()
    expected = model(**place.batch()).logits
    model.save_pretrained(str(place.folder / "adapter"))
    again = PeftModel.from_pretrained(place.classifier(), place.folder / "adapter").eval()
    assert_close(again(**place.batch()).logits, expected)
    assert_close(again.merge_and_unload()(**place.batch()).logits, expected)
    return "default target modules are registered"


@check("sentence-transformers", "sentence-transformers")
def sentence_transformers(place: Workplace) -> str:
    """Encoding of sentences by a saved encoder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    directory = place.save(AutoModel)
    word = Transformer(directory)
    encoder = SentenceTransformer(modules=[word, Pooling(word.get_embedding_dimension())], device="cpu")
    vectors = torch.from_numpy(encoder.encode(TEXTS))
    batch = place.batch()
    with torch.no_grad():
        states = AutoModel.from_pretrained(directory).eval()(**batch).last_hidden_state
    tokens = batch["attention_mask"][..., None]
    assert_close(vectors, (states * tokens).sum(1) / tokens.sum(1))
    return ""


@check("lm-evaluation-harness", "lm-eval")
def lm_eval(place: Workplace) -> str:
    """Its own `hf` model on a local task, in a process that does not import this package."""
    from hf_ctxmodels import CtxUlmfitConfig, CtxUlmfitForCausalLM, CtxUlmfitTokenizer

    tokenizer = CtxUlmfitTokenizer.train(TEXTS * 3, vocab_size=60)
    config = CtxUlmfitConfig(vocab_size=len(tokenizer), hidden_size=32, cell_size=32, num_hidden_layers=2)
    directory, task = place.folder / "causal", place.folder / "task"
    CtxUlmfitForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    task.mkdir()
    (task / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    (task / "local.yaml").write_text(
        "task: local_text\ndataset_path: json\noutput_type: loglikelihood\n"
        f"dataset_kwargs: {{data_files: {{test: {task / 'rows.jsonl'}}}}}\ntest_split: test\n"
        'doc_to_text: "{{text.split()[0]}}"\ndoc_to_target: "{{text.split()[1]}}"\n'
        "metric_list: [{metric: acc}, {metric: perplexity}]\n",
        encoding="utf-8",
    )
    model = f"pretrained={directory},trust_remote_code=True,dtype=float32,max_length=64"
    run = ("-m", "lm_eval", "--model", "hf", "--model_args", model, "--include_path", str(task))
    assert "local_text" in place.launch(*run, "--tasks", "local_text", "--device", "cpu", "--batch_size", "2")
    return "`trust_remote_code=True`"


@check("torch.compile", "torch")
def compiled(place: Workplace) -> str:
    """One graph."""
    model = place.classifier()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(**place.batch()).logits, model(**place.batch()).logits)
    return "compiled graphs compute padding"


def _dynamic(batch: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    return {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in batch}


@check("torch.export", "torch")
def exported(place: Workplace) -> str:
    """At another number of rows and columns."""
    model, batch, other = place.classifier(), place.batch(), place.batch(["a boat", "the old dog saw the rain"])
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=batch, dynamic_shapes=_dynamic(batch))
        run: Any = program.module()
        assert_close(run(**other).logits, model(**other).logits)
    return "dynamic batch and length"


@check("ONNX", "onnx", "onnxscript", "onnxruntime")
def onnx(place: Workplace) -> str:
    """At another number of rows and columns."""
    import onnxruntime

    model, batch, other = place.classifier(), place.batch(), place.batch(["a boat", "the old dog saw the rain"])
    file = place.folder / "model.onnx"
    shapes = {name: {0: "batch", 1: "length"} for name in batch}
    torch.onnx.export(
        model, kwargs=batch, f=file, dynamo=True, dynamic_shapes=shapes, output_names=["logits"], verbose=False
    )
    session = onnxruntime.InferenceSession(file)
    given = {each.name: other[each.name].numpy() for each in session.get_inputs()}
    with torch.no_grad():
        assert_close(torch.from_numpy(session.run(["logits"], given)[0]), model(**other).logits)
    return "dynamic batch and length"


def _quantized(place: Workplace, model: nn.Module, kinds: tuple[str, ...]) -> None:
    """Outputs near those of the model in single precision, and as many quantized maps as it has linear ones."""
    plain = place.classifier()
    maps = sum(type(module) is nn.Linear for module in plain.modules())
    found = sum(
        type(module).__name__ in kinds or type(getattr(module, "weight", None)).__name__ in kinds
        for module in model.modules()
    )
    assert found >= maps - 1, f"{found} of {maps} linear maps are quantized"
    with torch.no_grad():
        assert_close(model(**place.batch()).logits.float(), plain(**place.batch()).logits, 0.1)


@check("torch.ao quantize_dynamic", "torch")
def quantize_dynamic(place: Workplace) -> str:
    """int8 on the CPU."""
    quantized = torch.ao.quantization.quantize_dynamic(place.classifier(), {nn.Linear}, dtype=torch.qint8)
    _quantized(place, quantized, ("Linear", "DynamicQuantizedLinear"))
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    return ""


@check("torchao", "torchao")
def torchao(place: Workplace) -> str:
    """int8 weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = place.classifier()
    quantize_(model, Int8WeightOnlyConfig())
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(type(weight) is not nn.Parameter or hasattr(weight, "qdata") for weight in weights)
    with torch.no_grad():
        assert_close(model(**place.batch()).logits, place.classifier()(**place.batch()).logits, 0.1)
    return "`quantize_`, int8 weights"


@check("bitsandbytes", "bitsandbytes")
def bitsandbytes(place: Workplace) -> str:
    """4-bit weights by `from_pretrained`."""
    from transformers import BitsAndBytesConfig

    directory = place.save(AutoModelForSequenceClassification)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"quantization_config": quantization, "device_map": "cpu"}
    model = AutoModelForSequenceClassification.from_pretrained(directory, **options)
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    with torch.no_grad():
        assert model(**place.batch()).logits.isfinite().all()
    return "4-bit weights on a CPU"


@check("captum", "captum")
def captum(place: Workplace) -> str:
    """Integrated gradients of the embeddings add up to the difference of the logits."""
    from captum.attr import LayerIntegratedGradients

    model, batch = place.classifier(), place.batch(TEXTS[:1])
    ids = batch.pop("input_ids")
    baseline = torch.full_like(ids, place.tokenizer.pad_token_id)
    with hf_ctxmodels.inspecting(model):
        forward = lambda given: model(given, **batch).logits[:, 0]  # noqa: E731
        explain = LayerIntegratedGradients(forward, model.get_input_embeddings())
        attributions = explain.attribute(ids, baseline, n_steps=200)
        difference = forward(ids) - forward(baseline)
    assert_close(attributions.sum((1, 2)).float(), difference.detach(), 0.02)
    return "within `inspecting(model)`"


@check("bertviz", "bertviz")
def bertviz(place: Workplace) -> str:
    """A view of the heads."""
    from bertviz import head_view

    model, batch = AutoModel.from_pretrained(place.save(AutoModel)).eval(), place.batch(TEXTS[:1])
    with hf_ctxmodels.inspecting(model), torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    tokens = place.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert "svg" in head_view(attentions, tokens, html_action="return").data
    return "within `inspecting(model)`"


@check("pipelines", "transformers")
def pipelines(place: Workplace) -> str:
    """Of transformers."""
    from transformers import pipeline

    assert pipeline("text-classification", model=place.save(AutoModelForSequenceClassification))(TEXTS)[0]["label"]
    assert pipeline("fill-mask", model=place.save(AutoModelForMaskedLM))("the [MASK] ran")[0]["token_str"]
    assert len(pipeline("feature-extraction", model=place.save(AutoModel))(TEXTS[0])[0]) > 4
    return ""


@check("trust_remote_code", "transformers")
def trust_remote_code(place: Workplace) -> str:
    """A process that does not import this package."""
    directory = place.save(AutoModelForSequenceClassification)
    code = (
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        f"model = AutoModelForSequenceClassification.from_pretrained({directory!r}, trust_remote_code=True)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({directory!r}, trust_remote_code=True)\n"
        f"print(model.eval()(**tokenizer({TEXTS[0]!r}, return_tensors='pt')).logits.tolist())"
    )
    with torch.no_grad():
        expected = place.classifier()(**place.batch(TEXTS[:1])).logits
    assert_close(torch.tensor(json.loads(place.launch("-c", code).splitlines()[-1])), expected)
    return "the package must be installed, not imported"


def run(one: Check, place: Workplace) -> tuple[str, str]:
    """The outcome and a note of one check."""
    missing = [name for name in one.packages if not _version(name)]
    if missing:
        return "not run", f"{', '.join(missing)} is not installed"
    try:
        note = one.run(place)
    except Exception as error:  # whatever a tool raises is a row of the table
        traceback.print_exc()
        return "fails", f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
    return "works", note


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Run the checks, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Run the checks with this text in the tool's name.")
    parser.add_argument("--output", type=Path, help="Markdown file to write the table to.")
    arguments = parser.parse_args()
    importlib.import_module("transformers").logging.set_verbosity_error()
    lines = ["| tool | versions | result | note |", "|---|---|---|---|"]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder))
        for one in CHECKS:
            if arguments.only.lower() not in one.tool.lower():
                continue
            outcome, note = run(one, place)
            outcomes.append(outcome)
            versions = ", ".join(f"{name} {_version(name)}" for name in one.packages if _version(name))
            lines.append(f"| {one.tool} | {versions} | {outcome} | {note} |")
            print(lines[-1], flush=True)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if "fails" in outcomes:
        sys.exit(1)


if __name__ == "__main__":
    main()
