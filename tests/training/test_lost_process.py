"""A process stops if another one is killed."""

import os
import signal
from pathlib import Path

import pytest

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
from hf_ctxmodels.core.errors import run_script
run_script(pretrain.main)
"""


@pytest.mark.slow
def test_killed_process(workspace, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    flags = workspace.flags(tmp_path / "out", "--per_device_batch_size", 2, "--max_steps", 8, "--save_steps", 2)
    config = ("--config_file", "scripts/accelerate/ddp_cpu.yaml", "--num_processes", 2, "--mixed_precision", "no")
    process = workspace.start("-m", "accelerate.commands.launch", *config, tmp_path / "killed.py", *flags)
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "LostProcessError: Another process of this run has ended" in errors
    assert "--resume" in errors
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
