"""Word similarity and analogies as tests of word vectors, with how much of each test is covered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from hf_ctxmodels.analysis.word_relations import WordSpace
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import read_lines
from hf_ctxmodels.data.tasks.metrics import spearmanr

Pair = tuple[str, str, float]
Question = tuple[str, str, str, str]
_Tests = TypeVar("_Tests", list[Pair], dict[str, list[tuple[str, str, str, str]]])


@dataclass(frozen=True)
class SimilarityResult:
    """How a test of word similarity came out.

    Attributes:
        spearman: rank correlation of cosines with people's judgements over the covered pairs; NaN for fewer than two.
        covered, pairs: pairs both of whose words have a vector, and all pairs.
    """

    spearman: float
    covered: int
    pairs: int


@dataclass(frozen=True)
class AnalogyResult:
    """How a test of analogies came out.

    Attributes:
        sections: name -> (right answers, covered questions, all questions).
    """

    sections: Mapping[str, tuple[int, int, int]]

    @property
    def total(self) -> tuple[int, int, int]:
        """Right answers, covered questions, all questions."""
        right, covered, every = (sum(column) for column in zip(*self.sections.values()))
        return right, covered, every

    @property
    def accuracy(self) -> float:
        """Share of right answers among the covered questions; NaN where none is covered."""
        right, covered, _ = self.total
        return right / covered if covered else float("nan")


def read_similarities(path: str | Path) -> list[Pair]:
    """Pairs with a judgement: two words and a number a line, separated by tabs, in the form of Faruqui & Dyer 2014.

    Raises:
        CtxError: the file or a line of it cannot be read.
    """
    pairs = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        parts = line.rstrip("\r\n").split("\t")
        if len(parts) < 3 or not _is_number(parts[2]):
            raise CtxError(
                f"Not two words and a number, separated by tabs: {line.strip()!r}.",
                location=f"{path}, line {number}",
                hint="correct the line; a header has to go.",
            )
        pairs.append((parts[0], parts[1], float(parts[2])))
    return _not_empty(pairs, path)


def read_analogies(path: str | Path) -> dict[str, list[Question]]:
    """Section -> questions, from a file with `: section` lines and lines of four words (Mikolov et al. 2013a).

    Raises:
        CtxError: the file or a line of it cannot be read.
    """
    sections: dict[str, list[Question]] = {}
    name = ""
    for number, line in enumerate(read_lines(Path(path)), start=1):
        parts = line.split()
        if parts[:1] == [":"]:
            name = " ".join(parts[1:])
        elif len(parts) == 4:
            sections.setdefault(name, []).append((parts[0], parts[1], parts[2], parts[3]))
        elif parts:
            raise CtxError(
                f"Neither four words nor `: section`: {line.strip()!r}.",
                location=f"{path}, line {number}",
                hint="correct the line.",
            )
    return _not_empty(sections, path)


def evaluate_similarity(space: WordSpace, pairs: Sequence[Pair]) -> SimilarityResult:
    """Spearman's rank correlation between cosines and judgements."""
    covered = [pair for pair in pairs if pair[0] in space and pair[1] in space]
    known = [(space.similarity(first, second), score) for first, second, score in covered]
    if len(known) < 2:
        return SimilarityResult(float("nan"), len(known), len(pairs))
    found, expected = zip(*known)
    return SimilarityResult(spearmanr(predictions=found, references=expected)["spearmanr"], len(known), len(pairs))


def evaluate_analogies(space: WordSpace, sections: Mapping[str, Sequence[Question]]) -> AnalogyResult:
    """Share of the questions a : b = c : ? whose best answer by 3CosAdd is the expected word.

    A question is covered where its four words have a vector, the expected one among those that are searched.
    """
    results = {}
    for name, questions in sections.items():
        rows = [[space.place(word) for word in words] for words in questions if all(word in space for word in words)]
        places = torch.tensor(rows, dtype=torch.long).view(-1, 4)
        places = places[places[:, 3] < len(space.searched)]
        right = int((space.solve(places[:, :3]) == places[:, 3].to(space.unit.device)).sum()) if len(places) else 0
        results[name] = (right, len(places), len(questions))
    return AnalogyResult(results)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _not_empty(found: _Tests, path: str | Path) -> _Tests:
    if not found:
        raise CtxError("The file holds no test.", location=str(path), hint="check the path.")
    return found
