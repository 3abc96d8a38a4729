"""Reading of the BPE files of fastBPE and subword-nmt."""

from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.tokenizers.bpe import END_OF_WORD

_CONTINUATION = "@@"  # suffix of all subwords of a word except the last one


def read_codes(file: str | Path) -> list[tuple[str, str]]:
    """Read the merges of a codes file, whose lines are two subwords and optionally a count.

    Raises:
        CtxError: A line has another format.
    """
    merges = []
    for number, line in enumerate(read_lines(Path(file)), start=1):
        parts = line.split()
        if len(parts) not in (2, 3):
            raise CtxError(f"Not two subwords and a count: {line.strip()!r}.", location=f"{file}, line {number}")
        merges.append((parts[0], parts[1]))
    return merges


def to_native_subword(subword: str) -> str:
    """Convert a subword with the mark of continuation to one with the mark of the end of a word."""
    if subword.endswith(_CONTINUATION):
        return subword.removesuffix(_CONTINUATION)
    return subword + END_OF_WORD
