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
    """A masked and a causal language model, a text, and labeled sentences."""
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


def make_flags(folder: Path, output_dir: Path, model: str = "bert") -> list[object]:
    files = ["--train_file", folder / "train.tsv", "--validation_file", folder / "dev.tsv"]
    loop = ["--max_length", 16, "--max_steps", 8, "--per_device_batch_size", 4, "--learning_rate", 1e-3]
    task = ["sequence-classification", "--model", folder / model]
    return [*task, *files, *loop, "--logging_steps", 1, "--save_steps", 4, "--output_dir", output_dir]


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


@pytest.mark.slow
def test_finetuning_methods(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, subtests: Any) -> None:
    """Each method trains, and saves an ordinary checkpoint."""
    monkeypatch.chdir(tmp_path)
    initial = load_file(folder / "bert" / "model.safetensors")
    distances_from_start = {}
    for name, flags in {"plain": "", **METHODS}.items():
        with subtests.test(name):
            args = flags.replace("TEXT", str(folder / "text.txt")).split()
            output = tmp_path / name
            assert run_command("finetune", *make_flags(folder, output), *args) == 0, capsys.readouterr().err
            stderr = capsys.readouterr().err
            model = AutoModelForSequenceClassification.from_pretrained(output)
            weights = model.state_dict()
            changed = {key for key, value in initial.items() if key in weights and not torch.equal(weights[key], value)}
            assert bool(changed) == (name != "frozen")
            assert (model.layer_mix is not None) == (name == "frozen")
            shares = json.loads((output / "training_summary.json").read_text())["layer_shares"]
            assert [*shares] == (["layer_mix"] if name == "frozen" else [])
            assert all(sum(values) == pytest.approx(1) for values in shares.values())
            distances_from_start[name] = sum(
                float((weights[key] - initial[key]).square().sum()) for key in initial if key in weights
            )
            log = (output / "training_log.jsonl").read_text()
            assert ("anchor_loss" in log) == (name in ("l2", "ewc"))
            assert name != "reinitialized" or "re-initialized" in stderr
            assert name != "ewc" or "computing the Fisher information" in stderr
            columns = weights["bert.layers.0.attention.out_proj.weight"].unflatten(
                1, (model.config.num_attention_heads, -1)
            )
            assert [not bool(columns[:, head].any()) for head in (0, 1)] == [False, name == "disabled"]
    assert distances_from_start["l2"] < 0.9 * distances_from_start["plain"]
    assert distances_from_start["ewc"] < 0.99 * distances_from_start["plain"]
    # GPT adds three tokens for tasks; re-initialized layers are not anchored
    args = METHODS["ewc"].replace("fisher.", "gpt.").replace("TEXT", str(folder / "text.txt")).split()
    gpt_args = [*make_flags(folder, tmp_path / "gpt", "gpt"), *args, "--max_steps", 1, "--reinit", 1]
    assert run_command("finetune", *gpt_args) == 0, capsys.readouterr().err
    assert "the embeddings of 3 new tokens are initialized" in capsys.readouterr().err

    args = f"{METHODS['ewc'].replace('TEXT', 'another.txt')} --max_steps 1".split()
    assert run_command("finetune", *make_flags(folder, tmp_path / "same"), *args) == 0
    assert "examples 6, labels sampled" in capsys.readouterr().err

    # an earlier task's head of the same shape is loaded with a notice, unless it is re-initialized
    for reinit, message in (([], "the head is loaded from"), (["--reinit", "head"], "weights of the head")):
        rerun = [*make_flags(folder, tmp_path / f"again{len(reinit)}"), "--max_steps", 1, "--model", tmp_path / "plain"]
        assert run_command("finetune", *rerun, *reinit) == 0
        assert message in capsys.readouterr().err
    resume_args = make_flags(folder, tmp_path / "l2")
    changes = ["--anchor", "l2:weight=2,head_weight=0.1", "--gradient_accumulation_steps", "2"]
    assert run_command("finetune", *resume_args, *changes, "--resume") == 2
    assert "anchor.weight is 2.0, was 1.0" in capsys.readouterr().err


def test_invalid_method_flags(folder: Path, tmp_path: Path, capsys: Any) -> None:
    for flags, message in (
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
        assert run_command("finetune", *make_flags(folder, tmp_path / "wrong"), *flags.split()) == 2
        assert message in capsys.readouterr().err, flags


def test_evaluate_forgetting(folder: Path, tmp_path: Path) -> None:
    """An unchanged encoder has the same loss; a changed one has the loss of the pretraining head on top of it."""
    source, tokenizer = folder / "bert", AutoTokenizer.from_pretrained(folder / "bert")
    unchanged = AutoModelForSequenceClassification.from_pretrained(source)
    changed = AutoModelForSequenceClassification.from_pretrained(source)
    with torch.no_grad():
        changed.bert.layers[1].feed_forward.up_proj.weight[:, 0].add_(0.5)
    loss = {}
    text, file = folder / "text.txt", tmp_path / "results.json"
    for name, model in (("same", unchanged), ("other", changed)):
        flags = {"pretrained": source, "finetuned": save(tmp_path / name, model, tokenizer), "text": text}
        printed = command_output("evaluate forgetting", "--overwrite", **flags, output_file=file)
        results = json.loads(file.read_text())
        loss[name] = results["after"]["eval_loss"]
        assert f"{results['before']['eval_loss']:>12.4f}{loss[name]:>12.4f}  lower is better" in printed
        assert (results["before"] == results["after"]) == (name == "same")
    size = changed.bert.layers[1].feed_forward.up_proj.weight.shape[0]
    moved = results["distances"]
    assert moved["all"]["distance"] == pytest.approx(0.5 * size**0.5, rel=1e-5)
    assert moved["layers.1"]["distance"] == moved["all"]["distance"]
    assert moved["layers.0"] == {"distance": 0.0, "relative": 0.0}
    norm = sum(float(weight.double().square().sum()) for weight in unchanged.bert.layers[1].parameters()) ** 0.5
    assert moved["layers.1"]["relative"] == pytest.approx(0.5 * size**0.5 / norm, rel=1e-5)
    t5 = tiny_config(FAMILIES["t5"])  # layers of each stack, in the order of application
    initial = {name: weight.detach() for name, weight in FAMILIES["t5"].models["AutoModel"](t5).named_parameters()}
    shifted = {name: weight + ("decoder.layers.1" in name) for name, weight in initial.items()}
    by_layer = distances(initial, shifted)
    layers = [f"{stack}.layers.{number}" for stack in ("encoder", "decoder") for number in range(3)]
    assert list(by_layer) == ["other", *layers, "all"]
    assert [name for name, shift in by_layer.items() if shift["distance"]] == ["decoder.layers.1", "all"]
    masked_lm = AutoModelForMaskedLM.from_pretrained(source)
    masked_lm.bert.load_state_dict(changed.bert.state_dict(), strict=False)
    evaluation = PretrainingEvaluation.open(str(source), str(text))
    evaluation.model = masked_lm.eval()
    assert evaluation.loss()["eval_loss"] == pytest.approx(loss["other"], rel=1e-6)

    with_pooler = AutoModelForPreTraining.from_pretrained(source)
    without_pooler = AutoModelForSequenceClassification.from_pretrained(source, classifier_pooling="mean")
    assert without_pooler.bert.pooler is None
    evaluation = PretrainingEvaluation.open(str(save(tmp_path / "with", with_pooler, tokenizer)), str(text))
    results = measure_forgetting(evaluation, str(save(tmp_path / "without", without_pooler, tokenizer)))
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

    deeper = tiny_config(FAMILIES["bert"], vocab_size=len(tokenizer), num_hidden_layers=len(unchanged.bert.layers) + 1)
    type(unchanged.bert)(deeper).save_pretrained(tmp_path / "deeper")
    quantize_model(changed, CtxInt8Config())
    changed.save_pretrained(tmp_path / "int8")
    for pretrained, finetuned, message in (
        (tmp_path / "other", source, "lacks its pretraining head"),
        (source, folder / "gpt", "of different models: CtxBertConfig and CtxGptConfig"),
        (source, tmp_path / "deeper", "only one of them has layers."),
        (source, tmp_path / "int8", "weights of a quantized model is undefined"),
    ):
        flags = {"pretrained": pretrained, "finetuned": finetuned, "text": text}
        assert message in command_output("evaluate forgetting", **flags, fails=True)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_evaluate_pretraining_of_sentence_pair_tasks(family: str, tmp_path: Path) -> None:
    """The accuracy of always predicting class 0 is the share of coherent pairs in both sentence tasks."""
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
    trained_task, other_task = ("next", "order") if family == "bert" else ("order", "next")
    assert default == command_output("evaluate pretraining", **flags, objective_options=f"sentence_task={trained_task}")
    for task in (trained_task, other_task):
        printed = command_output("evaluate pretraining", **flags, objective_options=f"sentence_task={task}")
        (line,) = (line.split() for line in printed.splitlines() if "accuracy" in line and "sentence" in line)
        options = {"sentence_task": task}
        evaluation = PretrainingEvaluation.open(str(source), flags["text"], max_length=24, options=options)
        labels = [row[evaluation.objective.label] for row in evaluation.examples]
        expected = np.mean([label == 0 for label in labels if label != -100])
        assert 0.3 < expected < 0.7
        assert float(line[1]) == pytest.approx(expected, abs=1e-4)
    invalid = {"objective_options": "sentence_task=both"}
    assert "sentence_task" in command_output("evaluate pretraining", **flags, **invalid, fails=True)


@pytest.mark.slow
def test_compare_finetuning_script(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Each method has its runs; finished runs are reused."""

    def record_and_run(command: str, *flags: object) -> None:
        commands.append(command)
        assert run_command(*command.split(), *flags) == 0

    commands: list[str] = []
    monkeypatch.setattr("compare_finetuning.run_command", record_and_run)
    flags = {"model": folder / "bert", "train_file": folder / "train.tsv", "validation_file": folder / "dev.tsv"}
    flags |= {"text": folder / "text.txt", "seeds": 2, "output_dir": tmp_path}
    flags["flags"] = "--num_train_epochs 1 --per_device_batch_size 4 --max_length 16"

    def compare(frozen: str) -> int:
        argv = ["compare_finetuning.py", *flag_list(**flags, methods=["plain", f"frozen: {frozen}"])]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            run_script(compare_finetuning.main)
        return int(exit_info.value.code or 0)

    for _ in range(2):
        assert compare("--freeze encoder") == 0
        assert len(commands) == 8
    assert compare("--anchor mixout:probability=0.5") == 2
    assert "written by another command line" in capsys.readouterr().err
    record = json.loads((tmp_path / "methods.json").read_text())
    assert record["methods"] == {"plain": [], "frozen": ["--freeze", "encoder"]}
    frozen, plain = record["results"]["frozen"], record["results"]["plain"]
    assert [run["distance"] for run in frozen] == [0.0, 0.0]
    assert all(run["loss after"] == run["loss before"] for run in frozen)
    assert all(run["distance"] > 0 and run["loss after"] != run["loss before"] for run in plain)
    rows = (tmp_path / "methods.md").read_text().splitlines()
    assert rows[0] == "| method | accuracy | loss before | loss after | distance |"
    mean = sum(run["distance"] for run in plain) / 2
    spread = abs(plain[0]["distance"] - plain[1]["distance"]) / 2**0.5
    assert rows[2].endswith(f"| {mean:.4f} ± {spread:.4f} |")
    with pytest.raises(CtxError, match="no unique name"):
        compare_finetuning.parse_methods(["a", "a: --anchor mixout:probability=0.1"])
