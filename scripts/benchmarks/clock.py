"""Wall-clock and CPU time between two optimizer steps of any training loop."""

import multiprocessing
import time
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepClock:
    """Context manager that measures the time between the ends of two optimizer steps.

    Args:
        first, last: Numbers of the steps, counted from 1.
        device: Device of the training loop.

    Attributes:
        seconds, cpu_seconds: Time from the end of step `first` to the end of step `last`. CPU time includes all threads
            and the data loader's worker processes.
    """

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self.first, self.last, self.device = first, last, device
        self.seconds = self.cpu_seconds = 0.0
        self._steps = 0

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_post_hook(self._count)
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def per_token(self, tokens: float) -> tuple[float, float]:
        """Seconds and CPU seconds per token, given the number of tokens in the steps after `first`."""
        return self.seconds / tokens, self.cpu_seconds / tokens

    def _count(self, *step: Any) -> None:
        self._steps += 1
        if self._steps in (self.first, self.last):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            sign = -1 if self._steps == self.first else 1
            self.seconds += sign * time.perf_counter()
            self.cpu_seconds += sign * (time.process_time() + _worker_cpu_seconds())


def _worker_cpu_seconds() -> float:
    times = [psutil.Process(worker.pid).cpu_times() for worker in multiprocessing.active_children()]
    return sum(cpu_times.user + cpu_times.system for cpu_times in times)
