"""Processes of a run: launch settings, the shared output directory, lost processes, and stopping on SIGTERM and SIGINT
after the current step."""

import os
import platform
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Self, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, is_deepspeed_available, str_to_bool

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import wrap_write_errors

_LAUNCH_SETTINGS = {
    "DeepSpeed": ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
    "FSDP": ("ACCELERATE_USE_FSDP", DistributedType.FSDP),
}
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_DELAY = 1.0  # seconds until a new file is visible on all machines
# Messages of gloo and of torch.distributed's store; NCCL raises a separate class.
_CONNECTION_ERRORS = (
    *("gloo", "Connection closed by peer", "Connection reset by peer"),
    *("Timed out", "timed out", "Broken pipe"),
)


def require_configured_backend() -> None:
    """Raise CtxError if `accelerate launch` configured DeepSpeed and it is not installed, or Megatron-LM."""
    if str_to_bool(os.environ.get("ACCELERATE_USE_MEGATRON_LM", "false")):
        raise CtxError(
            "Megatron-LM is configured, but it is not supported.",
            location="accelerate launch",
            hint="launch with another file, such as fsdp2.yaml.",
        )
    if _is_configured("DeepSpeed") and not is_deepspeed_available():
        raise CtxError(
            "DeepSpeed is configured, but it is not installed.",
            location="accelerate launch",
            hint="pip install 'hf_ctxmodels[deepspeed]', or launch with another file, such as fsdp2.yaml.",
        )


def inactive_parallelism_warnings(distributed_type: DistributedType, num_processes: int, device: str) -> list[str]:
    """Warnings for parallelism that `accelerate launch` configured but that is not active on the type of device."""
    warnings = [
        f"warning: {name} is configured but not active: {num_processes} process{'es' * (num_processes > 1)} on "
        f"{device}, {'with plain data parallelism' if num_processes > 1 else 'no parallelism'}, and nothing is sharded."
        for name, (_, configured_type) in _LAUNCH_SETTINGS.items()
        if _is_configured(name) and distributed_type != configured_type
    ]
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > num_processes:
        warnings.append(
            f"warning: {launched} processes were launched but are not connected: each trains alone on all data. "
            "Without a GPU use TrainingArguments(use_cpu=True), or set ACCELERATE_USE_CPU=true."
        )
    return warnings


def _is_configured(name: str) -> bool:
    return bool(str_to_bool(os.environ.get(_LAUNCH_SETTINGS[name][0], "false")))


def _is_visible(file: Path) -> bool:
    """Whether a file exists. Listing the folders above makes a network file system forget that one did not exist."""
    for folder in reversed(file.parents[:3]):
        with suppress(OSError), os.scandir(folder):
            pass
    return file.exists()


def check_shared_directory(accelerator: Accelerator, directory: Path) -> None:
    """Raise CtxError on all processes if one does not see a file that the main process writes to its directory; a
    collective call, which creates the directory."""
    token = f".shared-{uuid.uuid4().hex}"
    error: CtxError | None = None
    if accelerator.is_main_process:
        try:
            with wrap_write_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
                (directory / token).touch()
        except CtxError as failure:  # raised after the collective operations, which the other processes wait in
            error = failure
    file = directory / broadcast_object_list([token])[0]
    deadline = time.monotonic() + _MAX_DELAY
    while not (is_visible := _is_visible(file)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process = f"process {accelerator.process_index} on {platform.node()} ({directory.absolute()})"
    processes = [name for name in gather_object([None if is_visible else process]) if name is not None]
    if accelerator.is_main_process:
        file.unlink(missing_ok=True)
    if error is not None:
        raise error
    if processes:
        raise CtxError(
            f"The output directory is not shared: {'; '.join(processes)} does not see the files of process 0.",
            location=f"--output_dir {directory}",
            hint="pass the same --output_dir to all processes, on a file system that all machines mount.",
        )


class InterruptionError(CtxError):
    """Training was stopped by a signal and saved; the exit code is 128 + the signal's number."""

    def __init__(self, received: signal.Signals, step: int, checkpoint: str) -> None:
        super().__init__(
            f"Training stopped by {received.name} after step {step}; the checkpoint is saved.",
            location=checkpoint,
            hint="run the same command with --resume to continue, or with --resume finish to end the run here "
            "(evaluation, final model and summary).",
        )
        self.exit_code = 128 + received


class LostProcessError(CtxError):
    """Another process of the run ended, or did not answer within the time limit of its collective operations."""


@contextmanager
def detect_lost_processes(num_processes: int) -> Iterator[None]:
    """Turn errors of collective operations into a LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, torch.distributed.DistError) or any(
            message in str(error) for message in _CONNECTION_ERRORS
        )
        if num_processes == 1 or not is_lost:
            raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise LostProcessError(
            f"Another process of this run has ended or does not answer: {first_line}",
            location=f"process {os.environ.get('RANK', '?')} of {num_processes}",
            hint="read the output of that process above (if it was killed without a message, it was probably out of "
            "memory; if it was still working, raise --timeout), then run the same command with --resume.",
        ) from error


def new_cpu_group(timeout: float) -> torch.distributed.ProcessGroup:
    """A group of all processes for collective operations on the CPU, with a limit in minutes. A collective call."""
    group = torch.distributed.new_group(timeout=timedelta(minutes=timeout), backend="gloo")
    return cast(torch.distributed.ProcessGroup, group)  # all processes are members


class SignalWatch:
    """Context that turns the first SIGTERM or SIGINT into a flag; a second one acts as usual.

    With several processes, a signal to one of them reaches all through a process group on the CPU, without
    synchronizing an accelerator; `timeout` is its limit in minutes.
    """

    def __init__(self, num_processes: int, timeout: float = 30.0) -> None:
        self._received = 0
        self._previous_handlers: dict[int, object] = {}
        self._group = new_cpu_group(timeout) if num_processes > 1 else None

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self.__exit__()

    def __exit__(self, *error: object) -> None:
        while self._previous_handlers:
            number, handler = self._previous_handlers.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def received(self) -> signal.Signals | None:
        """The signal that any process received, or None. A collective call."""
        number = self._received
        if self._group is not None:
            highest = torch.tensor(number)
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=self._group)
            number = int(highest)
        return signal.Signals(number) if number else None


def ignore_signals(worker_id: int) -> None:
    """Ignore the first signal in a data worker: the training process decides when to stop. A second acts as usual."""
    for number in _SIGNALS:
        signal.signal(number, lambda received, frame: signal.signal(received, signal.SIG_DFL))
