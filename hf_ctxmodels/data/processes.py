"""Work that is divided among processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from hf_ctxmodels.core.errors import CtxError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], num_proc: int, *, hint: str = "use fewer processes."
) -> Iterator[Result]:
    """Yield the results of a function in the order in which they are complete. The function is pickled once for each of
    the processes, which use one core each.

    Raises:
        CtxError: A process was killed; `hint` is its last line.
    """
    context = get_context("spawn")  # a process with threads must not be forked
    with ProcessPoolExecutor(num_proc, context, _initialize, (function,)) as executor:
        remaining: set[Future[Result]] = {executor.submit(_call, item) for item in items}
        try:
            while remaining:
                finished, remaining = wait(remaining, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        except BrokenProcessPool as error:
            raise CtxError(
                "A process has ended: it was out of memory or killed, or it imported a program without `if __name__ == "
                "'__main__':`.",
                location=f"--num_proc {num_proc}",
                hint=hint,
            ) from error
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


_function: Callable[[Any], Any] | None = None


def _initialize(function: Callable[[Any], Any]) -> None:
    global _function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _function = function


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)
