"""Nearest neighbours and analogies by cosine similarity (Mikolov et al. 2013a, section 4; Levy & Goldberg 2014)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.errors import CtxError

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
        """Row of a word in the embedding matrix.

        Raises:
            CtxError: The word has no vector.
        """
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
        neighbours = zip(indices.tolist(), cosines.tolist(), strict=True)
        return [(self.vectors.words[index], cosine) for index, cosine in neighbours if cosine > -torch.inf]

    def _normalize(self, word: str) -> str:
        return word.lower() if self.vectors.lower_case else word
