"""Nearest neighbors, analogies and word similarity tests of word vectors by cosine (Mikolov et al. 2013a, section 4;
Levy & Goldberg 2014)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import parse_number
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.tasks.metrics import spearman_correlation

RatedPair = tuple[str, str, float]
Question = tuple[str, str, str, str]
_MAX_SCORES = 2**25  # cosines in memory at the same time


class WordSpace:
    """Word vectors scaled to unit length.

    Args:
        vectors: The words and their vectors; the cosine with a zero vector is 0.
        most_frequent: Search only the first words for answers; None for all.
        device: Device of the computation.

    Example:
        >>> space = WordSpace(WordVectors.from_model(model, tokenizer))
        >>> space.most_similar("king", number=3)
        >>> space.analogy("man", "king", "woman", number=1)
    """

    def __init__(
        self, vectors: WordVectors, most_frequent: int | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.vectors = vectors
        self.unit_vectors = F.normalize(torch.from_numpy(vectors.matrix).to(device), dim=1)
        self.candidates = self.unit_vectors[:most_frequent]

    def __contains__(self, word: str) -> bool:
        return self._normalize(word) in self.vectors.word_to_index

    def index(self, word: str) -> int:
        """Row of a word in the embedding matrix; raises CtxError for a word without a vector."""
        index = self.vectors.word_to_index.get(self._normalize(word))
        if index is None:
            raise CtxError(f"The word {word!r} has no vector.", hint="check `word in space` first.")
        return index

    def similarity(self, first: str, second: str) -> float:
        """Cosine of two words."""
        return float(self.unit_vectors[self.index(first)] @ self.unit_vectors[self.index(second)])

    def most_similar(self, word: str, number: int = 10) -> list[tuple[str, float]]:
        """The nearest words and their cosines, without the word itself."""
        index = torch.tensor([self.index(word)])
        return self._nearest(self.unit_vectors[index], index[:, None], number)

    def analogy(self, a: str, b: str, c: str, number: int = 10) -> list[tuple[str, float]]:
        """Answers to "a is to b as c is to ?": the words nearest to b - a + c (3CosAdd), without a, b and c."""
        indices = torch.tensor([[self.index(a), self.index(b), self.index(c)]])
        return self._nearest(self._analogy_targets(indices), indices, number)

    def solve_analogies(self, indices: Tensor) -> Tensor:
        """(questions, 3) rows of a, b and c -> (questions,) row of the best answer by 3CosAdd."""
        chunk_size = max(1, _MAX_SCORES // len(self.candidates))
        return torch.cat(
            [self._cosines(self._analogy_targets(chunk), chunk).argmax(1) for chunk in indices.split(chunk_size)]
        )

    def _analogy_targets(self, indices: Tensor) -> Tensor:
        a, b, c = self.unit_vectors[indices].unbind(1)
        return F.normalize(b - a + c, dim=1)

    def _cosines(self, targets: Tensor, excluded: Tensor) -> Tensor:
        """(questions, candidates) cosines, -inf for the (questions, n) excluded rows."""
        cosines = targets @ self.candidates.T
        questions, columns = torch.where(excluded < len(self.candidates))
        cosines[questions, excluded[questions, columns]] = -torch.inf
        return cosines

    def _nearest(self, target: Tensor, excluded: Tensor, number: int) -> list[tuple[str, float]]:
        number = max(0, min(number, len(self.candidates) - 1))
        cosines, indices = self._cosines(target, excluded)[0].topk(number)
        neighbors = zip(indices.tolist(), cosines.tolist(), strict=True)
        return [(self.vectors.words[index], cosine) for index, cosine in neighbors if cosine > -torch.inf]

    def _normalize(self, word: str) -> str:
        return word.lower() if self.vectors.lower_case else word


@dataclass(frozen=True)
class SimilarityResult:
    """Rank correlation of cosines with human ratings over the pairs whose words have vectors (NaN for fewer than two),
    and the numbers of covered and of all pairs."""

    spearman: float
    covered: int
    pairs: int


@dataclass(frozen=True)
class AnalogyResult:
    """Result of an analogy test: section -> numbers of correct answers, covered questions and all questions."""

    sections: Mapping[str, tuple[int, int, int]]

    @property
    def total(self) -> tuple[int, int, int]:
        """Numbers of correct answers, covered questions and all questions."""
        correct, covered, questions = (sum(counts[column] for counts in self.sections.values()) for column in range(3))
        return correct, covered, questions

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers among the covered questions; NaN if none is covered."""
        correct, covered, _ = self.total
        return correct / covered if covered else float("nan")


def read_similarities(path: str | Path) -> list[RatedPair]:
    """Read tab-separated lines of two words and a rating (the format of Faruqui & Dyer 2014)."""
    pairs = []
    for line_number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        cells = line.rstrip("\r\n").split("\t")
        rating = parse_number(cells[2]) if len(cells) > 2 else None
        if rating is None:
            raise CtxError(
                f"Expected two words and a number, separated by tabs; got {line.strip()!r}.",
                location=f"{path}, line {line_number}",
                hint="correct the line, or remove the header.",
            )
        pairs.append((cells[0], cells[1], rating))
    if not pairs:
        raise CtxError("The file has no tests.", location=str(path), hint="check the path.")
    return pairs


def read_analogies(path: str | Path) -> dict[str, list[Question]]:
    """Read a file with `: section` lines and lines of four words (Mikolov et al. 2013a)."""
    sections: dict[str, list[Question]] = {}
    section = ""
    for line_number, line in enumerate(read_lines(path), start=1):
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
    if not sections:
        raise CtxError("The file has no tests.", location=str(path), hint="check the path.")
    return sections


def evaluate_similarity(space: WordSpace, pairs: Sequence[RatedPair]) -> SimilarityResult:
    """Spearman's rank correlation between cosines and ratings."""
    covered = [pair for pair in pairs if pair[0] in space and pair[1] in space]
    if len(covered) < 2:
        return SimilarityResult(float("nan"), len(covered), len(pairs))
    cosines = [space.similarity(first, second) for first, second, _ in covered]
    correlation = spearman_correlation(cosines, [rating for _, _, rating in covered])
    return SimilarityResult(correlation, len(covered), len(pairs))


def evaluate_analogies(space: WordSpace, sections: Mapping[str, Sequence[Question]]) -> AnalogyResult:
    """Accuracy of 3CosAdd on questions "a is to b as c is to ?"; a question is covered if its words have vectors and
    the answer is one of `space.candidates`."""
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
