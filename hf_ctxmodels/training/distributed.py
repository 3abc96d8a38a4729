"""Processes of a run: launch settings, lost processes, and stopping on SIGTERM and SIGINT after the current step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import torch
from accelerate.utils import DistributedType, is_deepspeed_available, str_to_bool

from hf_ctxmodels.core.errors import CtxError

_LAUNCH_SETTINGS = {
    "DeepSpeed": ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
    "FSDP": ("ACCELERATE_USE_FSDP", DistributedType.FSDP),
}
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Messages of gloo and of torch.distributed's store; NCCL raises a separate class.
_CONNECTION_ERRORS = (
    *("gloo", "Connection closed by peer", "Connection reset by peer"),
    *("Timed out", "timed out", "Broken pipe"),
)


def require_configured_backend() -> None:
    """Raise CtxError if `accelerate launch` configured DeepSpeed and it is not installed."""
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


class InterruptionError(CtxError):
    """Training was stopped by a signal and saved; the exit code is 128 + the signal's number."""

    def __init__(self, received: signal.Signals, step: int, checkpoint: str) -> None:
        super().__init__(
            f"Training stopped by {received.name} after step {step}; the checkpoint is saved.",
            location=checkpoint,
            hint="run the same command with --resume to continue, or with --resume finish to end the run here "
            "(evaluation, final model and summary). The checkpoint can be used as --model.",
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
            "memory), then run the same command with --resume.",
        ) from error


class SignalWatch:
    """Context that turns the first SIGTERM or SIGINT into a flag; a second one acts as usual.

    With several processes, a signal to one of them reaches all through a process group on the CPU, without
    synchronising an accelerator.
    """

    def __init__(self, num_processes: int) -> None:
        self._received = 0
        self._previous_handlers: dict[int, object] = {}
        self._group = torch.distributed.new_group(backend="gloo") if num_processes > 1 else None

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
