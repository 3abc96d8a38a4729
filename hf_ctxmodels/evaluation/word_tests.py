"""Word similarity and analogy tests of word vectors, with the coverage of the test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.tasks.metrics import spearman_correlation
from hf_ctxmodels.evaluation.word_relations import WordSpace

RatedPair = tuple[str, str, float]
Question = tuple[str, str, str, str]
_Tests = TypeVar("_Tests", list[RatedPair], dict[str, list[Question]])


@dataclass(frozen=True)
class SimilarityResult:
    """Result of a word similarity test.

    Attributes:
        spearman: Rank correlation of cosines with human ratings over the covered pairs; NaN for fewer than two.
        covered: Number of pairs whose words have vectors.
        pairs: Number of pairs.
    """

    spearman: float
    covered: int
    pairs: int


@dataclass(frozen=True)
class AnalogyResult:
    """Result of an analogy test.

    Attributes:
        sections: Section -> numbers of correct answers, covered questions and all questions.
    """

    sections: Mapping[str, tuple[int, int, int]]

    @property
    def total(self) -> tuple[int, int, int]:
        """Numbers of correct answers, covered questions and all questions."""
        correct, covered, questions = (sum(column) for column in zip(*self.sections.values(), strict=True))
        return correct, covered, questions

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers among the covered questions; NaN if none is covered."""
        correct, covered, _ = self.total
        return correct / covered if covered else float("nan")


def read_similarities(path: str | Path) -> list[RatedPair]:
    """Read tab-separated lines of two words and a rating (the format of Faruqui & Dyer 2014).

    Raises:
        CtxError: The file cannot be read.
    """
    pairs = []
    for line_number, line in enumerate(read_lines(Path(path)), start=1):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) < 3 or not _is_number(fields[2]):
            raise CtxError(
                f"Expected two words and a number, separated by tabs; got {line.strip()!r}.",
                location=f"{path}, line {line_number}",
                hint="correct the line, or remove the header.",
            )
        pairs.append((fields[0], fields[1], float(fields[2])))
    return _require_tests(pairs, path)


def read_analogies(path: str | Path) -> dict[str, list[Question]]:
    """Read a file with `: section` lines and lines of four words (Mikolov et al. 2013a).

    Raises:
        CtxError: The file cannot be read.
    """
    sections: dict[str, list[Question]] = {}
    section = ""
    for line_number, line in enumerate(read_lines(Path(path)), start=1):
        words = line.split()
        if words[:1] == [":"]:
            section = " ".join(words[1:])
        elif len(words) == 4:
            sections.setdefault(section, []).append((words[0], words[1], words[2], words[3]))
        elif words:
            raise CtxError(
                f"Expected four words or `: section`; got {line.strip()!r}.",
                location=f"{path}, line {line_number}",
                hint="correct the line.",
            )
    return _require_tests(sections, path)


def evaluate_similarity(space: WordSpace, pairs: Sequence[RatedPair]) -> SimilarityResult:
    """Spearman's rank correlation between cosines and ratings."""
    covered = [pair for pair in pairs if pair[0] in space and pair[1] in space]
    if len(covered) < 2:
        return SimilarityResult(float("nan"), len(covered), len(pairs))
    cosines = [space.similarity(first, second) for first, second, _ in covered]
    correlation = spearman_correlation(cosines, [rating for _, _, rating in covered])
    return SimilarityResult(correlation, len(covered), len(pairs))


def evaluate_analogies(space: WordSpace, sections: Mapping[str, Sequence[Question]]) -> AnalogyResult:
    """Accuracy of 3CosAdd on questions "a is to b as c is to ?".

    A question is covered if its four words have vectors and the expected answer is one of `space.candidates`.
    """
    results = {}
    for name, questions in sections.items():
        rows = [[space.index(word) for word in question] for question in questions if all(w in space for w in question)]
        indices = torch.tensor(rows, dtype=torch.long).view(-1, 4)
        indices = indices[indices[:, 3] < len(space.candidates)]
        correct = 0
        if len(indices):
            answers = space.solve_analogies(indices[:, :3])
            correct = int((answers == indices[:, 3].to(answers.device)).sum())
        results[name] = (correct, len(indices), len(questions))
    return AnalogyResult(results)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require_tests(tests: _Tests, path: str | Path) -> _Tests:
    if not tests:
        raise CtxError("The file has no tests.", location=str(path), hint="check the path.")
    return tests
