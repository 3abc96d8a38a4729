"""The five noising functions of BART (Lewis et al. 2020, section 2.2), with the flags of the released code."""

from dataclasses import dataclass
from math import ceil, exp
from typing import Literal, get_args

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice

MaskLength = Literal["span-poisson", "word", "subword"]
_MIN_PROBABILITY = 1e-7  # of a span length; the distribution is truncated at less probable ones


@dataclass(frozen=True, eq=False)
class NoisedText:
    """A text without special tokens, as the noising functions transform it.

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
    """The noising functions, applied in this order: permute sentences, mask, insert, rotate.

    The paper's token masking is mask_length "subword" or "word" with replace_length 1; token deletion, replace_length
    0; text infilling, "span-poisson" with replace_length 1; sentence permutation, permute_sentences; document rotation,
    rotate.

    Attributes:
        mask: Share of the words to mask, rounded up.
        mask_random: Share of the masked spans, and of the inserted tokens, rounded up, that become random tokens.
        mask_length: Unit of masking: spans of words with lengths from a Poisson distribution, words, or tokens.
        poisson_lambda: Mean of that distribution, which is truncated at lengths less probable than 1e-7.
        replace_length: Number of mask tokens that replace a span: 1; 0; or -1, one for each of its tokens.
        permute_sentences: Share of the sentences, rounded up, that are permuted among themselves.
        insert: Number of tokens to insert, as a share of the sequence, rounded up.
        rotate: Share of the sequences that are rotated.
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
                hint="use 1 (one mask token for each span), 0 (none) or -1 (one for each token).",
            )
        if not 0 < self.poisson_lambda <= 50:
            raise CtxError(f"poisson_lambda={self.poisson_lambda} is out of range.", hint="use more than 0, up to 50.")

    @property
    def needs_words(self) -> bool:
        """Whether the rule requires word ids."""
        return self.mask > 0 and self.mask_length != "subword"

    @property
    def length_probabilities(self) -> np.ndarray:
        """Probabilities of the span lengths 0, 1, 2, ... in words."""
        weights, weight = [exp(-self.poisson_lambda)], exp(-self.poisson_lambda)
        while weights[-1] >= _MIN_PROBABILITY or len(weights) <= self.poisson_lambda:
            weight *= self.poisson_lambda / len(weights)
            weights.append(weight)
        return np.array(weights) / sum(weights)


class Noiser:
    """Applies a `NoisingRule`.

    Args:
        rule: The rule.
        mask_id: Id of the mask token.
        replacements: Ids from which random tokens are sampled.
    """

    def __init__(self, rule: NoisingRule, mask_id: int, replacements: np.ndarray) -> None:
        self.rule, self.mask_id, self.replacements = rule, mask_id, replacements
        self._length_probabilities = rule.length_probabilities

    def __call__(self, text: NoisedText, special_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """(tokens after noising,) ids.

        Args:
            text: The text.
            special_tokens: Number of special tokens around it, which count for the share of inserted tokens.
            rng: The sequence's generator.
        """
        rule = self.rule
        if rule.permute_sentences:
            text = self.permute_sentences(text, rng)
        ids = self.mask(text, rng) if rule.mask else text.ids
        if rule.insert:
            ids = self.insert(ids, share_of(len(ids) + special_tokens, rule.insert), rng)
        if rule.rotate and rng.random() < rule.rotate and len(ids):
            ids = np.roll(ids, -int(rng.integers(len(ids))))
        return ids

    def permute_sentences(self, text: NoisedText, rng: np.random.Generator) -> NoisedText:
        """The text with a share of its sentences permuted among themselves."""
        bounds = text.sentence_bounds
        order = np.arange(len(bounds) - 1)
        moved = rng.permutation(len(order))[: share_of(len(order), self.rule.permute_sentences)]
        order[moved] = moved[rng.permutation(len(moved))]
        sentences = [np.arange(bounds[sentence], bounds[sentence + 1]) for sentence in order]
        positions = np.concatenate([np.zeros(0, dtype=np.int64), *sentences])
        new_bounds = np.append(0, np.cumsum(np.diff(bounds)[order]))
        return NoisedText(text.ids[positions], text.word_starts[positions], new_bounds)

    def span_lengths(self, budget: int, rng: np.random.Generator) -> np.ndarray:
        """(spans,) lengths in words with the sum `budget`, some of them 0; the last one is trimmed."""
        if self.rule.mask_length != "span-poisson":
            return np.ones(budget, dtype=np.int64)
        probabilities = self._length_probabilities
        lengths = rng.choice(len(probabilities), size=budget, p=probabilities)
        while lengths.sum() < budget:
            lengths = np.append(lengths, rng.choice(len(probabilities), size=budget, p=probabilities))
        totals = np.cumsum(lengths)
        last = int(np.searchsorted(totals, budget))
        lengths[last] -= totals[last] - budget
        return lengths[: last + 1]

    def mask(self, text: NoisedText, rng: np.random.Generator) -> np.ndarray:
        """(tokens,) ids with a share of the words masked.

        A span begins at a random word and consists of whole words, which may overlap other spans; it ends with the
        text. Spans of length 0 are inserted tokens.
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
        is_random = rng.random(len(words)) < self.rule.mask_random
        ids, remaining = text.ids.copy(), np.ones(len(text.ids), dtype=bool)
        for span in np.argsort(-words).tolist():  # of overlapping spans, the one that begins first is applied last
            begin, stop = int(starts[words[span]]), int(stops[span])
            if self.rule.replace_length == 0:
                remaining[begin:stop] = False
                continue
            end = stop if self.rule.replace_length == -1 else begin + 1
            ids[begin:end] = rng.choice(self.replacements, end - begin) if is_random[span] else self.mask_id
            remaining[end:stop] = False
        return self.insert(ids[remaining], inserted, rng)

    def insert(self, ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """(tokens + count,) ids with random tokens and mask tokens inserted."""
        if not count:
            return ids
        inserted = rng.permutation(len(ids) + count)[:count]
        is_original = np.ones(len(ids) + count, dtype=bool)
        is_original[inserted] = False
        result = np.full(len(is_original), self.mask_id, dtype=ids.dtype)
        random = inserted[: share_of(count, self.rule.mask_random)]
        result[random] = rng.choice(self.replacements, len(random))
        result[is_original] = ids
        return result


def share_of(count: int, share: float) -> int:
    """The share of a number, rounded up; 0.1 * 30, slightly above 3 in floating point, is 3."""
    return ceil(count * share - 1e-9)
