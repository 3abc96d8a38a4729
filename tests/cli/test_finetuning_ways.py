"""Fine-tuning methods, `evaluate pretraining` and `forgetting`, and scripts/compare_finetuning.py."""

import json
import sys
from pathlib import Path
from typing import Any

import compare_finetuning
import numpy as np
import pytest
import torch
from commands import command_output, flag_list, run_command, save, tiny_pair
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from zoo import tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.downstream.adapters import add_adapter, set_active_adapters
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation, distances, measure_forgetting
from hf_ctxmodels.registry import FAMILIES

GOOD, BAD, OTHERS = ["lovely", "great"], ["awful", "boring"], ["the", "film", "was", "a", "story", "in"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A masked language model and a causal one with their heads, a text, and labeled sentences."""
    folder = tmp_path_factory.mktemp("methods")
    sentences = [f"the {a} was {b} in a {c}." for a in ("film", "story") for b in GOOD + BAD for c in ("film", "story")]
    (folder / "text.txt").write_text("\n\n".join("\n".join(sentences[start:]) for start in range(8)) + "\n")
    for name, auto_class in (("bert", "AutoModelForMaskedLM"), ("gpt", "AutoModelForCausalLM")):
        text = " ".join([*GOOD, *BAD, *OTHERS, "."])
        save(folder / name, *tiny_pair(name, auto_class, [text], vocab_size=120, initializer_range=0.1))
    rows = [f"the film was {word}\t{'good' if word in GOOD else 'bad'}" for word in (GOOD + BAD) * 4]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    return folder


def flags_of(folder: Path, output: Path, model: str = "bert") -> list[object]:
    files = ["--train_file", folder / "train.tsv", "--validation_file", folder / "dev.tsv"]
    quick = ["--max_length", 16, "--max_steps", 8, "--per_device_batch_size", 4, "--learning_rate", 1e-3]
    task = ["sequence-classification", "--model", folder / model]
    return [*task, *files, *quick, "--logging_steps", 1, "--save_steps", 4, "--output_dir", output]


METHODS = {
    "frozen": "--freeze encoder:cache_features=cache --config_options layer_mix=true",
    "gradual": "--freeze gradual",
    "chain": "--freeze chain:head_rate=1e-2,rate=1e-3",
    "stages": "--freeze three-stage:layers_epoch=0.5,embeddings_epoch=1",
    "l2": "--anchor l2:weight=1,head_weight=0.1 --gradient_accumulation_steps 2",
    "ewc": "--anchor ewc:weight=100,file=fisher.safetensors,text=TEXT,examples=6",
    "mixout": "--anchor mixout:probability=0.5",
    "reinitialized": "--reinit 1 pooler",
    "disabled": "--disabled_heads 0:1",
}


def test_methods(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, subtests: Any) -> None:
    """Each method trains, and saves a plain checkpoint."""
    monkeypatch.chdir(tmp_path)
    start = load_file(folder / "bert" / "model.safetensors")
    distances_from_start = {}
    for name, flags in {"plain": "", **METHODS}.items():
        with subtests.test(name):
            words = flags.replace("TEXT", str(folder / "text.txt")).split()
            output = tmp_path / name
            assert run_command("finetune", *flags_of(folder, output), *words) == 0, capsys.readouterr().err
            shown = capsys.readouterr().err
            model = AutoModelForSequenceClassification.from_pretrained(output)
            weights = model.state_dict()
            moved = {key for key, value in start.items() if key in weights and not torch.equal(weights[key], value)}
            assert bool(moved) == (name != "frozen")
            assert (model.layer_mix is not None) == (name == "frozen")
            shares = json.loads((output / "training_summary.json").read_text())["layer_shares"]
            assert [*shares] == (["layer_mix"] if name == "frozen" else [])
            assert all(sum(values) == pytest.approx(1) for values in shares.values())
            distances_from_start[name] = sum(
                float((weights[key] - start[key]).square().sum()) for key in start if key in weights
            )
            log = (output / "training_log.jsonl").read_text()
            assert ("anchor_loss" in log) == (name in ("l2", "ewc"))
            assert name != "reinitialized" or "re-initialized" in shown
            assert name != "ewc" or "computing the Fisher information" in shown
            columns = weights["bert.layers.0.attention.out_proj.weight"].unflatten(
                1, (model.config.num_attention_heads, -1)
            )
            assert [not bool(columns[:, head].any()) for head in (0, 1)] == [False, name == "disabled"]
    assert distances_from_start["l2"] < 0.9 * distances_from_start["plain"]
    assert distances_from_start["ewc"] < 0.99 * distances_from_start["plain"]
    # GPT has three more tokens in tasks; re-initialized layers are not anchored
    words = METHODS["ewc"].replace("fisher.", "gpt.").replace("TEXT", str(folder / "text.txt")).split()
    new = [*flags_of(folder, tmp_path / "gpt", "gpt"), *words, "--max_steps", 1, "--reinit", 1]
    assert run_command("finetune", *new) == 0, capsys.readouterr().err
    assert "the embeddings of 3 new tokens are initialized" in capsys.readouterr().err

    words = f"{METHODS['ewc'].replace('TEXT', 'another.txt')} --max_steps 1".split()
    assert run_command("finetune", *flags_of(folder, tmp_path / "same"), *words) == 0
    assert "examples 6, labels sampled" in capsys.readouterr().err

    # an earlier task's head of the same shape is loaded with a notice, unless it is re-initialized
    for more, text in (([], "the head is loaded from"), (["--reinit", "head"], "weights of the head")):
        again = [*flags_of(folder, tmp_path / f"again{len(more)}"), "--max_steps", 1, "--model", tmp_path / "plain"]
        assert run_command("finetune", *again, *more) == 0
        assert text in capsys.readouterr().err
    for flags, text in (
        ("--anchor ewc:file=none.safetensors", "no such file of Fisher information"),
        ("--anchor ewc", "ewc needs file"),
        ("--anchor l2:text=x", "Unknown option 'text'"),
        ("--anchor ewcs", "did you mean ewc?"),
        ("--freeze encoder --anchor l2", "A frozen encoder is not trained"),
        ("--freeze encoder --reinit 1", "A frozen encoder is not trained"),
        ("--adapter houlsby --reinit 1", "--adapter cannot be combined with --reinit"),
        ("--freeze encoder --layerwise_lr_decay 2.6", "--layerwise_lr_decay 1"),
        ("--family bert:tokenizer=x", "--family cannot be combined with --model"),
        ("--reinit 99", "layers with weights of their own"),
        ("--disabled_heads 9:0", "no attention in a layer '9'"),
        ("--disabled_heads 0-1", "does not select heads"),
        ("--freeze chain:rate=fast", "invalid float value 'fast'"),
        ("--quantize q-bert:groups=3", "q-bert needs bits"),
        ("--tokenizer elsewhere", "Unknown flag --tokenizer"),
        ("--anchr l2", "did you mean --anchor?"),
    ):
        assert run_command("finetune", *flags_of(folder, tmp_path / "wrong"), *flags.split()) == 2
        assert text in capsys.readouterr().err, flags
    resumed = flags_of(folder, tmp_path / "l2")
    changes = ["--anchor", "l2:weight=2,head_weight=0.1", "--gradient_accumulation_steps", "2"]
    assert run_command("finetune", *resumed, *changes, "--resume") == 2
    assert "anchor.weight is 2.0, was 1.0" in capsys.readouterr().err


def test_forgetting(folder: Path, tmp_path: Path) -> None:
    """An unchanged encoder has the same loss; a changed one has the loss of the pretraining head on it."""
    source, tokenizer = folder / "bert", AutoTokenizer.from_pretrained(folder / "bert")
    same = AutoModelForSequenceClassification.from_pretrained(source)
    other = AutoModelForSequenceClassification.from_pretrained(source)
    with torch.no_grad():
        other.bert.layers[1].feed_forward.up_proj.weight[:, 0].add_(0.5)
    loss = {}
    text, file = folder / "text.txt", tmp_path / "results.json"
    for name, model in (("same", same), ("other", other)):
        flags = {"pretrained": source, "finetuned": save(tmp_path / name, model, tokenizer), "text": text}
        shown = command_output("evaluate forgetting", "--overwrite", **flags, output_file=file)
        results = json.loads(file.read_text())
        loss[name] = results["after"]["eval_loss"]
        assert f"{results['before']['eval_loss']:>12.4f}{loss[name]:>12.4f}  lower is better" in shown
        assert (results["before"] == results["after"]) == (name == "same")
    size = other.bert.layers[1].feed_forward.up_proj.weight.shape[0]
    moved = results["distances"]
    assert moved["all"]["distance"] == pytest.approx(0.5 * size**0.5, rel=1e-5)
    assert moved["layers.1"]["distance"] == moved["all"]["distance"]
    assert moved["layers.0"] == {"distance": 0.0, "relative": 0.0}
    norm = sum(float(weight.double().square().sum()) for weight in same.bert.layers[1].parameters()) ** 0.5
    assert moved["layers.1"]["relative"] == pytest.approx(0.5 * size**0.5 / norm, rel=1e-5)
    pair = tiny_config(FAMILIES["t5"])  # the layers of each stack, in the order of application
    start = {name: weight.detach() for name, weight in FAMILIES["t5"].models["AutoModel"](pair).named_parameters()}
    now = {name: weight + ("decoder.layers.1" in name) for name, weight in start.items()}
    parts = distances(start, now)
    layers = [f"{stack}.layers.{number}" for stack in ("encoder", "decoder") for number in range(3)]
    assert list(parts) == ["other", *layers, "all"]
    assert [name for name, part in parts.items() if part["distance"]] == ["decoder.layers.1", "all"]
    whole = AutoModelForMaskedLM.from_pretrained(source)
    whole.bert.load_state_dict(other.bert.state_dict(), strict=False)
    evaluation = PretrainingEvaluation.open(str(source), str(text))
    evaluation.model = whole.eval()
    assert evaluation.loss()["eval_loss"] == pytest.approx(loss["other"], rel=1e-6)

    with_pooler = AutoModelForPreTraining.from_pretrained(source)
    without = AutoModelForSequenceClassification.from_pretrained(source, classifier_pooling="mean")
    assert without.bert.pooler is None
    evaluation = PretrainingEvaluation.open(str(save(tmp_path / "with", with_pooler, tokenizer)), str(text))
    results = measure_forgetting(evaluation, str(save(tmp_path / "without", without, tokenizer)))
    assert results["before"] == results["after"]
    assert results["distances"]["all"]["distance"] == 0

    adapted = AutoModelForSequenceClassification.from_pretrained(source)
    add_adapter(adapted, "task", "pfeiffer")
    set_active_adapters(adapted, ["task"])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".adapters." in name:
                weight.normal_()
    evaluation = PretrainingEvaluation.open(str(source), str(text))
    results = measure_forgetting(evaluation, str(save(tmp_path / "adapted", adapted, tokenizer)))
    assert abs(results["after"]["eval_loss"] - results["before"]["eval_loss"]) > 0.1
    assert results["distances"]["all"]["distance"] == 0

    deeper = tiny_config(FAMILIES["bert"], vocab_size=len(tokenizer), num_hidden_layers=len(same.bert.layers) + 1)
    type(same.bert)(deeper).save_pretrained(tmp_path / "deeper")
    quantize_model(other, CtxInt8Config())
    other.save_pretrained(tmp_path / "int8")
    for pretrained, finetuned, message in (
        (tmp_path / "other", source, "lacks its pretraining head"),
        (source, folder / "gpt", "of different models"),
        (source, tmp_path / "deeper", "only one of them has layers."),
        (source, tmp_path / "int8", "weights of a quantized model is undefined"),
    ):
        flags = {"pretrained": pretrained, "finetuned": finetuned, "text": text}
        assert message in command_output("evaluate forgetting", **flags, fails=True)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_pair_tasks_of_a_pretrained_model(family: str, tmp_path: Path) -> None:
    """A model that always predicts class 0 is right for coherent pairs, whatever the task it was trained on."""
    (tmp_path / "text.txt").write_text(
        "\n\n".join("\n".join(f"w{n} cat w{n + k}" for k in range(20)) for n in range(8))
    )
    texts = (tmp_path / "text.txt").read_text().split("\n")
    model, tokenizer = tiny_pair(family, "AutoModelForPreTraining", texts)
    head = model.nsp_head if family == "bert" else model.sop_head
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1.0, 0.0]))
    source = save(tmp_path / "model", model, tokenizer)
    flags = {"model": source, "text": tmp_path / "text.txt", "max_length": 24}
    default = command_output("evaluate pretraining", **flags)
    own, other = ("next", "order") if family == "bert" else ("order", "next")
    assert default == command_output("evaluate pretraining", **flags, objective_options=f"sentence_task={own}")
    for task in (own, other):
        shown = command_output("evaluate pretraining", **flags, objective_options=f"sentence_task={task}")
        (line,) = (line.split() for line in shown.splitlines() if "accuracy" in line and "sentence" in line)
        options = {"sentence_task": task}
        evaluation = PretrainingEvaluation.open(str(source), flags["text"], max_length=24, options=options)
        labels = [row[evaluation.objective.label] for row in evaluation.examples]
        expected = np.mean([label == 0 for label in labels if label != -100])
        assert 0.3 < expected < 0.7
        assert float(line[1]) == pytest.approx(expected, abs=1e-4)
    wrong = {"objective_options": "sentence_task=both"}
    assert "sentence_task" in command_output("evaluate pretraining", **flags, **wrong, fails=True)


def test_comparison(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Each method has its own runs; finished runs are used again."""

    def stage(command: str, *flags: object) -> None:
        ran.append(command)
        assert run_command(*command.split(), *flags) == 0

    ran: list[str] = []
    monkeypatch.setattr("compare_finetuning.run_command", stage)
    flags = {"model": folder / "bert", "train_file": folder / "train.tsv", "validation_file": folder / "dev.tsv"}
    flags |= {"text": folder / "text.txt", "seeds": 2, "output_dir": tmp_path}
    flags["flags"] = "--num_train_epochs 1 --per_device_batch_size 4 --max_length 16"

    def compare(frozen: str) -> int:
        argv = ["compare_finetuning.py", *flag_list(**flags, methods=["plain", f"frozen: {frozen}"])]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stopped:
            run_script(compare_finetuning.main)
        return int(stopped.value.code or 0)

    for _ in range(2):
        assert compare("--freeze encoder") == 0
        assert len(ran) == 8
    assert compare("--anchor mixout:probability=0.5") == 2
    assert "written by another command line" in capsys.readouterr().err
    record = json.loads((tmp_path / "methods.json").read_text())
    assert record["methods"] == {"plain": [], "frozen": ["--freeze", "encoder"]}
    frozen, first = record["results"]["frozen"], record["results"]["plain"]
    assert [run["distance"] for run in frozen] == [0.0, 0.0]
    assert all(run["loss after"] == run["loss before"] for run in frozen)
    assert all(run["distance"] > 0 and run["loss after"] != run["loss before"] for run in first)
    rows = (tmp_path / "methods.md").read_text().splitlines()
    assert rows[0] == "| method | accuracy | loss before | loss after | distance |"
    mean = sum(run["distance"] for run in first) / 2
    spread = abs(first[0]["distance"] - first[1]["distance"]) / 2**0.5
    assert rows[2].endswith(f"| {mean:.4f} ± {spread:.4f} |")
    with pytest.raises(CtxError, match="no unique name"):
        compare_finetuning.parse_methods(["a", "a: --anchor mixout:probability=0.1"])
