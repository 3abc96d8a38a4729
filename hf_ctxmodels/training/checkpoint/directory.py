"""Checkpoint directories, written atomically and verified before use.

`<output_dir>/checkpoint-<step>/` is renamed from a temporary name after all of its files are on disk; unfinished
directories are removed at the next start (see `output_dir`). `manifest.json`, also beside the final model, has every
file's SHA-256.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.json_parsing import matches_type, read_json

MANIFEST_FILE = "manifest.json"
_COMPLETE = re.compile(r"checkpoint-(\d+)")


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def temporary_path(path: Path) -> Path:
    """The temporary name of `path`, in the same directory, so that the rename is atomic."""
    return path.with_name(path.name + ".writing")


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    directory = Path(output_dir)
    found = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    matches = [(match, path) for path in found if (match := _COMPLETE.fullmatch(path.name))]
    return [path for _, path in sorted((int(match.group(1)), path) for match, path in matches)]


def commit(temporary: Path, final: Path) -> None:
    """Write the manifest of `temporary` and rename it, durably."""
    for path in [*_write_manifest(temporary), temporary]:
        _fsync(path)
    temporary.rename(final)
    _fsync(final.parent)


def publish_files(temporary: Path, directory: Path) -> None:
    """Move all files of `temporary` and its folders into `directory`, each atomically, the manifest last. Weights and
    folders of a model that was there before, by its manifest, are removed: adapters, for example."""
    files = _write_manifest(temporary)
    earlier = _listed(directory)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)  # it has the digests of the old files
    for path in files:
        _fsync(path)
        target = directory / path.relative_to(temporary)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    shutil.rmtree(temporary)
    for name in earlier - {str(path.relative_to(temporary)) for path in files}:
        replaceable = ".." not in Path(name).parts and ("/" in name or name.endswith(".safetensors"))
        if replaceable and os.path.isfile(directory / name):  # of a damaged manifest, `Path.is_file` would raise
            (directory / name).unlink()
            _remove_empty((directory / name).parent, directory)
    _fsync(directory)


def _listed(directory: Path) -> set[str]:
    """The files that a directory's manifest names, if it has one that can be read."""
    try:
        return set(read_json(directory / MANIFEST_FILE)["sha256"])
    except (CtxError, KeyError, TypeError):
        return set()


def _remove_empty(folder: Path, above: Path) -> None:
    """Remove a folder below another, and those between, as far as they are empty."""
    while folder != above and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def prune(output_dir: str | Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints."""
    for path in checkpoints(output_dir)[: -keep or None]:
        # renamed first: a partly deleted directory must not look like a checkpoint
        doomed = path.with_name(path.name + ".deleting")
        path.rename(doomed)
        shutil.rmtree(doomed)


def damaged_files(checkpoint: Path, ending: str = "") -> list[str]:
    """The damages of the files with this ending, one line each; empty if there are none."""
    try:
        manifest: dict[str, str] = read_json(checkpoint / MANIFEST_FILE)["sha256"]
    except (CtxError, KeyError, TypeError) as error:
        return [f"{MANIFEST_FILE} cannot be read ({error.message if isinstance(error, CtxError) else error})"]
    if not matches_type(manifest, dict[str, str]):
        return [f"{MANIFEST_FILE} does not name files with their digests"]
    damages = []
    for name, digest in manifest.items():
        if not name.endswith(ending):
            continue
        if not os.path.isfile(checkpoint / name):
            damages.append(f"{name} is missing")
        elif _sha256(checkpoint / name) != digest:
            damages.append(f"{name} was truncated or changed after it was saved")
    return damages


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint after verification, or None.

    Raises:
        CtxError: It is damaged; the message names the files and the newest undamaged checkpoint.
    """
    found = checkpoints(output_dir)
    if not found:
        return None
    *older, newest = found
    damages = damaged_files(newest)
    if not damages:
        return newest
    good = next((path for path in reversed(older) if not damaged_files(path)), None)
    then = (
        f"--resume then continues from the last good checkpoint, {good}"
        if good
        else "training then starts from the beginning"
    )
    raise CtxError(
        f"The checkpoint is damaged: {'; '.join(damages)}.",
        location=str(newest),
        hint=f"delete this directory (rm -r {newest}) and run the same command again: {then}.",
    )


def _write_manifest(directory: Path) -> list[Path]:
    """Write the digests of all files to `manifest.json`; returns all files, this one last."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = {str(path.relative_to(directory)): _sha256(path) for path in files}
    manifest = directory / MANIFEST_FILE
    manifest.write_text(json.dumps({"sha256": digests}, indent=2) + "\n", encoding="utf-8")
    return [*files, manifest]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
