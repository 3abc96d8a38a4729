"""Codes and subwords as fastBPE and subword-nmt write them."""

from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.tokenizers.joint_bpe import END_OF_WORD

_CONTINUES = "@@"  # suffix of a subword within a word


def read_codes(file: str | Path) -> list[tuple[str, str]]:
    """The merges of a file of lines with two subwords and a count; raises CtxError for other lines."""
    merges = []
    for number, line in enumerate(read_lines(Path(file)), start=1):
        parts = line.split()
        if len(parts) not in (2, 3):
            raise CtxError(f"Not two subwords and a count: {line.strip()!r}.", location=f"{file}, line {number}")
        merges.append((parts[0], parts[1]))
    return merges


def to_native_subword(subword: str) -> str:
    """A subword as the tokenizers here write it: marked where a word ends, rather than where it goes on."""
    return subword.removesuffix(_CONTINUES) if subword.endswith(_CONTINUES) else subword + END_OF_WORD
