"""Training of task networks with the training loop and Trainer: accumulation, two processes, resumed runs."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command, run_in_two_processes
from safetensors.torch import load_file
from training_runs import trainer_arguments
from transformers import AutoTokenizer, Trainer
from treebank_files import write_treebank
from zoo import tiny_config

from hf_ctxmodels.core.auto_classes import get_auto_class
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.training_log import read_log

NAMES, VERBS, PLACES = ["Ann", "the old sailor", "Bob"], ["saw", "left", "carried"], ["garden", "letter", "bridge"]
PRONOUNS = {"Ann": "she", "the old sailor": "he", "Bob": "he"}
REOPEN = """
import json, sys, torch, hf_ctxmodels, transformers
output = {}
for task, name in json.loads(sys.argv[1]).items():
    auto = getattr(hf_ctxmodels, name, None) or getattr(transformers, name)
    model = auto.from_pretrained(f"{sys.argv[2]}/{task}").eval()
    with torch.no_grad():
        output[task] = dict(model(**torch.load(f"{sys.argv[2]}/{task}/batch.pt")))
torch.save(output, f"{sys.argv[2]}/outputs.pt")
"""


def sentence(rng: random.Random) -> tuple[str, str, str]:
    return rng.choice(NAMES), rng.choice(VERBS), rng.choice(PLACES)


def write_pairs(file: Path, rng: random.Random, number: int) -> None:
    rows = [(sentence(rng), sentence(rng)) for _ in range(number)]
    lines = [f"{' '.join(a)}\t{' '.join(b)}\t{'yes' if a[0] == b[0] else 'no'}" for a, b in rows]
    file.write_text("\n".join(["first\tsecond\tlabel", *lines]) + "\n")


def write_tags(file: Path, rng: random.Random, number: int) -> None:
    blocks = []
    for _ in range(number):
        name, verb, place = sentence(rng)
        tags = ["B-PER", *["I-PER"] * (len(name.split()) - 1), "O", *["O", "B-LOC"] * (rng.random() < 0.6)]
        words = [*name.split(), verb, "a", place]
        blocks.append("".join(f"{word} {tag}\n" for word, tag in zip(words, tags, strict=False)))
    file.write_text("\n".join(blocks))


def write_questions(file: Path, rng: random.Random, number: int) -> None:
    paragraphs = []
    for index in range(number):
        name, verb, place = sentence(rng)
        text = f"Today {name} {verb} a small {place}"
        answers = [{"text": place, "answer_start": text.index(place)}] if rng.random() < 0.7 else []
        question = {"id": str(index), "question": f"what did {name} see", "answers": answers}
        paragraphs.append({"context": text, "qas": [question]})
    file.write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]}))


def write_mentions(file: Path, rng: random.Random, number: int) -> None:
    """Documents with one to three names, so that batches differ in the number of mentions."""
    lines = []
    for _ in range(number):
        sentences, clusters, start = [], [], 0
        for name in rng.sample(NAMES, rng.randint(1, 3)):
            words, pronoun = [*name.split(), rng.choice(VERBS), "it", "."], [PRONOUNS[name], "slept", "."]
            second = start + len(words)
            clusters.append([[start, start + len(name.split()) - 1], [second, second]])
            start = second + len(pronoun)
            sentences += [words, pronoun]
        lines.append(json.dumps({"sentences": sentences, "clusters": clusters}))
    file.write_text("\n".join(lines) + "\n")


def write_trees(file: Path, rng: random.Random, number: int) -> None:
    write_treebank(file, number, rng.randrange(1000))


TASK_FILES: dict[str, tuple[str, Callable[[Path, random.Random, int], None], dict[str, Any]]] = {
    "sequence-classification": ("pairs.tsv", write_pairs, {"text_columns": "first,second", "label_column": "label"}),
    "token-classification": ("tags.conll", write_tags, {}),
    "question-answering": ("questions.json", write_questions, {}),
    "coreference": ("mentions.jsonl", write_mentions, {}),
    "dependency-parsing": ("trees.conllu", write_trees, {}),
}
NETWORK_OPTIONS: dict[str, dict[str, Any]] = {
    "coreference": {"hidden_size": 8, "scorer_size": 8, "max_span_width": 3, "spans_per_word": 1},
    "dependency-parsing": {"hidden_size": 8, "scorer_size": 8},
}


@pytest.fixture(scope="module")
def assets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny BERT and GloVe and the data files of each task."""
    folder = tmp_path_factory.mktemp("assets")
    texts = [" ".join((*NAMES, *VERBS, *PLACES, "a small today what did see she he it slept ."))] * 10
    for name in ("bert", "glove"):
        family = FAMILIES[name]
        tokenizer = family.tokenizer.train(texts, vocab_size=120)
        torch.manual_seed(0)
        for component in (family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))), tokenizer):
            component.save_pretrained(folder / name)
    for file, write, _ in TASK_FILES.values():
        write(folder / file, random.Random(1), 48)
        write(folder / f"validation_{file}", random.Random(2), 6)
    return folder


def finetune_flags(assets_dir: Path, task: str, dropout: float) -> dict[str, Any]:
    """Flags of `finetune` with a trainable and a frozen encoder, and a penalty on the layer mix.

    Text pairs use ESIM, because the biattentive network has batch normalization.
    """
    file, _, columns = TASK_FILES[task]
    options = {"hidden_size": 8, "dropout": dropout, **NETWORK_OPTIONS.get(task, {})}
    changes = [f"network_options={json.dumps(options)}", f"feature_dropout={dropout}", "mix_decay=0.1"]
    if task == "sequence-classification":
        changes.append("network=esim")
    return {
        "features": f"bert={assets_dir / 'bert'},glove={assets_dir / 'glove'}",
        "config_options": [*changes, 'trainable_encoders=["bert"]'],
        "train_file": assets_dir / file, "validation_file": assets_dir / f"validation_{file}", "max_length": 40,
        "logging_steps": 1, "learning_rate": 0.01, **columns,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", TASK_FILES)
def test_accumulation_and_processes_equal_one_batch(assets_dir: Path, tmp_path: Path, task: str) -> None:
    """Losses, gradient norms and metrics."""
    flags = finetune_flags(assets_dir, task, dropout=0.0) | {"max_steps": 2}
    runs = {"whole": (16, 1), "accumulated": (4, 4), "single": (1, 16), "divided": (8, 1)}
    for name, (size, micro_batches) in runs.items():
        run: Any = run_in_two_processes if name == "divided" else run_command
        sizes = {"per_device_batch_size": size, "gradient_accumulation_steps": micro_batches}
        assert not run("finetune", task, **flags, **sizes, output_dir=tmp_path / name)
    expected = read_log(tmp_path / "whole")
    assert sum("loss" in record for record in expected) == 2
    for name in [*runs][1:]:
        for record, actual in zip(expected, read_log(tmp_path / name), strict=True):
            for key in record.keys() - {"tokens_per_second", "run_tokens_per_second"}:
                assert actual[key] == pytest.approx(record[key], abs=1e-4), (name, key)


@pytest.mark.parametrize(
    "task", ["coreference", *(pytest.param(task, marks=pytest.mark.slow) for task in list(TASK_FILES)[1:3])]
)
def test_resumed_run_equals_uninterrupted_run(assets_dir: Path, tmp_path: Path, task: str) -> None:
    """With dropout in all modules, bit by bit."""
    flags = finetune_flags(assets_dir, task, dropout=0.3) | {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_batch_size": 8,
    }
    assert run_command("finetune", task, **flags, output_dir=tmp_path / "whole") == 0
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert run_command("finetune", task, "--resume", **flags, output_dir=tmp_path / "resumed") == 0
    expected, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert [name for name, weight in expected.items() if not torch.equal(weight, resumed[name])] == []
    start = load_file(tmp_path / "whole" / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(weight, start[name]) for name, weight in expected.items() if ".encoders.0." in name)


@pytest.mark.slow
def test_trainer_and_loading_in_new_process(assets_dir: Path, tmp_path: Path) -> None:
    """Trainer reduces the loss of all networks, and a new process computes their outputs from the saved files."""
    outputs, auto_classes = {}, {}
    for name in TASK_FILES:
        file, _, columns = TASK_FILES[name]
        flags = finetune_flags(assets_dir, name, dropout=0.0) | {"max_steps": 1, "per_device_batch_size": 8}
        assert run_command("finetune", name, **flags, output_dir=tmp_path / "start") == 0
        task = TASKS[name](TaskArguments(max_length=40, **columns))
        model = get_auto_class(task.auto_class).from_pretrained(tmp_path / "start")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
        shutil.rmtree(tmp_path / "start")
        task.load_labels(model.config)
        features = task.encode(task.read_file(str(assets_dir / file)), tokenizer).features
        collate = task.collator(tokenizer)
        batch = collate(features[:16])
        before = model.eval()(**batch).loss
        arguments = trainer_arguments(
            tmp_path / "trainer", max_steps=30, learning_rate=0.02, per_device_train_batch_size=16,
            remove_unused_columns=False, seed=0,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=features, data_collator=collate).train()
        assert model.eval()(**batch).loss < 0.8 * before, name
        folder = tmp_path / "saved" / name
        model.save_pretrained(folder)
        torch.save(batch, folder / "batch.pt")
        with torch.no_grad():
            outputs[name], auto_classes[name] = dict(model(**batch)), task.auto_class
    for name in ("bert", "glove"):
        shutil.move(assets_dir / name, tmp_path)
    try:
        command = [sys.executable, "-c", REOPEN, json.dumps(auto_classes), str(tmp_path / "saved")]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    finally:
        for name in ("bert", "glove"):
            shutil.move(tmp_path / name, assets_dir)
    reopened = torch.load(tmp_path / "saved" / "outputs.pt")
    for name, output in outputs.items():
        for key, value in output.items():
            torch.testing.assert_close(reopened[name][key], value, msg=f"{name}: {key}")
