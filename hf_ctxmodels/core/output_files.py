"""Checks of output files: existing ones are replaced on request only, and a failed write is a `CtxError`."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model"),
)


def check_output_directory(directory: str | Path, names: Iterable[str], *, flag: str, overwrite: bool) -> None:
    """Check that writing to an output directory replaces nothing.

    Args:
        directory: The output directory; it need not exist.
        names: Names of the files to be written. Other files in the directory do not matter.
        flag: The command-line flag that gave the directory, for the message.
        overwrite: Whether existing files may be replaced.

    Raises:
        CtxError: One of the files exists, or the directory is a file.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise CtxError("The output directory is a file.", location=f"{flag} {directory}", hint="give another name.")
    found = [name for name in names if (directory / name).exists()]
    if found and not overwrite:
        raise CtxError(
            f"The directory already holds {', '.join(found)}.",
            location=f"{flag} {directory}",
            hint="give another directory, or --overwrite to replace them.",
        )


def check_output_file(
    file: str | Path, *, flag: str, overwrite: bool, inputs: Iterable[str | Path | None] = ()
) -> None:
    """Check that writing an output file replaces nothing.

    Args:
        file: The output file; it need not exist.
        flag: The command-line flag that gave the file, for the message.
        overwrite: Whether an existing file may be replaced.
        inputs: Input files; they are never replaced.

    Raises:
        CtxError: The file exists, is one of the inputs, or is a directory.
    """
    file = Path(file)
    if not file.exists():
        return
    if file.is_dir():
        raise CtxError("The output file is a directory.", location=f"{flag} {file}", hint="give the name of a file.")
    if any(Path(each).exists() and file.samefile(each) for each in inputs if each is not None):
        raise CtxError(
            "The output file is one of the files that are read.",
            location=f"{flag} {file}",
            hint="give another name; an input is not replaced, also not with --overwrite.",
        )
    if not overwrite:
        raise CtxError(
            "The file exists.", location=f"{flag} {file}", hint="give another name, or --overwrite to replace it."
        )


def remove_folders(parent: Path, names: Iterable[str]) -> None:
    """Remove folders of these names, where there are any, and with the last one the folder around them."""
    found = [parent / name for name in names if (parent / name).is_dir()]
    for each in found:
        shutil.rmtree(each)
    if found and not any(each.is_dir() for each in parent.iterdir()):
        shutil.rmtree(parent)


@contextmanager
def wrap_write_errors(path: str | Path, hint: str = "make room there, or give another directory.") -> Iterator[None]:
    """Turn a failure to write to `path` into a `CtxError`.

    Args:
        path: Where the body of the `with` statement writes, for the message.
        hint: How to mend it.

    Raises:
        CtxError: The system refused: no space, no permission, a broken disk.
    """
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        # Libraries in Rust (safetensors, tokenizers) raise their own errors, which quote the system's.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise CtxError(f"Writing failed: {error}.", location=str(path), hint=hint) from error
