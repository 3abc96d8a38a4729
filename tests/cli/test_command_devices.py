"""`--device` and `--dtype` of the commands that run a model."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import run_command, save, tiny_pair
from torch import nn

from hf_ctxmodels.training.summary import TrainingSummary

TESTS = Path(__file__).parents[1]
TEXTS = ["the cat sat on the mat", "a dog ran to the river", "it was cold", "the bird saw a tree"]
DATA = "--train_file rows.jsonl --validation_file rows.jsonl --max_length 16 --max_steps 1"
MODEL_COMMANDS = (
    "predict --model classifier --input text.txt",
    "generate --model decoder --input text.txt --max_new_tokens 3",
    "evaluate sentences --model classifier --similarity pairs.csv=1,2,3",
    "evaluate pairs --model decoder --pairs pairs.jsonl --unigram_text text.txt",
    "evaluate perplexity --model decoder --dataset text.txt --max_length 8",
    "evaluate forgetting --pretrained masked --finetuned classifier --text text.txt --max_length 16",
    "evaluate pretraining --model masked --text text.txt --max_length 16",
    "evaluate ensemble --models classifier classifier --validation_file rows.jsonl --max_length 16",
    "data augment --model masked --input rows.jsonl --output augmented.jsonl --copies 1",
)
TRAINING_COMMANDS = (
    "pretrain --family bert --objective mlm --tokenizer masked --dataset text.txt --max_length 16 --max_steps 1",
    f"finetune sequence-classification --model classifier {DATA}",
    f"distill sequence-classification --teacher classifier --losses soft-targets --family bert {DATA}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    heads = {"classifier": "SequenceClassification", "masked": "MaskedLM", "decoder": "CausalLM"}
    for name, head in heads.items():
        family = "gpt2" if name == "decoder" else "bert"
        model, tokenizer = tiny_pair(family, f"AutoModelFor{head}", TEXTS, 300)
        if name == "classifier":
            model.config.id2label, model.config.label2id = {0: "A", 1: "B", 2: "C"}, {"A": 0, "B": 1, "C": 2}
        save(folder / name, model, tokenizer)
    (folder / "text.txt").write_text("\n".join(TEXTS))
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": "ABC"[index % 3]}) + "\n" for index, text in enumerate(TEXTS * 2))
    )
    (folder / "pairs.csv").write_text("".join(f"{text},{TEXTS[0]},{index}\n" for index, text in enumerate(TEXTS)))
    pair = {"sentence_good": TEXTS[0], "sentence_bad": TEXTS[1], "UID": "x"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    return folder


@pytest.fixture
def dtypes() -> Iterator[set[torch.dtype]]:
    """The data types of the outputs of linear layers."""
    dtypes: set[torch.dtype] = set()

    def record(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(module, nn.Linear) and isinstance(output, torch.Tensor):
            dtypes.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(record)
    yield dtypes
    handle.remove()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("command", MODEL_COMMANDS + TRAINING_COMMANDS)
def test_dtype(folder, command, dtypes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = command.split()
    if command in TRAINING_COMMANDS:
        words += ["--output_dir", str(tmp_path / "out")]
    words += [*["--device", "cpu", "--dtype", "bfloat16"]]
    assert run_command(*words) == 0, capsys.readouterr().err
    assert dtypes == {torch.bfloat16}
    if command.startswith("pretrain"):
        assert TrainingSummary.load(tmp_path / "out").hyperparameters["dtype"] == "bfloat16"
    shown = capsys.readouterr().err
    assert ("on cpu, bfloat16 autocast" in shown) == (command in TRAINING_COMMANDS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_pretended_gpu(folder, tmp_path):
    """Without --device all models and batches are on the GPU; operations on two devices raise."""
    training = [f"{command} --output_dir {tmp_path / str(index)}" for index, command in enumerate(TRAINING_COMMANDS)]
    augmentation = "data augment --model masked --input rows.jsonl --output gpu.jsonl --copies 1"
    commands = [*(command for command in MODEL_COMMANDS if "augment" not in command), augmentation, *training]
    paths = [str(TESTS.parent), *(str(TESTS / name) for name in (".", "gpu", "hub"))]
    result = subprocess.run(
        [sys.executable, str(TESTS / "gpu" / "command_runs.py"), *commands],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["command"] for record in records] == commands, result.stderr[-2000:]
    for record in records:
        assert record["code"] == 0, record
        assert record["launches"] > 50
        assert ("on cuda, bfloat16 autocast" in record["stderr"]) == (record["command"] in training)
