"""Several processes: warnings, a killed process, and a plain Trainer."""

import os
import signal
from pathlib import Path

import pytest
from accelerate.utils import DistributedType, is_deepspeed_available

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.distributed import inactive_parallelism_warnings
from hf_ctxmodels.training.loop import make_accelerator

# Each process trains on half of the batch; the gradients are averaged.
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


# Process 1 is killed before its third step, as by a kernel that is out of memory.
KILLED = """
import os, signal, sys
from hf_ctxmodels.cli import pretrain
from hf_ctxmodels.training.training_step import TrainingStep
step, steps = TrainingStep.__call__, []
def killing_step(self, batches):
    steps.append(batches)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batches)
TrainingStep.__call__ = killing_step
from hf_ctxmodels.core.console import run_script
run_script(pretrain.main)
"""


def launch(workspace, script: Path, *flags: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `accelerate launch SCRIPT` with two processes."""
    config = ("--config_file", "scripts/accelerate/ddp_cpu.yaml", "--num_processes", 2, "--mixed_precision", "no")
    process = workspace.start("-m", "accelerate.commands.launch", *config, script, *flags)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


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
def test_killed_process(workspace, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    flags = workspace.flags(tmp_path / "out", "--per_device_batch_size", 2, "--max_steps", 8, "--save_steps", 2)
    code, _, errors = launch(workspace, tmp_path / "killed.py", *flags)
    assert code != 0
    assert "LostProcessError: Another process of this run has ended" in errors
    assert "--resume" in errors
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


@pytest.mark.slow
def test_plain_trainer(workspace, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_TRAINER)
    code, output, errors = launch(workspace, tmp_path / "plain.py", tmp_path / "out")
    assert code == 0, errors
    lines = sorted(line for line in output.splitlines() if line.startswith("process"))
    assert [line.split(" has ")[0] for line in lines] == ["process 0 of 2", "process 1 of 2"]
    assert lines[0].split(" has ")[1] == lines[1].split(" has ")[1]
