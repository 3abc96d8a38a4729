"""Warnings for inactive parallelism, and a plain Trainer on several processes."""

import os
import signal
from pathlib import Path

import pytest
from accelerate.utils import DistributedType, is_deepspeed_available

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.distributed import inactive_parallelism_warnings
from hf_ctxmodels.training.loop import make_accelerator

# Each process trains on its own half of the batch; the weights are those of the mean gradient.
PLAIN_TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification
torch.manual_seed(0)
model = CtxBertForSequenceClassification(CtxBertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1,
    num_attention_heads=2, intermediate_size=32))
rows = [{"input_ids": torch.arange(5, 9) + row, "labels": torch.tensor(row % 2)} for row in range(8)]
arguments = TrainingArguments(sys.argv[1], use_cpu=True, max_steps=2, per_device_train_batch_size=2, report_to="none",
    disable_tqdm=True, save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
total = sum(float(weight.double().sum()) for weight in model.parameters())
print(f"process {arguments.process_index} of {arguments.world_size} has {total:.9f}", flush=True)
"""


def test_warnings(monkeypatch, tmp_path, capsys, fresh_accelerate) -> None:
    assert inactive_parallelism_warnings(DistributedType.NO, 1, "cpu") == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (line,) = inactive_parallelism_warnings(DistributedType.NO, 1, "cpu")
    assert "2 processes were launched but are not connected" in line
    assert "use_cpu=True" in line
    assert inactive_parallelism_warnings(DistributedType.MULTI_CPU, 2, "cpu") == []
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    (line,) = inactive_parallelism_warnings(DistributedType.MULTI_CPU, 2, "cpu")
    assert "DeepSpeed is configured but not active: 2 processes on cpu" in line
    assert inactive_parallelism_warnings(DistributedType.DEEPSPEED, 2, "cuda") == []
    arguments = LoopArguments(output_dir=str(tmp_path), max_steps=1)
    if not is_deepspeed_available():
        with pytest.raises(CtxError, match="not installed"):
            make_accelerator(arguments)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    make_accelerator(arguments)
    assert "warning: FSDP is configured but not active: 1 process on cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_plain_trainer(workspace, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_TRAINER)
    config = ("--config_file", "scripts/accelerate/ddp_cpu.yaml", "--num_processes", 2, "--mixed_precision", "no")
    process = workspace.start("-m", "accelerate.commands.launch", *config, tmp_path / "plain.py", tmp_path / "out")
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    lines = sorted(line for line in output.splitlines() if line.startswith("process"))
    assert [line.split(" has ")[0] for line in lines] == ["process 0 of 2", "process 1 of 2"]
    assert lines[0].split(" has ")[1] == lines[1].split(" has ")[1]
