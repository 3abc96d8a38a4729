"""The output directory of a run: checkpoints, locks, overwriting, and resuming."""

import contextlib
import copy
import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from training_runs import arguments, new_model, run, stop_after

from hf_ctxmodels import CtxError
from hf_ctxmodels.training import checkpoint_files, training_state
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint_files import (
    MANIFEST_FILE,
    check_run_directory,
    damaged_files,
    list_checkpoints,
    locked_output_dir,
    move_files,
    replacing_model,
)
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.training_state import FLAGS_THAT_MAY_CHANGE, run_identity

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_old_and_unfinished_checkpoints_are_removed(workspace, pretraining_setup, tmp_path):
    (tmp_path / "checkpoint-9.writing").mkdir(parents=True)
    unrelated = [tmp_path / name for name in ("notes.writing", "checkpoint-old.deleting", "my-checkpoint-3.writing")]
    for directory in unrelated:
        directory.mkdir()
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=5, save_steps=1, save_total_limit=2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-5"]
    assert not (tmp_path / "checkpoint-9.writing").exists()
    assert all(directory.exists() for directory in unrelated)


def test_checkpoints_of_requested_steps(workspace, pretraining_setup, tmp_path):
    """They are kept in addition to the newest ones, also after resuming; step 0 has the initial weights."""
    initial = {name: weight.clone() for name, weight in new_model(workspace).state_dict().items()}
    flags = {"max_steps": 7, "save_steps": 2, "save_total_limit": 1, "save_at": [0, 1, 5]}
    collate = stop_after(pretraining_setup[1].collate, 4)
    with pytest.raises(InterruptedError):
        run(new_model(workspace), pretraining_setup, arguments(tmp_path, **flags), collate=collate)
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, **flags, resume=True))
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (0, 1, 5, 7)]
    saved = type(new_model(workspace)).from_pretrained(tmp_path / "checkpoint-0").state_dict()
    assert all(torch.equal(weight, initial[name]) for name, weight in saved.items())
    with pytest.raises(CtxError, match="A step is 0 or more"):
        arguments(tmp_path, save_at=[-1])


def test_locked_directory_raises(workspace, pretraining_setup, tmp_path):
    """A second run would delete files of the first; the lock is released afterwards."""
    batch_sizes = []

    def collate(examples):
        with pytest.raises(CtxError, match=f"Another run is training into this directory .process {os.getpid()} on"):
            run(new_model(workspace), pretraining_setup, arguments(tmp_path, overwrite=True))
        batch_sizes.append(len(examples))
        return pretraining_setup[1].collate(examples)

    (tmp_path / "checkpoint-9.writing").mkdir()
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=1), collate=collate)
    assert {*batch_sizes} == {4}
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=2, resume=True))


def test_forked_process_does_not_hold_lock(tmp_path):
    """A data worker may outlive a killed run for a moment."""
    accelerator, options = make_accelerator(arguments(tmp_path)), arguments(tmp_path)
    (wait, release), (started, start) = os.pipe(), os.pipe()
    with locked_output_dir(accelerator, options):
        child = os.fork()
        if child == 0:
            os.close(release)
            os.write(start, b"1")
            os.read(wait, 1)
            os._exit(0)
    os.read(started, 1)
    try:
        with locked_output_dir(accelerator, options):
            pass
    finally:
        os.close(release)
        os.waitpid(child, 0)


def test_overwrite_keeps_unrelated_files(workspace, pretraining_setup, tmp_path):
    new_model(workspace).save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    weights = (tmp_path / "model.safetensors").read_bytes()
    for options in ({}, {"resume": True}):
        with pytest.raises(CtxError, match=r"already holds config\.json, .*model\.safetensors"):
            run(new_model(workspace), pretraining_setup, arguments(tmp_path, **options))
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, overwrite=True))
    assert (tmp_path / "model.safetensors").read_bytes() != weights
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for name in ("adapters/old/adapter.safetensors", "adapters/stack.json", "quantized/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("earlier run")
        manifest["sha256"][name] = "0"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=2, overwrite=True))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "adapters").exists()
    assert not (tmp_path / "quantized").exists()
    with pytest.raises(CtxError, match="either continued or overwritten"):
        arguments(tmp_path, overwrite=True, resume=True)


@pytest.mark.parametrize("batches", [1, 3])
def test_interrupted_overwriting_run(workspace, pretraining_setup, tmp_path, batches):
    """The old model remains until the first checkpoint, of step 2, is complete, and no longer."""
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=1))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "mine.txt").write_text("mine")
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    options = arguments(tmp_path, max_steps=4, save_steps=2, overwrite=True)
    with pytest.raises(InterruptedError):
        run(new_model(workspace), pretraining_setup, options, collate=stop_after(pretraining_setup[1].collate, batches))
    assert not (tmp_path / "overwritten").exists()
    assert (tmp_path / "adapters" / "mine.txt").exists()
    if batches == 1:
        assert {path: path.read_bytes() for path in content} == content
    else:
        assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
        assert not {"config.json", "model.safetensors", "manifest.json"} & {path.name for path in tmp_path.iterdir()}
        with pytest.raises(CtxError, match=r"use .*checkpoint-2"):
            load_config(tmp_path)


def test_killed_overwriting_run(workspace, pretraining_setup, tmp_path):
    run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=1))
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "overwritten").mkdir()
    for name in ("config.json", "model.safetensors", "checkpoint-1"):
        (tmp_path / name).rename(tmp_path / "overwritten" / name)
    with pytest.raises(CtxError, match="already holds overwritten"):
        check_run_directory(arguments(tmp_path), None)
    with pytest.raises(CtxError, match="already has a checkpoint"):
        run(new_model(workspace), pretraining_setup, arguments(tmp_path))
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_tokenizer_in_output_directory(workspace, pretraining_setup, tmp_path):
    pretraining_setup[0].save_pretrained(tmp_path)
    with pytest.raises(CtxError, match=r"already holds tokenizer\.json"):
        run(new_model(workspace), pretraining_setup, arguments(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    run(new_model(workspace), (tokenizer, *pretraining_setup[1:]), arguments(tmp_path, max_steps=1))


@pytest.fixture(scope="module")
def stopped_run(workspace, pretraining_setup, tmp_path_factory):
    """Directory and flags of a run of one step, with a learning rate that depends on its length."""
    flags = {"max_steps": 1, "lr_scheduler": "linear", "dataloader_workers": 0}
    directory = tmp_path_factory.mktemp("stopped") / "run"
    run(new_model(workspace), pretraining_setup, arguments(directory, **flags))
    return directory, flags


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layerwise_lr_decay": 2.6}, "layerwise_lr_decay is 2.6, was 1.0"),
        ({"lr_reference_targets": 9.0}, "lr_reference_targets is 9.0, was 0.0"),
        ({"dtype": "bfloat16"}, "mixed_precision is bf16, was no"),
        ({"lr_scheduler": "cosine:min_rate=0.1"}, "lr_scheduler is cosine, was linear; lr_scheduler.min_rate is 0.1"),
        ({"optimizer": "adamw:beta2=0.9"}, "optimizer.beta2 is 0.9, was 0.999"),
        ({"learning_rate": 0.5, "seed": 1}, "learning_rate is 0.5, was 0.001; seed is 1, was 42"),
        ({"max_steps": 3}, "total_steps is 3, was 1"),
        ({"per_device_batch_size": 2}, "global_micro_batch is 2, was 4"),
        ({"resume": False}, "already has a checkpoint"),
    ],
    ids=str,
)
def test_resume_with_different_flags_raises(workspace, pretraining_setup, stopped_run, changes, message):
    directory, flags = stopped_run
    with pytest.raises(CtxError, match=message):
        run(new_model(workspace), pretraining_setup, arguments(directory, **{"resume": True, **flags, **changes}))


def test_file_permissions(stopped_run):
    """The umask applies, also to weights, which safetensors writes with 0600."""
    files = [path for path in stopped_run[0].rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) == 3
    umask = os.umask(0o077)
    os.umask(umask)
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~umask)}


def test_resume_with_different_model_raises(workspace, pretraining_setup, stopped_run):
    directory, flags = stopped_run
    tokenizer = copy.deepcopy(pretraining_setup[0])
    tokenizer.add_tokens(["new"])
    for model, changed_problem, message in (
        (new_model(workspace, "dropout.json"), pretraining_setup, r"config\.hidden_dropout_prob is 0\.1, was 0\.0"),
        (new_model(workspace).bfloat16(), pretraining_setup, r"dtype is bfloat16, was float32"),
        (new_model(workspace), (tokenizer, *pretraining_setup[1:]), r"config\.tokenizer_digest is 81:\w+, was 80:\w+"),
    ):
        with pytest.raises(CtxError, match=message):
            run(model, changed_problem, arguments(directory, resume=True, **flags))


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "FSDP", "DEEPSPEED"])
def test_parallelism_does_not_change_the_identity_of_a_run(workspace, tmp_path, kind):
    model, options = new_model(workspace), arguments(tmp_path)
    process, other = (
        SimpleNamespace(distributed_type=DistributedType[name], num_processes=1, mixed_precision="no")
        for name in (kind, "MULTI_GPU")
    )
    assert run_identity(options, process, 10, model) == run_identity(options, other, 10, model)


def test_resume_with_former_entry_of_identity(pretraining_setup, workspace, stopped_run, tmp_path, monkeypatch):
    """The identity of earlier checkpoints says whether DeepSpeed saved them."""
    directory, flags = stopped_run
    shutil.copytree(directory, tmp_path / "run")
    read_state = training_state._read_state

    def read_former_state(checkpoint):
        state = read_state(checkpoint)
        return state | {"identity": state["identity"] | {"deepspeed": False}}

    monkeypatch.setattr(training_state, "_read_state", read_former_state)
    resumed = run(new_model(workspace), pretraining_setup, arguments(tmp_path / "run", resume=True, **flags))
    assert resumed.steps == 1


def test_resume_with_changeable_flags(workspace, pretraining_setup, stopped_run, tmp_path):
    directory, flags = stopped_run
    shutil.copytree(directory, tmp_path / "moved")
    changes = {"logging_steps": 7, "save_steps": 7, "save_total_limit": 7, "save_at": [7], "eval_steps": 7}
    assert {*FLAGS_THAT_MAY_CHANGE} < {field.name for field in dataclasses.fields(LoopArguments)}
    assert {*changes} < {*FLAGS_THAT_MAY_CHANGE}
    resumed = run(
        new_model(workspace), pretraining_setup, arguments(tmp_path / "moved", resume=True, **flags, **changes)
    )
    assert resumed.steps == 1


@contextlib.contextmanager
def small_disk(size: int):
    """A context in which no file grows above `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [30_000, 2000, 0], ids=["weights", "tokenizer", "log"])
def test_full_disk_raises(workspace, pretraining_setup, tmp_path, size):
    disk, evaluations = contextlib.ExitStack(), itertools.count(1)

    def evaluate(model, accelerator):
        if next(evaluations) == 2:
            while not (tmp_path / "checkpoint-1").exists():  # it is completed in the background
                time.sleep(0.01)
            disk.enter_context(small_disk(size))
        return {"eval_x": 1.0}

    options = arguments(tmp_path, save_steps=1, eval_steps=1, dataloader_workers=1)
    with disk, pytest.raises(CtxError, match=r"Writing failed: .*File too large"):
        run(new_model(workspace), pretraining_setup, options, evaluate=evaluate)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert not damaged_files(tmp_path / "checkpoint-1")
    assert not list(tmp_path.glob("*.writing"))
    assert not multiprocessing.active_children()
    assert run(new_model(workspace), pretraining_setup, arguments(tmp_path, resume=True)).steps == 3


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free disk space there, and run the same command again with --resume"),
        (errno.ENOENT, "create the directory again, if it was removed, and run"),
        (errno.EACCES, "allow writing there, and run"),
        (errno.EIO, "check the path and the disk, and run"),
    ],
)
def test_failed_background_write_raises(workspace, pretraining_setup, tmp_path, monkeypatch, number, fix):
    """At a later step, with a fix for its cause; the last good checkpoint remains."""
    commit, steps = checkpoint_files.commit_checkpoint, []

    def failing_commit(temporary, final, *arguments):
        if final.name == "checkpoint-2":
            raise OSError(number, os.strerror(number))
        commit(temporary, final, *arguments)

    def collate(examples):
        steps.append(len(examples))
        time.sleep(0.05 * (len(steps) > 2))
        return pretraining_setup[1].collate(examples)

    monkeypatch.setattr(checkpoint_files, "commit_checkpoint", failing_commit)
    with pytest.raises(CtxError, match=f"Writing failed: .*{os.strerror(number)}") as error:
        run(new_model(workspace), pretraining_setup, arguments(tmp_path, max_steps=50, save_steps=1), collate=collate)
    assert error.value.hint.startswith(fix)
    assert "the last good checkpoint is" in error.value.hint
    assert len(steps) < 5
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert not list(tmp_path.glob("*.writing"))


def test_full_disk_leaves_model_unchanged(tmp_path):
    def write(config, size):
        with replacing_model(tmp_path) as folder:
            (folder / "config.json").write_text(config)
            (folder / "model.safetensors").write_bytes(bytes(size))

    write("{}", 10)
    write("{}", 2000)
    with small_disk(1000), pytest.raises(CtxError, match="Writing failed"):
        write('{"vocab_size": 3}', 3000)
    assert not damaged_files(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "model.safetensors").stat().st_size == 2000
    assert not list(tmp_path.glob("*.writing"))


def test_unreadable_file_is_not_a_damaged_file(tmp_path, monkeypatch):
    def deny_reading(file):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    with replacing_model(tmp_path) as folder:
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr(checkpoint_files, "file_digest", deny_reading)
    with pytest.raises(CtxError, match="cannot be read: Permission denied") as error:
        damaged_files(tmp_path)
    assert error.value.location == str(tmp_path / "config.json")
    assert "permissions" in error.value.hint


def test_invalid_file_names_in_manifest(tmp_path):
    """Files with such names count as missing; the next model replaces them."""
    damaged = dict.fromkeys(("x" * 300, "x\x00/y", f"{'x' * 300}/adapter.safetensors"), "00")
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({"sha256": damaged}))
    assert [line.endswith("is missing") for line in damaged_files(tmp_path)] == [True] * 3
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.json").write_text("{}")
    move_files(new, tmp_path)
    assert not damaged_files(tmp_path)
