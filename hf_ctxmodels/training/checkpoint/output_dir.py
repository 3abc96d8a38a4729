"""The output directory of a run: held by one process at a time, and cleaned of nothing but its own leftovers."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import MODEL_FILES, TOKENIZER_FILES, check_output_directory
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint import directory as checkpoints

try:
    import fcntl
except ImportError:  # Windows has no flock: two runs in one directory are not noticed there
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
# What this package writes under a temporary name: checkpoints, the final model, the log.
_UNFINISHED = re.compile(r"checkpoint-\d+\.(writing|deleting)|(model|training_log\.jsonl)\.writing")
_OF_A_RUN = ("quantized", "best.safetensors")  # what a run makes beside the final model
_HELD: set[int] = set()


@contextmanager
def locked_output_dir(
    accelerator: Accelerator, arguments: LoopArguments, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Path | None]:
    """Hold the output directory for one run, free of half-written files; gives the verified checkpoint to resume from.

    Raises:
        CtxError: It cannot be made, another run holds it, it holds a run or a model that is neither to be resumed nor
            to be overwritten, or the newest checkpoint is damaged. All processes raise alike.
    """
    output_dir = Path(arguments.output_dir)
    lock: list[int] = []

    def claim() -> None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            lock.append(os.open(output_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666))
        except OSError as error:
            raise CtxError(
                f"The output directory cannot be created or written to: {error.strerror}.",
                location=f"--output_dir {output_dir}",
                hint="give a writable directory.",
            ) from error
        _lock(lock[0], output_dir)
        _prepare(output_dir, arguments, tokenizer)

    try:
        _on_main_process(accelerator, claim)
        yield checkpoints.latest_checkpoint(output_dir) if arguments.resume else None
    finally:
        for descriptor in lock:
            _HELD.discard(descriptor)
            os.close(descriptor)


def remove_unfinished(output_dir: Path) -> list[Path]:
    """Remove what a killed process of this package left half-written or half-deleted, and return it."""
    found = [path for path in output_dir.iterdir() if _UNFINISHED.fullmatch(path.name)]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _prepare(output_dir: Path, arguments: LoopArguments, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse to overwrite, or do so where it is asked for; clean."""
    existing = checkpoints.checkpoints(output_dir)
    if existing and not (arguments.resume or arguments.overwrite):
        raise CtxError(
            f"The output directory already has a checkpoint, {existing[-1].name}.",
            location=str(output_dir),
            hint="continue that run with --resume, give another --output_dir, or delete that run with --overwrite.",
        )
    if not (existing and arguments.resume):
        own_tokenizer = tokenizer is None or Path(tokenizer.name_or_path).resolve() == output_dir.resolve()
        names = MODEL_FILES if own_tokenizer else (*MODEL_FILES, *TOKENIZER_FILES)
        check_output_directory(output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)
    remove_unfinished(output_dir)
    if arguments.overwrite:
        checkpoints.prune(output_dir, keep=0)
        for name in _OF_A_RUN:
            path = output_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _lock(descriptor: int, output_dir: Path) -> None:
    """Take the lock, which the system releases with the process, whatever ends it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        raise CtxError(
            f"Another run is training into this directory{f' ({holder})' if holder else ''}.",
            location=f"--output_dir {output_dir}",
            hint="wait until it has ended, or give another --output_dir.",
        ) from error
    except OSError:  # a file system without locks
        return
    _HELD.add(descriptor)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)


def _let_go() -> None:
    """In a forked process: a data worker that outlives a killed run must not keep its directory locked."""
    while _HELD:
        os.close(_HELD.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _on_main_process(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Do it once, and raise its `CtxError` in every process: one that waited for the others would wait for ever."""
    failed: list[tuple[str, str | None, str | None] | None] = [None]
    if accelerator.is_main_process:
        try:
            action()
        except CtxError as error:
            failed = [(error.message, error.location, error.hint)]
    broadcast_object_list(failed)
    if failed[0] is not None:
        what, location, hint = failed[0]
        raise CtxError(what, location=location, hint=hint)
