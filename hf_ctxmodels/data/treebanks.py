"""CoNLL-U treebanks -> sentences with their annotation, with errors that name the file and the line.

Files may be compressed (`.gz` or `.zst`), or URLs.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.table_files import conllu_cells, line_blocks

PTB_PUNCTUATION = frozenset(("''", ",", ".", ":", "``", "-LRB-", "-RRB-"))


@dataclass(frozen=True)
class TreebankSentence:
    """The syntactic words of a sentence with their annotation, one item per word in each list.

    `heads` are word indices from 0, -1 for the root. Multiword tokens (`3-4`) and empty nodes (`8.1`) are left out.
    """

    words: list[str]
    lemmas: list[str]
    upos: list[str]
    xpos: list[str]
    features: list[dict[str, str]]
    heads: list[int]
    relations: list[str]
    misc: list[dict[str, str]]
    document: str
    location: str

    def is_punctuation(self) -> list[bool]:
        """Words with the UPOS tag PUNCT or SYM; without UPOS tags, with a punctuation tag of the Penn Treebank."""
        return [
            upos in ("PUNCT", "SYM") or (upos == "_" and xpos in PTB_PUNCTUATION)
            for upos, xpos in zip(self.upos, self.xpos, strict=True)
        ]

    def depths(self) -> list[int]:
        """Number of arcs between each word and the root, which has depth 0; raises CtxError unless the heads are a
        tree."""
        roots = [word for word, head in enumerate(self.heads) if head < 0]
        dependents = defaultdict(list)
        for word, head in enumerate(self.heads):
            dependents[head].append(word)
        depths = dict.fromkeys(roots, 0)
        queue = list(roots)
        for word in queue:
            queue += dependents[word]
            depths |= dict.fromkeys(dependents[word], depths[word] + 1)
        if len(roots) != 1 or len(depths) != len(self.words):
            raise CtxError(
                f"The heads are not a tree: {len(roots)} roots, {len(self.words) - len(depths)} words in a circle.",
                location=self.location,
                hint="correct the HEAD column, exactly one word has the head 0.",
            )
        return [depths[word] for word in range(len(self.words))]

    def subtree(self, root: int) -> list[int]:
        """The words below a word and the word itself, in order."""
        words = {root}
        while added := {word for word, head in enumerate(self.heads) if head in words} - words:
            words |= added
        return sorted(words)


def read_treebank(file: str | Path) -> list[TreebankSentence]:
    """Sentences of a CoNLL-U file (Universal Dependencies).

    A head that is not annotated (`_`) is -1: `depths` then raises an error, and tags can still be read.

    Raises:
        CtxError: A line is invalid, word ids are not 1, 2, 3, ..., a head is not a word of the sentence, or there are
            no sentences.
    """
    sentences = []
    document = ""
    for lines in line_blocks(file):
        rows: list[list[str]] = []
        locations: list[str] = []
        for number, line in lines:
            if match := re.match(r"#\s*newdoc(?:\s+id\s*=\s*(.*))?$", line):
                document = (match[1] or "").strip() or f"{file}:{number}"
            location = f"{file}:{number}"
            cells = conllu_cells(line, location)
            if not cells:
                continue
            if int(cells[0]) != len(rows) + 1:
                raise CtxError(
                    f"Word {cells[0]} follows word {len(rows)}.",
                    location=location,
                    hint="number the words of a sentence from 1, and write a blank line between sentences.",
                )
            rows.append(cells)
            locations.append(location)
        if rows:
            heads = [_head(cells, len(rows), location) for cells, location in zip(rows, locations, strict=True)]
            columns = list(zip(*rows))
            sentences.append(
                TreebankSentence(
                    words=list(columns[1]),
                    lemmas=list(columns[2]),
                    upos=list(columns[3]),
                    xpos=list(columns[4]),
                    features=[_attributes(cell) for cell in columns[5]],
                    heads=heads,
                    relations=list(columns[7]),
                    misc=[_attributes(cell) for cell in columns[9]],
                    document=document,
                    location=locations[0],
                )
            )
    if not sentences:
        raise CtxError("No sentences.", location=str(file), hint="use a CoNLL-U file with at least one sentence.")
    return sentences


def _head(cells: Sequence[str], num_words: int, location: str) -> int:
    """Index of the head of a word; -1 for the root and without annotation."""
    if cells[6] == "_":
        return -1
    if not cells[6].isdecimal() or int(cells[6]) > num_words or cells[6] == cells[0]:
        raise CtxError(
            f"The head {cells[6]!r} of word {cells[0]} ({cells[1]}) is no other word of the sentence.",
            location=location,
            hint=f"use 0 for the root, or another number up to {num_words}.",
        )
    return int(cells[6]) - 1


def _attributes(cell: str) -> dict[str, str]:
    """`A=x|B=y` as a dictionary."""
    return dict(item.partition("=")[::2] for item in cell.split("|")) if cell != "_" else {}  # type: ignore[misc]


def is_treebank(file: str | Path) -> bool:
    """Whether a file is in CoNLL-U by its name."""
    return file_suffix(file) == ".conllu"
