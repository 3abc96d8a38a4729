"""What is written: nothing is overwritten unless it is asked for, and a full disk is an error of one screen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model"),
)


def check_new_directory(directory: str | Path, names: Iterable[str], *, flag: str, overwrite: bool) -> None:
    """Hold a directory that is about to be written against what it holds already.

    Args:
        directory: It need not exist.
        names: Of the files that are written into it; others may be there.
        flag: That named the directory.
        overwrite: Whether they may be replaced.

    Raises:
        CtxError: Some of the files are there, or it is a file itself.
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


def check_new_file(file: str | Path, *, flag: str, overwrite: bool, inputs: Iterable[str | Path | None] = ()) -> None:
    """Hold a file that is about to be written against what is there.

    Args:
        file: It need not exist.
        flag: That named it.
        overwrite: Whether it may be replaced.
        inputs: Files that are read; they are never replaced.

    Raises:
        CtxError: It is there, it is one of the inputs, or a directory.
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


@contextmanager
def writing(path: str | Path, hint: str = "make room there, or give another directory.") -> Iterator[None]:
    """Within, files are written to `path`.

    Raises:
        CtxError: the system refused: no space, no permission, a broken disk.
    """
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        # What is written in Rust (safetensors, tokenizers) raises errors of its own, which quote the system's.
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise CtxError(f"Writing failed: {error}.", location=str(path), hint=hint) from error
