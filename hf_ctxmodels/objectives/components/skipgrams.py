"""Selection of tokens one by one, now and then with those after them (Dong et al. 2019, section 2.4; the released data
preparation)."""

from dataclasses import dataclass, field

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.components.masking import MaskingRule


@dataclass(frozen=True)
class SkipgramRule(MaskingRule):
    """Tokens in random order, until the budget is spent: each alone or, with some probability, with those after it.

    A run ends at a token that may not be selected. It may run over the budget; then as many tokens as the budget has
    are drawn among all that were selected.

    Attributes:
        skipgram_probability: Probability of a run of several tokens.
        skipgram_size: Longest run; its length is uniform from 2 on. 1 for single tokens only.
    """

    ngram: int = field(default=1, init=False)
    skipgram_probability: float = 0.2
    skipgram_size: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.skipgram_probability <= 1:
            raise CtxError(
                f"skipgram_probability={self.skipgram_probability} is not a probability.", hint="use 0 to 1."
            )
        if self.skipgram_size < 1:
            raise CtxError(f"skipgram_size={self.skipgram_size} selects no token.", hint="use 1 or more.")

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, ascending; see `MaskingRule.select`."""
        if self.whole_word and word_ids is None:
            raise CtxError("The selection of whole words needs word ids.", hint="give word_ids.")
        order = rng.permutation(np.flatnonzero(candidates))
        budget = self.budget(len(order))
        ends = order + self._lengths(len(order), rng)
        chosen: set[int] = set()
        for start, end in zip(order.tolist(), ends.tolist()):
            if len(chosen) >= budget:
                break
            if start not in chosen:
                chosen.update(self._run(start, end, candidates, word_ids))
        selected = np.sort(np.fromiter(chosen, dtype=np.int64))
        return selected if len(selected) <= budget else np.sort(rng.choice(selected, budget, replace=False))

    def _lengths(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count,) random lengths of runs."""
        if self.skipgram_size < 2:
            return np.ones(count, dtype=np.int64)
        several = rng.random(count) < self.skipgram_probability
        return np.where(several, rng.integers(2, self.skipgram_size, size=count, endpoint=True), 1)

    def _run(self, start: int, end: int, candidates: np.ndarray, word_ids: np.ndarray | None) -> range:
        """Tokens [start, end), with `whole_word` extended to whole words, up to one that is no candidate."""
        end = min(end, len(candidates))
        if self.whole_word and word_ids is not None:
            while start > 0 and candidates[start - 1] and word_ids[start - 1] == word_ids[start]:
                start -= 1
            while end < len(candidates) and word_ids[end] == word_ids[end - 1]:
                end += 1
        stops = np.flatnonzero(~candidates[start:end])
        return range(start, start + int(stops[0]) if len(stops) else end)
