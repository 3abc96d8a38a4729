"""Wall and CPU time between two optimizer steps, in whatever loop they are made."""

import multiprocessing
import time
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepClock:
    """Context that takes the time at the end of two optimizer steps.

    Args:
        first, last: Numbers of the steps, from 1 on.
        device: Where the steps run.

    Attributes:
        seconds, cpu_seconds: From the end of the first step to that of the last; CPU time is that of all threads and
            of the processes that make batches.
    """

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self.first, self.last, self.device = first, last, device
        self.seconds = self.cpu_seconds = 0.0
        self._steps = 0

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_post_hook(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def pace(self, tokens: float) -> tuple[float, float]:
        """Seconds and CPU seconds a token, for so many tokens of the steps after the first."""
        return self.seconds / tokens, self.cpu_seconds / tokens

    def _count(self, *step: Any) -> None:
        self._steps += 1
        if self._steps in (self.first, self.last):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            sign = -1 if self._steps == self.first else 1
            self.seconds += sign * time.perf_counter()
            self.cpu_seconds += sign * (time.process_time() + _workers_time())


def _workers_time() -> float:
    times = [psutil.Process(worker.pid).cpu_times() for worker in multiprocessing.active_children()]
    return sum(each.user + each.system for each in times)
