"""Word similarity and analogies as tests of word vectors, with the coverage of each test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.tasks.metrics import spearmanr
from hf_ctxmodels.evaluation.word_relations import WordSpace

Pair = tuple[str, str, float]
Question = tuple[str, str, str, str]
_Tests = TypeVar("_Tests", list[Pair], dict[str, list[tuple[str, str, str, str]]])


@dataclass(frozen=True)
class SimilarityResult:
    """Result of a test of word similarity.

    Attributes:
        spearman: Rank correlation of cosines with human judgements over the covered pairs; NaN for fewer than two.
        covered, pairs: Numbers of pairs whose words have vectors, and of all pairs.
    """

    spearman: float
    covered: int
    pairs: int


@dataclass(frozen=True)
class AnalogyResult:
    """Result of a test of analogies.

    Attributes:
        sections: Name -> numbers of correct answers, covered questions and all questions.
    """

    sections: Mapping[str, tuple[int, int, int]]

    @property
    def total(self) -> tuple[int, int, int]:
        """Numbers of correct answers, covered questions and all questions."""
        right, covered, every = (sum(column) for column in zip(*self.sections.values()))
        return right, covered, every

    @property
    def accuracy(self) -> float:
        """Share of correct answers among the covered questions; NaN if none is covered."""
        right, covered, _ = self.total
        return right / covered if covered else float("nan")


def read_similarities(path: str | Path) -> list[Pair]:
    """Pairs with a judgement: lines of two words and a number, separated by tabs, as in Faruqui & Dyer 2014.

    Raises:
        CtxError: The file cannot be read.
    """
    pairs = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        parts = line.rstrip("\r\n").split("\t")
        if len(parts) < 3 or not _is_number(parts[2]):
            raise CtxError(
                f"Not two words and a number, separated by tabs: {line.strip()!r}.",
                location=f"{path}, line {number}",
                hint="correct the line, or remove the header.",
            )
        pairs.append((parts[0], parts[1], float(parts[2])))
    return _not_empty(pairs, path)


def read_analogies(path: str | Path) -> dict[str, list[Question]]:
    """Section -> questions, from a file with `: section` lines and lines of four words (Mikolov et al. 2013a).

    Raises:
        CtxError: The file cannot be read.
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
    if len(covered) < 2:
        return SimilarityResult(float("nan"), len(covered), len(pairs))
    cosines = [space.similarity(first, second) for first, second, _ in covered]
    result = spearmanr(predictions=cosines, references=[score for _, _, score in covered])
    return SimilarityResult(result["spearmanr"], len(covered), len(pairs))


def evaluate_analogies(space: WordSpace, sections: Mapping[str, Sequence[Question]]) -> AnalogyResult:
    """Share of the questions a : b = c : ? whose best answer by 3CosAdd is the expected word.

    A question is covered if its four words have vectors, and the expected one may be an answer.
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


def _not_empty(tests: _Tests, path: str | Path) -> _Tests:
    if not tests:
        raise CtxError("The file has no tests.", location=str(path), hint="check the path.")
    return tests
