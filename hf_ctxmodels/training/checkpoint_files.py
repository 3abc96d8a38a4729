"""Checkpoint directories: written atomically, verified before use, and locked by one run at a time.

`<output_dir>/checkpoint-<step>/` is renamed from a temporary name once all of its files are on disk. `manifest.json`,
also in the directory of the final model, has the SHA-256 of each file. Unfinished directories are removed at the next
start.
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import file_digest, matches_type, read_json
from hf_ctxmodels.core.output_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    check_output_directory,
    flush_to_disk,
    replace_files,
    require_writable,
    wrap_write_errors,
)
from hf_ctxmodels.training.arguments import LoopArguments

LOCK_FILE = ".lock"
MANIFEST_FILE = "manifest.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = re.compile(r"checkpoint-\d+\.(writing|deleting)|model\.writing|\..+\.[0-9a-f]{32}\.writing")
_RUN_OUTPUTS = ("quantized", "best.safetensors", "lr_range_test.csv", "lr_range_test.png")
"""Outputs of a run in addition to the final model, which a new run deletes."""
_SUMMARY_OUTPUTS = ("training_summary.json", "training_log.jsonl", "training_curve.png")
OVERWRITTEN_FOLDER = "overwritten"
"""The overwritten run and its model, until the first checkpoint of the new run is complete."""


@contextmanager
def locked_output_dir(
    accelerator: Accelerator,
    arguments: LoopArguments,
    tokenizer_source: str | None = None,
    model_source: str | None = None,
) -> Iterator[Path | None]:
    """Lock the output directory for one run and remove unfinished files; yields the verified checkpoint to resume from.

    With `overwrite`, a run and a model in the directory are restored if the new run ends before its first checkpoint. A
    model that is `model_source`, which a resumed run reads again, remains until the final model replaces it.

    All processes raise CtxError if the directory cannot be created, is locked by another run, contains a run or a model
    that is neither to be resumed nor to be overwritten, or the newest checkpoint is damaged.
    """
    output_dir = Path(arguments.output_dir)
    # the operating system releases the lock when the process ends; file systems without locks are not locked
    lock = FileLock(output_dir / LOCK_FILE, blocking=False, fallback_to_soft=False)
    checkpoint: Path | None = None
    error: tuple[str, Any, Any] | None = None
    try:
        if accelerator.is_main_process:
            try:
                _lock(lock, output_dir)
                _prepare_output_dir(output_dir, arguments, tokenizer_source, model_source)
                checkpoint = latest_checkpoint(output_dir) if arguments.resume else None
            except CtxError as failure:
                error = failure.message, failure.location, failure.hint
        # also an error: the other processes would wait for the main process forever
        checkpoint, error = broadcast_object_list([checkpoint, error])
        if error is not None:
            message, location, hint = error
            raise CtxError(message, location=location, hint=hint)
        yield checkpoint
    finally:
        if lock.is_locked:
            _restore_overwritten(output_dir)
        lock.release()


def _lock(lock: FileLock, output_dir: Path) -> None:
    """Create the output directory and lock it."""
    file = output_dir / LOCK_FILE
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise CtxError(
            f"The output directory cannot be created or written to: {error.strerror}.",
            location=f"--output_dir {output_dir}",
            hint="use a writable directory.",
        ) from error
    try:
        lock.acquire()
    except Timeout as error:
        owner = file.read_text(encoding="utf-8", errors="replace").strip()
        raise CtxError(
            f"Another run is training into this directory{f' ({owner})' if owner else ''}.",
            location=f"--output_dir {output_dir}",
            hint="wait until it has ended, or pass another --output_dir.",
        ) from error
    except OSError:  # a file system without locks
        return
    with suppress(OSError):
        file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")


def check_run_directory(arguments: LoopArguments, tokenizer_source: str | None) -> None:
    """Raise CtxError if the output directory cannot be written to, or contains a run or a model that is neither to be
    resumed nor to be overwritten; to be called before data and models are read. A tokenizer in the directory is an
    existing file unless it is the run's, from `tokenizer_source`."""
    require_writable(arguments.output_dir, "--output_dir")
    output_dir = Path(arguments.output_dir)
    existing = list_checkpoints(output_dir)
    if existing and not (arguments.resume or arguments.overwrite):
        raise CtxError(
            f"The output directory already has a checkpoint, {existing[-1].name}.",
            location=str(output_dir),
            hint="continue that run with --resume, end it with --resume finish, pass another --output_dir, or delete "
            "that run with --overwrite.",
        )
    if arguments.resume == "finish" and not existing:
        raise CtxError(
            "There is no checkpoint to finish the run with.",
            location=f"--output_dir {output_dir}",
            hint="check --output_dir, or remove --resume finish to start the run.",
        )
    if not (existing and arguments.resume):
        # the run's tokenizer may already be in its output directory
        has_tokenizer = tokenizer_source is None or Path(tokenizer_source).resolve() == output_dir.resolve()
        names = MODEL_FILES if has_tokenizer else (*MODEL_FILES, *TOKENIZER_FILES)
        if not existing:  # a killed run did not restore what it was to overwrite
            names = (*names, OVERWRITTEN_FOLDER)
        check_output_directory(output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)


def _prepare_output_dir(
    output_dir: Path, arguments: LoopArguments, tokenizer_source: str | None, model_source: str | None
) -> None:
    """Refuse to replace an existing run, or move it away if `overwrite` is set; remove files of a killed run."""
    _restore_overwritten(output_dir)
    check_run_directory(arguments, tokenizer_source)
    for path in [path for path in output_dir.iterdir() if _UNFINISHED.fullmatch(path.name)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not arguments.overwrite:
        return
    paths = [*list_checkpoints(output_dir), *(output_dir / name for name in _RUN_OUTPUTS)]
    if not model_source or Path(model_source).resolve() != output_dir.resolve():
        names = (*MODEL_FILES, *_SUMMARY_OUTPUTS, *_model_parts(output_dir), MANIFEST_FILE)
        paths += [output_dir / name for name in names]
    for path in paths:
        if path.exists():
            _move(path, output_dir, output_dir / OVERWRITTEN_FOLDER)


def _restore_overwritten(output_dir: Path) -> None:
    """Restore what a run overwrote that has ended without a checkpoint; delete it if the run has one."""
    folder = output_dir / OVERWRITTEN_FOLDER
    if not folder.is_dir():
        return
    if not list_checkpoints(output_dir):
        for path in [*list_checkpoints(folder), *(path for path in sorted(folder.rglob("*")) if path.is_file())]:
            if path.exists():  # not in a folder that was moved
                _move(path, folder, output_dir)
    shutil.rmtree(folder, ignore_errors=True)


def _move(path: Path, source: Path, target: Path) -> None:
    """Move a file or folder to its relative path in another directory, and remove folders that it leaves empty."""
    destination = target / path.relative_to(source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    path.replace(destination)
    _remove_empty_folders(path.parent, source)


def _remove_empty_folders(folder: Path, root: Path) -> None:
    """Remove a folder and its parents below `root` that are empty."""
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _model_parts(directory: Path) -> list[str]:
    """Weights and files in folders of a model, such as adapters, by its manifest."""
    try:
        names = _read_manifest(directory)
    except CtxError:
        return []
    weights = (".safetensors", ".safetensors.index.json")
    is_part = {name: ".." not in Path(name).parts and ("/" in name or name.endswith(weights)) for name in names}
    return [name for name in names if is_part[name] and os.path.isfile(directory / name)]


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def temporary_path(path: Path) -> Path:
    """The temporary name of `path`, in the same directory, so that the rename is atomic."""
    return path.with_name(path.name + ".writing")


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    directory = Path(output_dir)
    paths = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    matches = [(match, path) for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted((int(match.group(1)), path) for match, path in matches)]


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint, or None; raises CtxError with the damaged files and the newest undamaged checkpoint."""
    checkpoints = list_checkpoints(output_dir)
    if not checkpoints or not (damages := damaged_files(checkpoints[-1])):
        return checkpoints[-1] if checkpoints else None
    *older, newest = checkpoints
    last_good = next((path for path in reversed(older) if not damaged_files(path)), None)
    consequence = (
        f"--resume then continues from the last good checkpoint, {last_good}"
        if last_good
        else "training then starts from the beginning"
    )
    raise CtxError(
        f"The checkpoint is damaged: {'; '.join(damages)}.",
        location=str(newest),
        hint=f"delete this directory (rm -r {newest}) and run the same command again: {consequence}.",
    )


def damaged_files(checkpoint: Path, pattern: str = "*") -> list[str]:
    """One line for each damaged file whose name matches the pattern; empty if all are intact.

    Raises:
        CtxError: A file cannot be read.
    """
    try:
        manifest = _read_manifest(checkpoint)
    except CtxError as error:
        return [f"{MANIFEST_FILE} cannot be read ({error.message})"]
    damages = []
    for name, digest in manifest.items():
        if not fnmatchcase(name, pattern):
            continue
        if not os.path.isfile(checkpoint / name):  # `Path.is_file` raises for names in damaged manifests
            damages.append(f"{name} is missing")
            continue
        with wrap_errors("The file cannot be read", location=checkpoint / name, hint="check the disk."):
            if file_digest(checkpoint / name) != digest:
                damages.append(f"{name} was truncated or changed after it was saved")
    return damages


def commit_checkpoint(temporary: Path, final: Path, digests: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write the manifest of `temporary`, flush all files to disk, and rename it.

    Args:
        digests: File, relative to the directory -> SHA-256, of files that need not be read again.
    """
    for path in [*_write_manifest(temporary, digests), temporary]:
        flush_to_disk(path)
    temporary.rename(final)
    flush_to_disk(final.parent)
    shutil.rmtree(final.parent / OVERWRITTEN_FOLDER, ignore_errors=True)


def move_files(temporary: Path, directory: Path) -> None:
    """Move all files of `temporary` and its folders into `directory`, each atomically, the manifest last; weights and
    folders of an earlier model, listed in its manifest, are removed."""
    files = {directory / path.relative_to(temporary) for path in _write_manifest(temporary)}
    earlier_parts = {directory / name for name in _model_parts(directory)} - files
    replace_files(temporary, directory, earlier_parts, main_file=MANIFEST_FILE)
    shutil.rmtree(temporary)
    for path in earlier_parts:
        _remove_empty_folders(path.parent, directory)


@contextmanager
def replacing_model(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder in a directory, which is created, and `move_files` from it to the directory afterwards.

    A CtxError is raised if writing fails; the directory is unchanged until all files are written."""
    temporary = temporary_path(directory / "model")
    with wrap_write_errors(directory):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            move_files(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def delete_old_checkpoints(output_dir: str | Path, keep: int, retained_steps: Collection[int] = ()) -> None:
    """Delete all checkpoints except the `keep` newest ones and the checkpoints of `retained_steps`."""
    retained = {checkpoint_path(output_dir, step) for step in retained_steps}
    for path in [path for path in list_checkpoints(output_dir) if path not in retained][: -keep or None]:
        # renamed first: a partly deleted directory must not look like a checkpoint
        renamed = path.with_name(path.name + ".deleting")
        try:
            path.rename(renamed)
        except PermissionError:  # Windows, where the optimizer maps the files of the checkpoint of a resumed run
            continue
        shutil.rmtree(renamed)


def _read_manifest(directory: Path) -> dict[str, str]:
    """File -> SHA-256."""
    manifest = read_json(directory / MANIFEST_FILE)
    digests = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not matches_type(digests, dict[str, str]):
        raise CtxError("it does not map file names to digests")
    return digests  # type: ignore[return-value]


def _write_manifest(directory: Path, digests: Mapping[str, str] = MappingProxyType({})) -> list[Path]:
    """Write the digests of all files to `manifest.json`; returns all files, the manifest last."""
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    digests = {name: digests.get(name) or file_digest(path) for name, path in files.items()}
    manifest = directory / MANIFEST_FILE
    manifest.write_text(json.dumps({"sha256": digests}, indent=2) + "\n", encoding="utf-8")
    return [*files.values(), manifest]
