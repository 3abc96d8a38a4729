"""Forward passes of several batches at once, in threads, on a CPU.

A forward pass uses all cores only inside its large operators. Between them, and while a batch is padded and its states
are pooled, one core works. With a batch per core, all cores work all the time.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch
from torch import nn

from hf_ctxmodels.core.model import CtxPreTrainedModel, evaluation_mode

Batch = TypeVar("Batch")
Result = TypeVar("Result")

_MAX_BATCH_THREADS = 8  # more batches at once take memory, and the threads wait for Python's lock


def num_batch_threads(model: nn.Module) -> int:
    """Maximum number of batches that `map_batches` computes at once: 1 on a GPU, and if the forward pass may keep
    state, in hooks or in modules of transformers."""
    if not isinstance(model, CtxPreTrainedModel) or model.device.type != "cpu":
        return 1
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return 1
    return min(torch.get_num_threads(), _MAX_BATCH_THREADS)


def map_batches(function: Callable[[Batch], Result], batches: Iterable[Batch], model: nn.Module) -> list[Result]:
    """Apply `function`, which runs `model`, to each batch in evaluation mode; returns the results in order.

    The threads see the context variables and the autocast of the caller.

    Raises:
        Exception: The first exception of `function`; batches that have not begun are not computed.
    """
    batches = list(batches)
    num_workers = min(num_batch_threads(model), len(batches))
    if num_workers <= 1:  # on all cores
        with evaluation_mode(model):
            return list(map(function, batches))
    is_autocast, autocast_dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(batch: Batch) -> Result:
        with torch.no_grad(), torch.autocast("cpu", autocast_dtype, enabled=is_autocast):
            return function(batch)

    with evaluation_mode(model), torch_threads(torch.get_num_threads() // num_workers):
        executor = ThreadPoolExecutor(num_workers)
        try:
            futures = [executor.submit(copy_context().run, run, batch) for batch in batches]
            return [future.result() for future in futures]
        finally:
            executor.shutdown(cancel_futures=True)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Set torch's number of threads, which threads that start here inherit, and restore it on exit."""
    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
