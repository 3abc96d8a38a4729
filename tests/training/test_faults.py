"""Killed, stopped and resumed runs of `hf-ctxmodels pretrain`, and two processes."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from forked import ForkedProcess
from safetensors.torch import load_file

STEPS = 12
LENGTH = ("--max_steps", STEPS, "--save_steps", 3, "--eval_steps", 6, "--validation_fraction", 0.1)
BATCHES = ("--per_device_batch_size", 4, "--gradient_accumulation_steps", 2)

# Kills the process at the worst moment of its second save: everything is written, nothing has its name.
KILLED_WHILE_SAVING = """
import os, signal, sys
from hf_ctxmodels.cli import pretrain
from hf_ctxmodels.training import checkpoint_files as checkpoint
commit, saves = checkpoint.commit_checkpoint, []
def killing_commit(temporary, final):
    saves.append(final)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(temporary, final)
checkpoint.commit_checkpoint = killing_commit
pretrain.main()
"""


def losses(output_dir: Path) -> list[dict]:
    """The log without tokens per second."""
    lines = (output_dir / "training_log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def wait_for(path: Path, process: ForkedProcess) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for name in ("model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_killed_runs_resume_exactly(any_workspace, tmp_path):
    """After two kills and two resumes, losses, weights and moments equal an uninterrupted run, bit for bit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, errors = any_workspace.pretrain(*any_workspace.flags(whole, *BATCHES, *LENGTH))
    assert code == 0, errors

    flags = any_workspace.flags(broken, *BATCHES, *LENGTH)
    process = any_workspace.start("-m", "hf_ctxmodels", "pretrain", *flags)
    wait_for(broken / "checkpoint-3", process)
    time.sleep(random.Random(7).uniform(0, 0.1))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    process = any_workspace.start("-c", KILLED_WHILE_SAVING, *flags, "--resume")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(broken.glob("checkpoint-*.writing"))

    code, errors = any_workspace.pretrain(*flags, "--resume")
    assert code == 0, errors
    assert "Resuming from" in errors
    assert not list(broken.glob("*.writing"))
    assert_same_run(whole, broken)


def test_sigterm_saves_and_a_stream_resumes(any_workspace, tmp_path):
    """SIGTERM, also to the data workers, ends the run after the step; the stream resumes at its position."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, errors = any_workspace.pretrain(*any_workspace.flags(whole, *BATCHES, *LENGTH, "--streaming"))
    assert code == 0, errors

    flags = any_workspace.flags(broken, *BATCHES, *LENGTH, "--streaming", "--dataloader_workers", 1)
    process = any_workspace.start("-m", "hf_ctxmodels", "pretrain", *flags)
    wait_for(broken / "checkpoint-3", process)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "SIGTERM" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors

    code, errors = any_workspace.pretrain(*flags, "--resume")
    assert code == 0, errors
    assert_same_run(whole, broken)


# Two processes that meet in a file, as `accelerate launch` starts two, but forked when everything is imported.
TWO_FORKED = """
import sys
from hf_ctxmodels.cli import pretrain
from accelerate import debug_launcher
debug_launcher(pretrain.main, num_processes=2)
"""


def _launch(workspace, config: str, *flags: object) -> str:
    command = ["-c", TWO_FORKED]
    if config != "forked":
        config_file = f"scripts/accelerate/{config}"
        command = ["-m", "accelerate.commands.launch", "--config_file", config_file, "--num_processes", 2]
        command += ["--mixed_precision", "no", "-m", "hf_ctxmodels", "pretrain"]
    code, errors = workspace.run(*command, *flags)
    assert code == 0, errors
    return errors


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("workspace", "ddp_cpu.yaml"),
        ("contiguous_workspace", "forked"),
        ("pair_workspace", "forked"),
        pytest.param("workspace", "fsdp2.yaml", marks=pytest.mark.slow),
        pytest.param("contiguous_workspace", "fsdp2.yaml", marks=pytest.mark.slow),
        pytest.param("pair_workspace", "fsdp2.yaml", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one(request, tmp_path, name, config):
    """The same global batch on one process and on two, which are stopped and resumed half-way."""
    workspace = request.getfixturevalue(name)
    one, two = tmp_path / "one", tmp_path / "two"
    common = ["--gradient_accumulation_steps", 2, "--eval_steps", 4, "--validation_fraction", 0.1]
    if config == "fsdp2.yaml" and workspace.family == "electra":
        common += ["--config_options", "tie_generator=none"]  # torch shards no weight that two groups of modules share
    flags = workspace.flags(one, *common, "--per_device_batch_size", 4, "--max_steps", 8, config="exact.json")
    code, errors = workspace.pretrain(*flags)
    assert code == 0, errors

    flags = workspace.flags(two, *common, "--per_device_batch_size", 2, config="exact.json")
    _launch(workspace, config, *flags, "--max_steps", 4)
    assert "Resuming from" in _launch(workspace, config, *flags, "--max_steps", 8, "--resume")

    for expected, actual in zip(losses(one), losses(two), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    expected, actual = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert expected.keys() == actual.keys()
    for name, weight in expected.items():
        assert (weight - actual[name]).abs().max() < 1e-5, name
