"""Stopping on SIGTERM and SIGINT after the current step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

import torch

from hf_ctxmodels.core.errors import CtxError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptionError(CtxError):
    """Training was stopped by a signal and saved; the exit code is 128 + the signal's number."""

    def __init__(self, received: signal.Signals, step: int, checkpoint: str) -> None:
        super().__init__(
            f"Training stopped by {received.name} after step {step}; the checkpoint is saved.",
            location=checkpoint,
            hint="run the same command with --resume to continue exactly.",
        )
        self.exit_code = 128 + received


class LostProcessError(CtxError):
    """Another process of the run ended, or did not answer within the time limit of its collective operations."""


# What gloo and the store of torch.distributed say; NCCL raises a class of its own.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out", "timed out", "Broken pipe")


@contextmanager
def detect_lost_processes(num_processes: int) -> Iterator[None]:
    """Within, processes work together.

    Raises:
        LostProcessError: one of the others was killed or hangs.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in _LOST)
        if num_processes == 1 or not lost:
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise LostProcessError(
            f"Another process of this run has ended or does not answer: {said}",
            location=f"process {os.environ.get('RANK', '?')} of {num_processes}",
            hint="see what that process said above (killed without a word: often the memory was full), then run the "
            "same command with --resume.",
        ) from error


class SignalWatch:
    """Context that turns the first SIGTERM or SIGINT into a flag; a second one acts as usual.

    With several processes, a signal to one of them reaches all through a CPU process group, without synchronisation of
    an accelerator.
    """

    def __init__(self, num_processes: int) -> None:
        self._received = 0
        self._previous: dict[int, object] = {}
        self._group = torch.distributed.new_group(backend="gloo") if num_processes > 1 else None

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def received(self) -> signal.Signals | None:
        """The signal that any process received, or None. A collective call."""
        number = self._received
        if self._group is not None:
            shared = torch.tensor(number)
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=self._group)
            number = int(shared)
        return signal.Signals(number) if number else None


def ignore_signals(worker_id: int) -> None:
    """Ignore the first signal in a data worker: the training process decides when to stop. A second acts as usual."""
    for number in _SIGNALS:
        signal.signal(number, lambda received, frame: signal.signal(received, signal.SIG_DFL))
