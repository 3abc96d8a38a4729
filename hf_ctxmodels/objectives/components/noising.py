"""The five noising functions of BART (Lewis et al. 2020, section 2.2), with the flags of the released code."""

from dataclasses import dataclass
from math import ceil, exp
from typing import Literal, get_args

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice

MaskLength = Literal["span-poisson", "word", "subword"]
_LEAST_PROBABILITY = 1e-7  # of a span length; longer ones are not drawn


@dataclass(frozen=True, eq=False)
class NoisedText:
    """A text without special tokens, on its way through the functions.

    Attributes:
        ids: (tokens,).
        word_starts: (tokens,) bool, True at the first token of a word.
        sentence_bounds: (sentences + 1,) sentence s is `ids[sentence_bounds[s]:sentence_bounds[s + 1]]`.
    """

    ids: np.ndarray
    word_starts: np.ndarray
    sentence_bounds: np.ndarray


@dataclass(frozen=True)
class NoisingRule:
    """What is done to a text, in this order: permute sentences, mask, insert, rotate.

    Token masking of the paper is mask_length "subword" or "word" with replace_length 1; token deletion, replace_length
    0; text infilling, "span-poisson" with replace_length 1; sentence permutation, permute_sentences; document rotation,
    rotate.

    Attributes:
        mask: Share of the words to mask, rounded up.
        mask_random: Share of the masked spans, and of the inserted tokens, rounded up, that are random tokens.
        mask_length: What is masked: spans of words with lengths from a Poisson distribution, words, or tokens.
        poisson_lambda: Mean of that distribution, which is cut where a length is less probable than 1e-7.
        replace_length: What stands for a span: 1, one mask token; 0, nothing; -1, one for each of its tokens.
        permute_sentences: Share of the sentences, rounded up, that are permuted among themselves.
        insert: Tokens to insert, as a share of the row's tokens, rounded up.
        rotate: Share of the rows that are rotated.
    """

    mask: float = 0.3
    mask_random: float = 0.1
    mask_length: MaskLength = "span-poisson"
    poisson_lambda: float = 3.5
    replace_length: int = 1
    permute_sentences: float = 1.0
    insert: float = 0.0
    rotate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mask", "mask_random", "permute_sentences", "insert", "rotate"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise CtxError(f"{name}={value} is not a share.", hint="use 0 to 1.")
        check_choice(get_args(MaskLength), mask_length=self.mask_length)
        if self.replace_length not in (-1, 0, 1):
            raise CtxError(
                f"replace_length={self.replace_length} is unknown.",
                hint="use 1 (a mask token for each span), 0 (nothing) or -1 (one for each token).",
            )
        if not 0 < self.poisson_lambda <= 50:
            raise CtxError(f"poisson_lambda={self.poisson_lambda} is out of range.", hint="use more than 0, up to 50.")

    @property
    def needs_words(self) -> bool:
        """Whether the rule needs word ids."""
        return self.mask > 0 and self.mask_length != "subword"

    @property
    def length_probabilities(self) -> np.ndarray:
        """Probabilities of the span lengths 0, 1, 2, ... in words."""
        weights, weight = [exp(-self.poisson_lambda)], exp(-self.poisson_lambda)
        while weights[-1] >= _LEAST_PROBABILITY or len(weights) <= self.poisson_lambda:
            weight *= self.poisson_lambda / len(weights)
            weights.append(weight)
        return np.array(weights) / sum(weights)


class Noiser:
    """Applies a `NoisingRule`.

    Args:
        rule: The rule.
        mask_id: Id of the mask token.
        replacements: Ids that random tokens are drawn from.
    """

    def __init__(self, rule: NoisingRule, mask_id: int, replacements: np.ndarray) -> None:
        self.rule, self.mask_id, self.replacements = rule, mask_id, replacements
        self._lengths = rule.length_probabilities

    def __call__(self, text: NoisedText, special_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """(tokens after noising,) ids.

        Args:
            text: The text.
            special_tokens: Number of special tokens around it, which count for the share of inserted ones.
            rng: The row's generator.
        """
        rule = self.rule
        if rule.permute_sentences:
            text = self.permute(text, rng)
        ids = self.mask(text, rng) if rule.mask else text.ids
        if rule.insert:
            ids = self.insert(ids, share_of(len(ids) + special_tokens, rule.insert), rng)
        if rule.rotate and rng.random() < rule.rotate and len(ids):
            ids = np.roll(ids, -int(rng.integers(len(ids))))
        return ids

    def permute(self, text: NoisedText, rng: np.random.Generator) -> NoisedText:
        """The text with a share of its sentences permuted among themselves."""
        bounds = text.sentence_bounds
        order = np.arange(len(bounds) - 1)
        chosen = rng.permutation(len(order))[: share_of(len(order), self.rule.permute_sentences)]
        order[chosen] = chosen[rng.permutation(len(chosen))]
        places = [np.arange(bounds[sentence], bounds[sentence + 1]) for sentence in order]
        moved = np.concatenate([np.zeros(0, dtype=np.int64), *places])
        lengths = np.diff(bounds)[order]
        return NoisedText(text.ids[moved], text.word_starts[moved], np.append(0, np.cumsum(lengths)))

    def span_lengths(self, budget: int, rng: np.random.Generator) -> np.ndarray:
        """(spans,) lengths in words with the sum `budget`, 0 among them; the last one is trimmed."""
        if self.rule.mask_length != "span-poisson":
            return np.ones(budget, dtype=np.int64)
        lengths = rng.choice(len(self._lengths), size=budget, p=self._lengths)
        while lengths.sum() < budget:
            lengths = np.append(lengths, rng.choice(len(self._lengths), size=budget, p=self._lengths))
        totals = np.cumsum(lengths)
        last = int(np.searchsorted(totals, budget))
        lengths[last] -= totals[last] - budget
        return lengths[: last + 1]

    def mask(self, text: NoisedText, rng: np.random.Generator) -> np.ndarray:
        """(tokens,) ids with a share of the words masked.

        A span begins at a random word and holds whole words, those of other spans too; it ends with the text. Spans of
        length 0 are inserted tokens.
        """
        starts = np.flatnonzero(text.word_starts)
        budget = share_of(len(starts), self.rule.mask)
        if not budget:
            return text.ids
        lengths = self.span_lengths(budget, rng)
        inserted = int((lengths == 0).sum())
        lengths = lengths[lengths > 0]
        words = rng.permutation(len(starts))[: len(lengths)]
        stops = np.append(starts, len(text.ids))[np.minimum(words + lengths, len(starts))]
        random = rng.random(len(words)) < self.rule.mask_random
        ids, kept = text.ids.copy(), np.ones(len(text.ids), dtype=bool)
        for span in np.argsort(-words).tolist():  # of spans over one another, the one that begins first is written last
            begin, stop = int(starts[words[span]]), int(stops[span])
            if self.rule.replace_length == 0:
                kept[begin:stop] = False
                continue
            end = stop if self.rule.replace_length == -1 else begin + 1
            ids[begin:end] = self.mask_id if not random[span] else rng.choice(self.replacements, end - begin)
            kept[end:stop] = False
        return self.insert(ids[kept], inserted, rng)

    def insert(self, ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """(tokens + count,) ids with random tokens and mask tokens between them."""
        if not count:
            return ids
        places = rng.permutation(len(ids) + count)[:count]
        given = np.ones(len(ids) + count, dtype=bool)
        given[places] = False
        result = np.full(len(given), self.mask_id, dtype=ids.dtype)
        random = places[: share_of(count, self.rule.mask_random)]
        result[random] = rng.choice(self.replacements, len(random))
        result[given] = ids
        return result


def share_of(count: int, share: float) -> int:
    """The share of a number, rounded up; 0.1 * 30, which is more than 3 in floating point, is 3."""
    return ceil(count * share - 1e-9)
