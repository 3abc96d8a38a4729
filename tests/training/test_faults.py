"""Killed, stopped and resumed runs of `hf-ctxmodels pretrain`, and runs of several processes."""

import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType, is_deepspeed_available
from commands import command_output
from forked import ForkedProcess
from safetensors.torch import load_file
from training_runs import log_without_speed
from transformers import AutoModelForPreTraining

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import list_checkpoints
from hf_ctxmodels.training.distributed import inactive_parallelism_warnings
from hf_ctxmodels.training.model_loading import load_config, load_model
from hf_ctxmodels.training.sharded_checkpoints import merge_checkpoint

slow = partial(pytest.param, marks=pytest.mark.slow)
STEPS = 12
LENGTH = ("--max_steps", STEPS, "--save_steps", 3, "--eval_steps", 6, "--validation_fraction", 0.1)
BATCHES = ("--per_device_batch_size", 4, "--gradient_accumulation_steps", 2)

# Kills the process in its second save, after writing all files and before renaming the directory.
KILLED_WHILE_SAVING = """
import os, signal, sys
from hf_ctxmodels.cli import pretrain
from hf_ctxmodels.training import checkpoint_files as checkpoint
commit, saves = checkpoint.commit_checkpoint, []
def killing_commit(temporary, final, digests):
    saves.append(final)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(temporary, final, digests)
checkpoint.commit_checkpoint = killing_commit
pretrain.main()
"""


def wait_for(path: Path, process: ForkedProcess) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def assert_same_run(one: Path, other: Path) -> None:
    assert log_without_speed(one) == log_without_speed(other)
    for name in ("model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("any_workspace", ["workspace", slow("contiguous_workspace")], indirect=True)
def test_killed_run_equals_uninterrupted_run(any_workspace, tmp_path):
    """After two kills and two resumes, losses, weights and moments are equal, bit for bit."""
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "broken"
    code, errors = any_workspace.pretrain(*any_workspace.flags(uninterrupted, *BATCHES, *LENGTH))
    assert code == 0, errors

    flags = any_workspace.flags(resumed, *BATCHES, *LENGTH)
    process = any_workspace.start("-m", "hf_ctxmodels", "pretrain", *flags)
    wait_for(resumed / "checkpoint-3", process)
    time.sleep(random.Random(7).uniform(0, 0.1))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    process = any_workspace.start("-c", KILLED_WHILE_SAVING, *flags, "--resume")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(resumed.glob("checkpoint-*.writing"))

    code, errors = any_workspace.pretrain(*flags, "--resume")
    assert code == 0, errors
    assert "Resuming from" in errors
    assert not list(resumed.glob("*.writing"))
    assert_same_run(uninterrupted, resumed)


@pytest.mark.parametrize("any_workspace", [slow("workspace"), "contiguous_workspace"], indirect=True)
def test_sigterm_saves_and_stream_resumes(any_workspace, tmp_path):
    """SIGTERM, also sent to the data workers, ends the run after the step; the stream resumes at its position."""
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "broken"
    code, errors = any_workspace.pretrain(*any_workspace.flags(uninterrupted, *BATCHES, *LENGTH, "--streaming"))
    assert code == 0, errors

    flags = any_workspace.flags(resumed, *BATCHES, *LENGTH, "--streaming")
    process = any_workspace.start("-m", "hf_ctxmodels", "pretrain", *flags, "--dataloader_workers", 1)
    wait_for(resumed / "checkpoint-3", process)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "SIGTERM" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors

    code, errors = any_workspace.pretrain(*flags, "--resume")
    assert code == 0, errors
    assert_same_run(uninterrupted, resumed)


# Two processes as started by `accelerate launch`, but forked after all imports.
TWO_FORKED = """
import sys
from hf_ctxmodels.cli import pretrain
from accelerate import debug_launcher
debug_launcher(pretrain.main, num_processes=2)
"""


def launch(workspace, *command: object, config: str = "ddp_cpu.yaml") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `accelerate launch COMMAND` with two processes."""
    flags = ("--config_file", f"scripts/accelerate/{config}", "--num_processes", 2, "--mixed_precision", "no")
    process = workspace.start("-m", "accelerate.commands.launch", *flags, *command)
    output, errors = process.communicate()
    return process.returncode, output, errors


def pretrain_in_two_processes(workspace, config: str, *flags: object) -> str:
    """Standard error of `pretrain` with a configuration of accelerate, or with two forked processes."""
    if config == "forked":
        code, errors = workspace.run("-c", TWO_FORKED, *flags)
    else:
        code, _, errors = launch(workspace, "-m", "hf_ctxmodels", "pretrain", *flags, config=config)
    assert code == 0, errors
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("any_workspace", ["workspace", "contiguous_workspace"], indirect=True)
def test_processes_stream_different_parts(any_workspace, tmp_path):
    """A run stopped and resumed half-way continues in the parts of each process, and equals an uninterrupted run."""
    small_parts = "from hf_ctxmodels.data import document_sources, documents\n"
    small_parts += "documents.PART_BYTES = document_sources.PART_BYTES = 2000\n"
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "broken"
    for folder, steps, flag in (
        (uninterrupted, 12, "--overwrite"),
        (resumed, 6, "--overwrite"),
        (resumed, 12, "--resume"),
    ):
        flags = any_workspace.flags(folder, "--streaming", "--per_device_batch_size", 2, "--max_steps", steps, flag)
        code, errors = any_workspace.run("-c", small_parts + TWO_FORKED, *flags)
        assert code == 0, errors
    assert_same_run(uninterrupted, resumed)
    states = [json.loads((resumed / f"checkpoint-6/stream_state_{rank}.json").read_text()) for rank in range(2)]
    assert [[*state["positions"]] for state in states] == [["0"], ["1"]]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("pair_workspace", "forked"),
        slow("contiguous_workspace", "forked"),
        slow("workspace", "ddp_cpu.yaml"),
        *(slow(name, "fsdp2.yaml") for name in ("workspace", "contiguous_workspace", "pair_workspace")),
    ],
)
def test_two_processes_equal_one_process(request, tmp_path, name, config):
    """The same global batch on one process that reads text, and on two that read prepared examples and are stopped and
    resumed."""
    workspace = request.getfixturevalue(name)
    one, two = tmp_path / "one", tmp_path / "two"
    shared = ["--gradient_accumulation_steps", 2, "--eval_steps", 4, "--validation_fraction", 0.1]
    if (name, config) == ("contiguous_workspace", "forked"):
        shared += ["--learning_rate", "auto"]
    if config == "fsdp2.yaml" and workspace.family == "electra":
        shared += ["--config_options", "tie_generator=none"]  # torch shards no weight that two module groups share
    flags = workspace.flags(one, *shared, "--per_device_batch_size", 4, "--max_steps", 8, config="exact.json")
    code, errors = workspace.pretrain(*flags)
    assert code == 0, errors

    prepared, text = tmp_path / "prepared", {"dataset": workspace.folder / "text.txt", "validation_fraction": 0.1}
    text |= {"family": workspace.family, "tokenizer": workspace.folder / "tokenizer", "max_length": 32}
    if "objective" in workspace.extra_flags:
        text["objective"] = workspace.extra_flags["objective"]
    command_output("data", "prepare", **text, output_dir=prepared)
    shared += ["--dataset", prepared]
    flags = workspace.flags(two, *shared, "--per_device_batch_size", 2, config="exact.json")
    pretrain_in_two_processes(workspace, config, *flags, "--max_steps", 4)
    errors = pretrain_in_two_processes(workspace, config, *flags, "--max_steps", 8, "--resume")
    assert "Resuming from" in errors

    for expected, actual in zip(log_without_speed(one), log_without_speed(two), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    expected, actual = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert expected.keys() == actual.keys()
    for name, weight in expected.items():
        assert (weight - actual[name]).abs().max() < 1e-5, name


# DeepSpeed on a CPU, which accelerate allows only on accelerators.
DEEPSPEED_ON_CPU = """
import accelerate, torch
from accelerate import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_HPU)
PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
initialize = accelerate.Accelerator.__init__
accelerate.Accelerator.__init__ = lambda self, **options: initialize(self, **options | {"cpu": False})
from hf_ctxmodels.cli import pretrain
from hf_ctxmodels.core.console import run_script
run_script(pretrain.main)
"""


@pytest.fixture
def pretrain_with_deepspeed(tmp_path):
    """(*flags, processes, stage of ZeRO, precision) -> exit code and standard error."""
    pytest.importorskip("deepspeed")
    script = tmp_path / "pretrain.py"
    script.write_text(DEEPSPEED_ON_CPU)

    def train(*flags: object, processes: int = 2, stage: int = 2, precision: str = "no") -> tuple[int, str]:
        environment = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "ACCELERATE_MIXED_PRECISION": precision,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, script, *flags)
        process = ForkedProcess(
            *command, "--per_device_batch_size", 4 // processes, cwd=Path(__file__).parents[2], **environment
        )
        _, errors = process.communicate()
        return process.returncode, errors

    return train


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_deepspeed_equals_one_process(workspace, tmp_path, pretrain_with_deepspeed, micro_batches):
    """Also after it was stopped and resumed on another number of processes, and without DeepSpeed. The engine updates
    the weights in the backward pass."""
    one, two = tmp_path / "one", tmp_path / "two"
    shared = ["--gradient_accumulation_steps", micro_batches, "--max_grad_norm", 0.5]
    flags = workspace.flags(one, *shared, "--per_device_batch_size", 4, "--max_steps", 8, config="exact.json")
    code, errors = workspace.pretrain(*flags)
    assert code == 0, errors
    flags = workspace.flags(two, *shared, config="exact.json")
    code, errors = pretrain_with_deepspeed(*flags, "--max_steps", 2)
    assert code == 0, errors
    for max_steps, processes, stage in ((4, 2, 2), (6, 1, 1)):
        resumed = *flags, "--max_steps", max_steps, "--resume"
        code, errors = pretrain_with_deepspeed(*resumed, processes=processes, stage=stage)
        assert code == 0, errors
        assert "Resuming from" in errors
    code, errors = workspace.pretrain(*flags, "--per_device_batch_size", 4, "--max_steps", 8, "--resume")
    assert code == 0, errors
    for expected, actual in zip(log_without_speed(one), log_without_speed(two), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    expected, actual = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert max((weight - actual[name]).abs().max() for name, weight in expected.items()) < 1e-5


@pytest.mark.slow
def test_deepspeed_resumes_exactly_in_bfloat16(workspace, tmp_path, pretrain_with_deepspeed):
    """The engine has bfloat16 weights; the checkpoint has the float32 weights that the optimizer updates, and the
    frozen ones as they were."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for directory, lengths in ((whole, [8]), (resumed, [4, 8])):
        for max_steps in lengths:
            flags = *workspace.flags(directory, config="exact.json"), "--max_steps", max_steps
            code, errors = pretrain_with_deepspeed(*flags, "--resume", precision="bf16")
            assert code == 0, errors
    assert log_without_speed(whole) == log_without_speed(resumed)
    expected, actual = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    for name, weight in expected.items():
        assert weight.dtype == torch.float32
        assert torch.equal(actual[name], weight), name

    adapter = tmp_path / "adapter"
    flags = *workspace.flags(adapter), "--model", whole, "--adapter", "pfeiffer", "--max_steps", 1
    code, errors = pretrain_with_deepspeed(*flags, precision="bf16")
    assert code == 0, errors
    for name, weight in load_file(adapter / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "stage", "message"),
    [
        ((), 0, "ZeRO stage 0, expected 1 or 2"),
        ((), 3, "ZeRO stage 3, expected 1 or 2"),
        (("--optimizer", "adamw:scale_by_size=true"), 2, "adamw:scale_by_size=true cannot update weights"),
        (("--optimizer", "asgd"), 2, "asgd cannot update weights"),
        (("--lr_reference_targets", 10), 2, "DeepSpeed does not support a learning rate"),
        (("--optimizer", "adafactor"), 2, "adafactor cannot update weights"),
    ],
)
def test_unsupported_settings_of_deepspeed(workspace, tmp_path, pretrain_with_deepspeed, flags, stage, message):
    flags = *workspace.flags(tmp_path / "run", config="exact.json"), *flags, "--max_steps", 1
    code, errors = pretrain_with_deepspeed(*flags, stage=stage)
    assert code != 0
    assert message in errors


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "4 gradient accumulation steps are configured"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM is configured"),
    ],
)
def test_unsupported_launch_settings(monkeypatch, tmp_path, fresh_accelerate, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(CtxError, match=message):
        make_accelerator(LoopArguments(output_dir=str(tmp_path), max_steps=1))


# FSDP processes as started by `accelerate launch --config_file fsdp2.yaml`, but forked. With KILLED_SAVE=n, process 1
# is killed in its n-th save, after writing its shards.
SHARDED_FORKED = """
import os, signal
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": os.environ["RAM_EFFICIENT"]}
import torch
from accelerate import debug_launcher
from hf_ctxmodels.cli import pretrain
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.training import sharded_checkpoints as sharded
digest, saves = sharded.file_digest, []
def killing_digest(path):
    saves.append(path)
    if torch.distributed.get_rank() == 1 and len(saves) == int(os.environ.get("KILLED_SAVE", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return digest(path)
sharded.file_digest = killing_digest
debug_launcher(run_script, (pretrain.main,), num_processes=int(os.environ["PROCESSES"]))
"""


@pytest.mark.parametrize(
    ("name", "thorough"), [("workspace", False), slow("workspace", True), slow("contiguous_workspace", True)]
)
def test_resume_from_sharded_checkpoints(request, tmp_path, name, thorough):
    """An FSDP run that is killed while saving resumes without accumulation, up to rounding; its final model is merged
    from the last checkpoint. `thorough`: it resumes on one and on four processes, exactly on two, and a run of one
    process resumes with FSDP."""
    workspace = request.getfixturevalue(name)
    length = ("--max_steps", 4, "--save_steps", 2, "--eval_steps", 2, "--validation_fraction", 0.1)

    def batches(processes: int, micro_batches: int = 2) -> list[object]:
        rows = 8 // (processes * micro_batches)
        return ["--per_device_batch_size", rows, "--gradient_accumulation_steps", micro_batches]

    def train(
        directory: Path, processes: int, *flags: object, micro_batches: int = 2, killed_save: int = 0
    ) -> tuple[int, str]:
        flags = *batches(processes, micro_batches), *length, *flags
        command = "-c", SHARDED_FORKED, *workspace.flags(directory, *flags, config="exact.json")
        environment = {"PROCESSES": str(processes), "KILLED_SAVE": str(killed_save), "OMP_NUM_THREADS": "1"}
        environment["RAM_EFFICIENT"] = str(directory != two).lower()
        process = ForkedProcess(*command, cwd=Path(__file__).parents[2], **environment)
        _, errors = process.communicate()
        return process.returncode, errors

    def assert_equal_up_to_rounding(one: Path, other: Path) -> None:
        for expected, actual in zip(log_without_speed(one), log_without_speed(other), strict=True):
            assert actual == pytest.approx(expected, rel=1e-5)
        expected, actual = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
        assert expected.keys() == actual.keys()
        assert max((weight - actual[name]).abs().max() for name, weight in expected.items()) < 1e-5

    one, two, killed = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    code, errors = workspace.pretrain(*workspace.flags(one, *batches(1), *length, config="exact.json"))
    assert code == 0, errors
    code, errors = train(killed, 2, killed_save=2)
    assert code != 0
    assert "SIGKILL" in errors
    assert [path.name for path in list_checkpoints(killed)] == ["checkpoint-2"]
    assert not list(killed.glob("*.writing/manifest.json"))
    for processes, micro_batches in ((1, 2), (4, 1)) if thorough else ((2, 1),):
        resumed = tmp_path / f"{processes}"
        shutil.copytree(killed, resumed)
        code, errors = train(resumed, processes, "--resume", micro_batches=micro_batches)
        assert code == 0, errors
        assert f"(2 processes, now {processes}): dropout masks differ" in errors
        assert_equal_up_to_rounding(one, resumed)
    if thorough:
        for directory, flags in ((two, ()), (killed, ("--resume",))):
            code, errors = train(directory, 2, *flags)
            assert code == 0, errors
        assert "Resuming from" in errors
        assert log_without_speed(two) == log_without_speed(killed)
        assert (two / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
        for checkpoint in list_checkpoints(one)[1:]:
            shutil.rmtree(checkpoint)
        unsharded = log_without_speed(one)
        code, errors = train(one, 2, "--resume")
        assert code == 0, errors
        assert log_without_speed(one) == [pytest.approx(record, rel=1e-5) for record in unsharded]

    checkpoint, merged = resumed / "checkpoint-4", tmp_path / "merged"
    assert not (checkpoint / "model.safetensors").exists()
    command_output("convert checkpoint", checkpoint=checkpoint, output=merged)
    assert (merged / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    assert {path.name for path in merged.iterdir()} <= {path.name for path in resumed.iterdir()}
    (tmp_path / "small").mkdir()
    merge_checkpoint(checkpoint, tmp_path / "small", max_file_size="20KB")
    assert len([*(tmp_path / "small").glob("model-*.safetensors")]) > 1
    expected = AutoModelForPreTraining.from_pretrained(resumed).state_dict()
    actual = AutoModelForPreTraining.from_pretrained(tmp_path / "small").state_dict()
    assert all(weight.equal(actual[name]) for name, weight in expected.items())
    with pytest.raises(CtxError, match="sharded over several processes"):
        load_model(checkpoint, "AutoModelForPreTraining", load_config(checkpoint))


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


# Process 1 is killed before its third step, as by an out-of-memory kernel.
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


def test_warnings_about_inactive_parallelism(monkeypatch, tmp_path, capsys, fresh_accelerate) -> None:
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


# Two processes with different output directories, as on two machines without a shared file system.
UNSHARED_DIRECTORY = """
import sys, time
from accelerate import debug_launcher
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
def main(directory):
    accelerator = make_accelerator(LoopArguments(output_dir=directory, timeout=0.5))
    start, directory = time.monotonic(), directory + str(accelerator.process_index)
    try:
        make_accelerator(LoopArguments(output_dir=directory, timeout=0.5))
    except CtxError as error:
        print(time.monotonic() - start, error.message, flush=True)
debug_launcher(main, (sys.argv[1],), num_processes=2)
"""


def test_unshared_output_directory_raises(workspace, tmp_path: Path) -> None:
    """All processes raise the error within two seconds."""
    process = workspace.start("-c", UNSHARED_DIRECTORY, tmp_path / "run")
    output, errors = process.communicate(timeout=60)
    lines = output.splitlines()
    assert len(lines) == 2, errors
    for line in lines:
        seconds, message = line.split(" ", 1)
        assert float(seconds) < 2
        assert message.startswith("The output directory is not shared: process 1 on")
        assert f"{tmp_path}/run1" in message
    assert not list(tmp_path.rglob(".shared-*"))


@pytest.mark.slow
def test_killed_process_ends_run(workspace, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    flags = workspace.flags(tmp_path / "out", "--per_device_batch_size", 2, "--max_steps", 8, "--save_steps", 2)
    code, _, errors = launch(workspace, tmp_path / "killed.py", *flags)
    assert code != 0
    assert "LostProcessError: Another process of this run has ended" in errors
    assert "--resume" in errors
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


@pytest.mark.slow
def test_plain_trainer_in_two_processes(workspace, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_TRAINER)
    code, output, errors = launch(workspace, tmp_path / "plain.py", tmp_path / "out")
    assert code == 0, errors
    lines = sorted(line for line in output.splitlines() if line.startswith("process"))
    assert [line.split(" has ")[0] for line in lines] == ["process 0 of 2", "process 1 of 2"]
    assert lines[0].split(" has ")[1] == lines[1].split(" has ")[1]
