"""Selection and corruption of tokens for masked language modeling (Devlin et al. 2019, section 3.1; n-grams: Lan et
al. 2019, section 4.1; spans: Joshi et al. 2020, section 3.1; skip-grams: Dong et al. 2019, section 2.4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.data.padding import required_token
from hf_ctxmodels.objectives.features import NonSpecialTokens
from hf_ctxmodels.objectives.spans import Units, anchored_spans, geometric, harmonic, place_spans

_OPTIONS = {"probability": "mlm_probability", "smoothing": "mlm_smoothing"}  # other fields have their options' names


@dataclass(frozen=True)
class MaskingRule:
    """How many tokens are selected, and what replaces them.

    Attributes:
        probability: Share of the non-special tokens of a sequence to select.
        mask_share, random_share: Shares of the selected tokens replaced by the mask token and by a random token; the
            remaining ones are unchanged (appendix C.2 of the paper compares alternatives).
        whole_word: Select all tokens of a word or none.
        ngram: Select runs of 1 to `ngram` whole words, n of them with a probability proportional to 1/n (3 in ALBERT).
        max_predictions: Maximum number of selected tokens of a sequence.
        smoothing: Sample single tokens with probabilities proportional to their counts in the training text to the
            power of `-smoothing` (DistilBERT's released code: 0.7).
    """

    probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_word: bool = False
    ngram: int = 1
    max_predictions: int | None = None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "ngram", "max_predictions", at_least=1)
        check_range(self, "probability", above=0, at_most=1)
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1 + 1e-9:
            raise CtxError(
                f"mask_share={self.mask_share} and random_share={self.random_share} are not shares of a whole.",
                hint="use non-negative numbers with a sum of at most 1; the remaining tokens are unchanged.",
            )
        if self.smoothing < 0 or (self.smoothing and self.needs_words):
            raise CtxError(
                f"mlm_smoothing={self.smoothing} is negative, or combined with whole words.",
                hint="use 0 or more, without whole_word and ngram: only single tokens have counts.",
            )

    @classmethod
    def of(cls, collator: object) -> Self:
        """The rule of a collator's options."""
        options = {entry.name: _OPTIONS.get(entry.name, entry.name) for entry in fields(cls) if entry.init}
        return cls(**{name: getattr(collator, option) for name, option in options.items() if hasattr(collator, option)})

    @property
    def needs_words(self) -> bool:
        """Whether the rule requires word ids."""
        return self.whole_word or self.ngram > 1

    def budget(self, candidates: int) -> int:
        """Number of candidates to select: the rounded share, at least one, at most `max_predictions`."""
        if candidates == 0:
            return 0
        count = max(1, round(candidates * self.probability))
        return count if self.max_predictions is None else min(count, self.max_predictions)

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, sampled without replacement; raises CtxError if words are needed without word ids.

        `candidates` is (tokens,) bool, True where a token may be selected; neighbors with one word id form a word.
        """
        if not self.needs_words:
            positions = np.flatnonzero(candidates)
            return positions[rng.choice(len(positions), self.budget(len(positions)), replace=False)]
        units = Units.of(candidates, _require_word_ids(word_ids))
        spans = place_spans(units, self.ngram_lengths(len(units), rng), self.budget(len(units.positions)), rng)
        return units.in_spans(spans)[: self.max_predictions]

    def ngram_lengths(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count,) random lengths of runs in words."""
        if self.ngram == 1:  # consumes no random numbers
            return np.ones(count, dtype=np.int64)
        return 1 + rng.choice(self.ngram, size=count, p=harmonic(self.ngram))

    def uniforms(self, selected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(selected,) numbers in [0, 1) that choose between mask token, random token and no replacement."""
        return rng.random(len(selected))


@dataclass(frozen=True)
class SpanMaskingRule(MaskingRule):
    """Whole spans of words, with the same kind of replacement for all tokens of a span; see `anchored_spans`.

    Lengths in words have a geometric distribution with the parameter `geometric_p`, truncated at `max_span`.
    """

    whole_word: bool = field(default=True, init=False)
    ngram: int = field(default=1, init=False)
    geometric_p: float = 0.2
    max_span: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "geometric_p", above=0, below=1)
        check_range(self, "max_span", at_least=1)

    def budget(self, candidates: int) -> int:
        """Number of candidates to select: the share, rounded up, at most `max_predictions`."""
        count = ceil(candidates * self.probability)
        return count if self.max_predictions is None else min(count, self.max_predictions)

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, ascending; each run of them is a span. See `MaskingRule.select`."""
        units = Units.of(candidates, _require_word_ids(word_ids))
        return anchored_spans(units, geometric(self.geometric_p, self.max_span), self.budget(len(units.positions)), rng)

    def uniforms(self, selected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(selected,) numbers as in `MaskingRule.uniforms`, equal for the tokens of a span."""
        starts = np.append(True, np.diff(selected) != 1)[: len(selected)]
        return rng.random(int(starts.sum()))[np.cumsum(starts) - 1]


@dataclass(frozen=True)
class SkipgramRule(MaskingRule):
    """Tokens in random order until the budget is reached: each alone or, with some probability, with its successors
    (the released data preparation of Dong et al. 2019).

    A run ends at a token that may not be selected. It may exceed the budget; then as many tokens as the budget has are
    sampled among all selected ones. With `skipgram_probability` a run has several tokens, uniformly 2 to
    `skipgram_size`.
    """

    ngram: int = field(default=1, init=False)
    skipgram_probability: float = 0.2
    skipgram_size: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "skipgram_probability", at_least=0, at_most=1)
        check_range(self, "skipgram_size", at_least=1)

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, ascending; see `MaskingRule.select`."""
        words = _require_word_ids(word_ids) if self.whole_word else None
        order = rng.permutation(np.flatnonzero(candidates))
        budget, lengths = self.budget(len(order)), np.ones(len(order), dtype=np.int64)
        if self.skipgram_size > 1:
            is_run = rng.random(len(order)) < self.skipgram_probability
            lengths = np.where(is_run, rng.integers(2, self.skipgram_size, size=len(order), endpoint=True), 1)
        selected: set[int] = set()
        for start, end in zip(order.tolist(), (order + lengths).tolist()):
            if len(selected) >= budget:
                break
            if start not in selected:
                selected.update(self._run(start, end, candidates, words))
        positions = np.sort(np.fromiter(selected, dtype=np.int64))
        return positions if len(positions) <= budget else np.sort(rng.choice(positions, budget, replace=False))

    def _run(self, start: int, end: int, candidates: np.ndarray, word_ids: np.ndarray | None) -> range:
        """Tokens [start, end), extended to whole words if `word_ids` are given, up to the first non-candidate."""
        end = min(end, len(candidates))
        if word_ids is not None:
            while start > 0 and candidates[start - 1] and word_ids[start - 1] == word_ids[start]:
                start -= 1
            while end < len(candidates) and word_ids[end] == word_ids[end - 1]:
                end += 1
        stops = np.flatnonzero(~candidates[start:end])
        return range(start, start + int(stops[0]) if len(stops) else end)


@dataclass(frozen=True)
class UnitMaskingRule(MaskingRule):
    """Select a share of a sequence's units, at least one, and predict all tokens of each.

    Attributes:
        probability: Share of the units, not of the tokens.
        unit_rows: Probability that the units of a sequence are words instead of single tokens.
        max_predictions: Units that would exceed it are not selected, except the first.
    """

    unit_rows: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "unit_rows", at_least=0, at_most=1)

    @property
    def needs_words(self) -> bool:
        """Whether the rule requires word ids."""
        return self.unit_rows > 0

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict; neighbors with the same word id form a unit. See `MaskingRule.select`."""
        uses_units = rng.random() < self.unit_rows
        units = Units.of(candidates, word_ids if uses_units else None)
        count = max(1, round(len(units) * self.probability)) if len(units) else 0
        selected = rng.choice(len(units), count, replace=False) if count else np.zeros(0, dtype=np.int64)
        if self.max_predictions is not None:
            sizes = np.cumsum(units.lengths[selected])
            selected = selected[: max(1, int(np.searchsorted(sizes, self.max_predictions, side="right")))]
        return units.tokens(selected)


def _require_word_ids(word_ids: np.ndarray | None) -> np.ndarray:
    if word_ids is None:
        raise CtxError("Selecting whole words requires word ids.", hint="pass word_ids.")
    return word_ids


class TokenMasker:
    """Applies a `MaskingRule` to sequences of token ids. Special tokens are neither selected nor used as replacements.

    Attributes:
        weights: (largest id + 1,) sampling weights, see `set_token_counts`; None before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rule: MaskingRule) -> None:
        self.rule = rule
        self.mask_token_id = required_token(tokenizer, "mask_token", "masked language modeling requires")
        self.non_special = NonSpecialTokens(tokenizer)
        self.weights: np.ndarray | None = None

    def set_token_counts(self, *ids: np.ndarray) -> None:
        """Count the (tokens,) ids of all training text, for a rule with `smoothing`; a missing token counts as one."""
        size = max(len(self.non_special.table), *(int(array.max(initial=0)) + 1 for array in ids))
        counts = np.sum([np.bincount(array, minlength=size) for array in ids], axis=0)
        self.weights = np.maximum(counts, 1.0) ** -self.rule.smoothing

    def mask(
        self,
        ids: np.ndarray,
        word_ids: np.ndarray | None,
        rng: np.random.Generator,
        replacements: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt a sequence. Returns its new ids and its labels, both (tokens,) int64.

        Random tokens are sampled from `replacements`, by default from the non-special vocabulary.
        """
        candidates = self.non_special.candidates(ids)
        if not self.rule.smoothing or not candidates.any():
            selected = self.rule.select(candidates, word_ids, rng)
        elif self.weights is None:
            raise CtxError(
                "mlm_smoothing requires the token counts of all training text.",
                location="mlm_smoothing",
                hint="omit --streaming and --sampling_alpha, or call collator.masker.set_token_counts(ids).",
            )
        else:  # one after the other, with probabilities proportional to the weights of the remaining ones
            positions = np.flatnonzero(candidates)
            weights = self.weights[ids[positions]]
            count = self.rule.budget(len(positions))
            selected = positions[rng.choice(len(positions), count, replace=False, p=weights / weights.sum())]
        replacements = self.non_special.ids if replacements is None else replacements
        return corrupt(ids, selected, self.rule, self.mask_token_id, replacements, rng)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """`count_selected` of a collated batch; non-special tokens are maskable."""
        ids, labels = batch["input_ids"], batch["labels"]
        maskable = torch.from_numpy(self.non_special.table).to(ids.device)[ids] | (labels != IGNORE_INDEX)
        return count_selected(ids, labels, maskable, self.mask_token_id)


def corrupt(
    ids: np.ndarray,
    selected: np.ndarray,
    rule: MaskingRule,
    mask_token_id: int,
    replacements: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the tokens of a sequence at the `selected` positions by the mask token, or by random ones among the
    `replacements`. Returns its new ids and its labels, both (tokens,) int64."""
    corrupted = ids.astype(np.int64)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
    labels[selected] = ids[selected]
    uniforms = rule.uniforms(selected, rng)
    corrupted[selected[uniforms < rule.mask_share]] = mask_token_id
    is_random = (uniforms >= rule.mask_share) & (uniforms < rule.mask_share + rule.random_share)
    corrupted[selected[is_random]] = replacements[rng.integers(len(replacements), size=int(is_random.sum()))]
    return corrupted, labels


def count_selected(
    ids: torch.Tensor, labels: torch.Tensor, maskable: torch.Tensor, mask_token_id: int
) -> dict[str, int]:
    """Counts of a collated batch: tokens that could be selected, of a (batch, width) bool mask, selected tokens, and
    their replacements; a random replacement that equals the original counts as unchanged."""
    selected = labels != IGNORE_INDEX
    masked = selected & (ids == mask_token_id)
    unchanged = selected & (ids == labels)
    run_starts = selected.clone()
    run_starts[:, 1:] &= ~selected[:, :-1]
    totals = torch.stack([mask.sum() for mask in (maskable, selected, run_starts, masked, unchanged)]).tolist()
    names = ("maskable_tokens", "selected_tokens", "selected_runs", "mask_tokens", "unchanged_tokens")
    return {"examples": len(ids), **dict(zip(names, totals))}


def masking_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Shares from the summed counts of `count_selected`."""
    selected = max(1, counts["selected_tokens"])
    mask_share, unchanged_share = counts["mask_tokens"] / selected, counts["unchanged_tokens"] / selected
    return {
        "selected_share": counts["selected_tokens"] / max(1, counts["maskable_tokens"]),
        "mask_token_share": mask_share,
        "random_token_share": max(0.0, 1 - mask_share - unchanged_share),
        "unchanged_token_share": unchanged_share,
        "selected_run_length": counts["selected_tokens"] / max(1, counts["selected_runs"]),
        "predictions_per_example": counts["selected_tokens"] / max(1, counts["examples"]),
    }
