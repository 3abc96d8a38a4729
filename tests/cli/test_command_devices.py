"""`--device` and `--dtype` of all commands that run a model."""

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
ANALYSIS_COMMANDS = (
    "analyze similarity --model masked classifier --text text.txt --measures cka --output_dir {}",
    "analyze geometry --model masked --text text.txt --min_occurrences 2 --output_dir {}",
    "analyze attention --model masked --text long.txt --output_dir {}",
    "analyze senses --model masked --text text.txt --word the --output_dir {}",
    "analyze heads --model classifier --validation_file rows.jsonl --output_dir {}",
    "analyze landscape --model classifier --pretrained masked --validation_file rows.jsonl --output_dir {}",
    "export low-rank --model classifier --rank 2 --weighting activations:file=long.txt --output_dir {}",
    "embed words --model masked --input text.txt --output {}.npz",
    "embed sentences --model masked --pooling mean --input text.txt --output {}.npy",
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("devices")
    heads = {"classifier": "SequenceClassification", "masked": "MaskedLM", "decoder": "CausalLM"}
    for name, head in heads.items():
        family = "gpt2" if name == "decoder" else "bert"
        model, tokenizer = tiny_pair(family, f"AutoModelFor{head}", TEXTS, 300)
        if name == "classifier":
            model.config.id2label, model.config.label2id = {0: "A", 1: "B", 2: "C"}, {"A": 0, "B": 1, "C": 2}
        save(workspace / name, model, tokenizer)
    (workspace / "text.txt").write_text("\n".join(TEXTS))
    (workspace / "long.txt").write_text("\n".join([" ".join(TEXTS[:2])] * 16))
    (workspace / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": "ABC"[index % 3]}) + "\n" for index, text in enumerate(TEXTS * 2))
    )
    (workspace / "pairs.csv").write_text("".join(f"{text},{TEXTS[0]},{index}\n" for index, text in enumerate(TEXTS)))
    pair = {"sentence_good": TEXTS[0], "sentence_bad": TEXTS[1], "UID": "x"}
    (workspace / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    return workspace


@pytest.fixture
def linear_dtypes() -> Iterator[set[torch.dtype]]:
    """Records the output dtypes of linear layers."""
    linear_dtypes: set[torch.dtype] = set()

    def record(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(module, nn.Linear) and isinstance(output, torch.Tensor):
            linear_dtypes.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(record)
    yield linear_dtypes
    handle.remove()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("command", MODEL_COMMANDS + TRAINING_COMMANDS)
def test_dtype_of_linear_layers(workspace, command, linear_dtypes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    args = command.split()
    if command in TRAINING_COMMANDS:
        args += ["--output_dir", str(tmp_path / "out")]
    args += [*["--device", "cpu", "--dtype", "bfloat16"]]
    assert run_command(*args) == 0, capsys.readouterr().err
    assert linear_dtypes == {torch.bfloat16}
    if command.startswith("pretrain"):
        assert TrainingSummary.load(tmp_path / "out").hyperparameters["dtype"] == "bfloat16"
    stderr = capsys.readouterr().err
    assert ("on cpu, bfloat16 autocast" in stderr) == (command in TRAINING_COMMANDS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("flags", [[], ["--no-float64"]], ids=["cuda", "without float64"])
def test_commands_use_the_gpu_by_default(workspace, flags, tmp_path):
    """On an emulated GPU, models and batches are on the GPU without --device; mixing devices raises, and float64 on
    GPUs that do not have it, as Apple's."""
    training = [f"{command} --output_dir {tmp_path / str(index)}" for index, command in enumerate(TRAINING_COMMANDS)]
    augmentation = f"data augment --model masked --input rows.jsonl --output {tmp_path / 'gpu.jsonl'} --copies 1"
    analyses = [command.format(tmp_path / f"analysis-{index}") for index, command in enumerate(ANALYSIS_COMMANDS)]
    model_commands = [command for command in MODEL_COMMANDS if "augment" not in command]
    commands = [*model_commands, augmentation, *training, *analyses]
    paths = [str(TESTS.parent), *(str(TESTS / name) for name in (".", "gpu", "hub"))]
    result = subprocess.run(
        [sys.executable, str(TESTS / "gpu" / "command_runs.py"), *flags, *commands],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["command"] for record in records] == commands, result.stderr[-2000:]
    for record in records:
        assert record["code"] == 0, record
        assert record["launches"] > 50 or record["command"] in analyses, record
        assert ("on cuda, bfloat16 autocast" in record["stderr"]) == (record["command"] in training)
