"""Nearest words and analogies, by the cosine (Mikolov et al. 2013a, section 4; Levy & Goldberg 2014)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.errors import CtxError

_SCORES_AT_ONCE = 2**25


class WordSpace:
    """Word vectors scaled to length 1.

    Args:
        vectors: The words and their vectors; the cosine with a zero vector is 0.
        most_frequent: Number of the first words that may be answers; None for all.
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
        self.unit = torch.nn.functional.normalize(torch.from_numpy(vectors.matrix).to(device), dim=1)
        self.searched = self.unit[:most_frequent]

    def __contains__(self, word: str) -> bool:
        return self._as_known(word) in self.vectors.places

    def place(self, word: str) -> int:
        """The row of a word; raises CtxError if it has no vector."""
        known = self.vectors.places.get(self._as_known(word))
        if known is None:
            raise CtxError(f"The word {word!r} has no vector.", hint="ask `word in space` first.")
        return known

    def similarity(self, first: str, second: str) -> float:
        """The cosine of two words."""
        return float(self.unit[self.place(first)] @ self.unit[self.place(second)])

    def most_similar(self, word: str, number: int = 10) -> list[tuple[str, float]]:
        """The other words with the largest cosine to a word."""
        place = torch.tensor([self.place(word)])
        return self._nearest(self.unit[place], place[:, None], number)

    def analogy(self, a: str, b: str, c: str, number: int = 10) -> list[tuple[str, float]]:
        """a is to b as c is to what: the other words with the largest cosine to b - a + c (3CosAdd)."""
        places = torch.tensor([[self.place(a), self.place(b), self.place(c)]])
        return self._nearest(self._targets(places), places, number)

    def solve(self, places: Tensor) -> Tensor:
        """(questions, 3) rows of a, b and c -> (questions,) the row of the best answer by 3CosAdd."""
        size = max(1, _SCORES_AT_ONCE // len(self.searched))
        return torch.cat([self._scores(self._targets(some), some).argmax(1) for some in places.split(size)])

    def _targets(self, places: Tensor) -> Tensor:
        a, b, c = self.unit[places].unbind(1)
        return torch.nn.functional.normalize(b - a + c, dim=1)

    def _scores(self, targets: Tensor, excluded: Tensor) -> Tensor:
        """(questions, searched words) cosines, -inf for the excluded ones of each question."""
        scores = targets @ self.searched.T
        rows, columns = torch.where(excluded < len(self.searched))
        scores[rows, excluded[rows, columns]] = -torch.inf
        return scores

    def _nearest(self, target: Tensor, excluded: Tensor, number: int) -> list[tuple[str, float]]:
        number = min(number, len(self.searched) - 1)
        scores, rows = self._scores(target, excluded)[0].topk(max(0, number))
        pairs: Sequence[tuple[int, float]] = list(zip(rows.tolist(), scores.tolist()))
        return [(self.vectors.words[place], score) for place, score in pairs if score > -torch.inf]

    def _as_known(self, word: str) -> str:
        return word.lower() if self.vectors.lower_case else word
