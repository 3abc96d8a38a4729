"""Output files: existing ones are replaced only on request, a failed write is a `CtxError`, and the umask decides on
permissions."""

import errno
import gzip
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import save_file
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.paths import is_url, local_path

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
WEIGHT_SHARDS = "model-?????-of-?????.safetensors"
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
"""Each of these files of a tokenizer contains a vocabulary."""
TOKENIZERS_FOLDER = "features"
"""Folder of a saved task network with a folder for the tokenizer of each model."""
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_UMASK_LOCK = threading.Lock()


def require_local(path: str | Path, flag: str = "") -> None:
    """Raise CtxError if an output file or directory is a URL."""
    if is_url(path):
        raise CtxError(
            "The output is a URL, expected a local path.",
            location=f"{flag} {path}".strip(),
            hint="use a local directory, and copy it to the URL afterwards, for example with `rclone sync`.",
        )


def require_writable(directory: str | Path, flag: str) -> None:
    """Raise CtxError if a directory is a URL, or cannot be created or written to; nothing remains of the file that is
    tried."""
    require_local(directory, flag)
    directory = Path(directory).absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        if existing.is_dir():
            reason = f"{existing}: {error.strerror}"
        else:
            reason = f"{existing} is a file" if existing.exists() else f"{existing} is a broken symbolic link"
        raise CtxError(
            f"The output directory cannot be created or written to: {reason}.",
            location=f"{flag} {directory}",
            hint="use a writable directory.",
        ) from error


def check_output_directory(
    directory: str | Path, names: Iterable[str], *, flag: str, overwrite: bool, model: str | Path | None = None
) -> None:
    """Raise CtxError if the directory cannot be written to, is the directory of `model`, contains one of the outputs
    without `overwrite`, or contains a directory with the name of an output file.

    Args:
        names: Outputs in the directory; a name with a suffix is a file, any other name a file or a directory.
    """
    require_writable(directory, flag)
    directory = Path(directory)
    if model is not None and Path(model).is_dir() and directory.resolve() == Path(model).resolve():
        raise CtxError(
            "The output directory is the directory of the model.",
            location=f"{flag} {directory}",
            hint="choose another directory.",
        )
    existing = [name for name in names if os.path.lexists(directory / name)]
    folders = [name for name in existing if Path(name).suffix and (directory / name).is_dir()]
    if folders:
        raise CtxError(
            f"{folders[0]} is a directory, not a file.",
            location=f"{flag} {directory}",
            hint=f"remove or rename {directory / folders[0]}, or choose another directory.",
        )
    if existing and not overwrite:
        raise CtxError(
            f"The directory already holds {', '.join(existing)}.",
            location=f"{flag} {directory}",
            hint="choose another directory, or replace them with --overwrite.",
        )


@contextmanager
def replacing_weights(directory: str | Path, variant: str | None = None) -> Iterator[None]:
    """Remove the other form of the weights, one file or the index of several, that an earlier save has left.

    transformers removes only shards, and `from_pretrained` prefers one file: it would read the old weights after the
    new ones have been saved in several files.
    """
    infix = f".{variant}" if variant else ""
    paths = [Path(directory) / f"model{infix}.safetensors", Path(directory) / f"model.safetensors.index{infix}.json"]
    times = {path: path.stat().st_mtime_ns for path in paths if path.is_file()}
    yield
    present = [path for path in paths if path.is_file()]
    unchanged = [path for path in present if path.stat().st_mtime_ns == times.get(path)]
    if len(present) == 2 and len(unchanged) == 1:
        unchanged[0].unlink()


def check_output_file(
    file: str | Path, *, flag: str, overwrite: bool, inputs: Iterable[str | Path | None] = ()
) -> None:
    """Raise CtxError if an output file is a URL, exists, unless `overwrite`, is a directory or a device, is one of the
    input files (paths or URLs), or cannot be written. A link exists even if its target does not."""
    require_local(file, flag)
    file = Path(file)
    require_writable(Path(os.path.realpath(file)).parent, flag)
    if not os.path.lexists(file):
        return
    location = f"{flag} {file}"
    if file.exists() and not file.is_file():
        kind = "a directory" if file.is_dir() else "a device or a pipe"
        raise CtxError(f"The output file is {kind}.", location=location, hint="choose a file name.")
    paths = [Path(local_path(source)) for source in inputs if source is not None]
    if file.exists() and any(path.exists() and file.samefile(path) for path in paths):
        raise CtxError(
            "The output file is one of the input files.",
            location=location,
            hint="choose another name; inputs are never replaced, not even with --overwrite.",
        )
    if not overwrite:
        raise CtxError(
            "The file exists.", location=location, hint="choose another name, or replace it with --overwrite."
        )


def remove_folders(parent: Path, names: Iterable[str]) -> None:
    """Remove the existing folders of these names, and the parent if no folder remains in it."""
    folders = [parent / name for name in names if (parent / name).is_dir()]
    for folder in folders:
        shutil.rmtree(folder)
    if folders and not any(entry.is_dir() for entry in parent.iterdir()):
        shutil.rmtree(parent)


_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow writing there"),
    errno.ENOENT: "create the directory again, if it was removed",
}


@contextmanager
def wrap_write_errors(
    path: str | Path, hint: str | None = None, *, next_step: str = ", or choose another directory"
) -> Iterator[None]:
    """Convert a failed write of a file or directory to a `CtxError`.

    Args:
        hint: The fix; by default one for the error (no space, no permission, no directory, or a defective disk), and
            `next_step`.
    """
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        # Libraries in Rust (safetensors, tokenizers) raise other classes, which quote the system's message.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        quoted = re.search(r"os error (\d+)", str(error))
        number = int(quoted[1]) if quoted else getattr(error, "errno", None) or 0
        hint = hint or f"{_FIXES.get(number, 'check the path and the disk')}{next_step}."
        raise CtxError(f"Writing failed: {error}.", location=str(path), hint=hint) from error


@contextmanager
def replacing(file: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of a file, which is created, and rename it to the file afterwards.

    A link remains, and its target is replaced. The path is unique: several processes, also of different machines, may
    write the same file. It is removed if writing fails; raises CtxError in this case, and for a URL.
    """
    require_local(file)
    path = Path(os.path.realpath(file))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.writing")
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_files(
    directory: str | Path, previous: Collection[str] = (), *, main_file: str = "config.json"
) -> Iterator[Path]:
    """Yield a temporary folder in a directory, which is created, and move its files to the directory afterwards.

    The directory is unchanged if writing fails; raises CtxError in this case, and for a URL. Links are replaced, not
    their targets, which may be files of another model: the weights of an ONNX file, for example, are looked up next to
    the link.

    Args:
        previous: Names, or patterns of names, of files and folders of a previous model, which are removed before.
        main_file: File that is moved last, after the previous one was removed: without it, files that are moved in part
            are no model.
    """
    require_local(directory)
    directory = Path(directory)
    temporary = directory / f".output.{uuid.uuid4().hex}.writing"
    with wrap_write_errors(directory):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            paths = [path for path in directory.iterdir() if any(fnmatch(path.name, name) for name in previous)]
            replace_files(temporary, directory, paths, main_file=main_file)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def replace_files(temporary: Path, directory: Path, previous: Iterable[Path], *, main_file: str) -> None:
    """Move the files in a folder and its subfolders to a directory, each atomically, after they are on the disk, and
    remove files and folders of a previous model; see `replacing_files` for the order."""
    main_path = temporary / main_file
    paths = sorted((path for path in temporary.rglob("*") if path.is_file()), key=lambda path: path == main_path)
    for path in paths:
        flush_to_disk(path)
    if main_path in paths:
        (directory / main_file).unlink(missing_ok=True)
    for path in previous:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    for path in paths:
        target = directory / path.relative_to(temporary)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    flush_to_disk(directory)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk. Windows cannot open a directory, and flushes a
    file only if it is open for writing."""
    is_directory = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_directory else os.O_RDWR)
    except PermissionError:
        if is_directory:
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_compressed(path: str | Path, suffix: str) -> Iterator[BinaryIO]:
    """Open a file for writing bytes, which are compressed for the suffix `.gz` or `.zst`; equal bytes give equal
    files."""
    with ExitStack() as stack:
        if suffix == ".zst":
            import pyarrow

            yield stack.enter_context(pyarrow.CompressedOutputStream(str(path), "zstd"))
            return
        file: Any = stack.enter_context(open(path, "wb"))
        if suffix == ".gz":  # without name and time, which its header would have
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        yield file


def write_text_file(file: str | Path, text: str) -> None:
    """Write a text file atomically, and its folders, compressed if its name ends in `.gz` or `.zst`; raises CtxError if
    writing fails."""
    with replacing(file) as temporary, write_compressed(temporary, Path(file).suffix) as output:
        output.write(text.encode())


def write_tensors(file: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of a new file; tensors on other devices or with other strides are
    copied."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file, metadata)
    apply_umask([file])


def apply_umask(files: Iterable[str | Path]) -> None:
    """Give files the permissions of new files, 0666 without the umask: safetensors writes them with 0600."""
    with _UMASK_LOCK:  # the umask can only be read by setting it
        umask = os.umask(0o077)
        os.umask(umask)
    for file in files:
        os.chmod(file, 0o666 & ~umask)
