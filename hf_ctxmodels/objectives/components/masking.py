"""Selection and corruption of tokens for masked language modelling (Devlin et al. 2019, section 3.1; n-grams: Lan et
al. 2019, section 4.1; spans: Joshi et al. 2020, section 3.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.components.non_special_tokens import NonSpecialTokens
from hf_ctxmodels.objectives.components.spans import Units, anchored_spans, geometric, harmonic, place_spans


@dataclass(frozen=True)
class MaskingRule:
    """The number of selected tokens, and their replacements.

    Attributes:
        probability: Share of the non-special tokens of a row to select.
        mask_share, random_share: Shares of the selected tokens replaced by the mask token and by a random one; the
            rest is kept (80/10/10 in the paper; its appendix C.2 compares others).
        whole_word: Select all pieces of a word or none (the release of May 2019).
        ngram: Select runs of 1 to `ngram` whole words, n of them with a probability proportional to 1/n (3 in ALBERT).
        max_predictions: Maximum number of selected tokens of a row; None for no limit.
        smoothing: Draw single tokens with probabilities proportional to their counts in the training text to the power
            of `-smoothing` (DistilBERT's released code: 0.7); 0 draws all alike.
    """

    probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_word: bool = False
    ngram: int = 1
    max_predictions: int | None = None
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise CtxError(f"ngram={self.ngram} selects no word.", hint="use 1 (single words) or more.")
        if not 0 < self.probability <= 1:
            raise CtxError(
                f"A masking probability of {self.probability} is out of range.", hint="use more than 0 and at most 1."
            )
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1 + 1e-9:
            raise CtxError(
                f"mask_share={self.mask_share} and random_share={self.random_share} are not shares of a whole.",
                hint="use non-negative numbers with a sum of at most 1; the remaining share of tokens is kept.",
            )
        if self.max_predictions is not None and self.max_predictions < 1:
            raise CtxError(
                f"max_predictions={self.max_predictions} leaves nothing to learn.",
                hint="use 1 or more, or None: no limit.",
            )
        if self.smoothing < 0 or (self.smoothing and self.needs_words):
            raise CtxError(
                f"mlm_smoothing={self.smoothing} is negative, or weighs whole words.",
                hint="use 0 or more, without whole_word and ngram: single tokens have counts.",
            )

    @property
    def needs_words(self) -> bool:
        """Whether the rule needs word ids."""
        return self.whole_word or self.ngram > 1

    def budget(self, candidates: int) -> int:
        """Number of a row's candidates to select: the rounded share, at least one, at most `max_predictions`."""
        if candidates == 0:
            return 0
        count = max(1, round(candidates * self.probability))
        return count if self.max_predictions is None else min(count, self.max_predictions)

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, drawn without replacement.

        Args:
            candidates: (tokens,) bool, True where a token may be selected.
            word_ids: (tokens,) for whole words; neighbours with the same id form a word.
            rng: The row's generator.

        Raises:
            CtxError: Words are needed and `word_ids` is None.
        """
        if self.needs_words and word_ids is None:
            raise CtxError("The selection of whole words needs word ids.", hint="give word_ids.")
        if not self.needs_words:
            positions = np.flatnonzero(candidates)
            return positions[rng.choice(len(positions), self.budget(len(positions)), replace=False)]
        units = Units.of(candidates, word_ids)
        spans = place_spans(units, self.ngram_lengths(len(units), rng), self.budget(len(units.positions)), rng)
        return units.in_spans(spans)[: self.max_predictions]

    def select_weighted(self, candidates: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, drawn one after the other without replacement, each with a probability proportional to
        its weight among those left.

        Args:
            candidates: (tokens,) bool.
            weights: (tokens,) positive at candidates.
            rng: The row's generator.
        """
        positions = np.flatnonzero(candidates)
        shares = weights[positions] / weights[positions].sum()
        return positions[rng.choice(len(positions), self.budget(len(positions)), replace=False, p=shares)]

    def ngram_lengths(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count,) random lengths of runs in words."""
        if self.ngram == 1:
            return np.ones(count, dtype=np.int64)
        return 1 + rng.choice(self.ngram, size=count, p=harmonic(self.ngram))

    def draws(self, chosen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(selected,) numbers in [0, 1), which choose between mask token, random token and no replacement."""
        return rng.random(len(chosen))


@dataclass(frozen=True)
class SpanMaskingRule(MaskingRule):
    """Whole spans of words, each with one replacement for all of its tokens; see `anchored_spans`.

    Attributes:
        geometric_p: Parameter of the geometric distribution of a span's length in words.
        max_span: The longest span; longer lengths are not drawn.
    """

    whole_word: bool = field(default=True, init=False)
    ngram: int = field(default=1, init=False)
    geometric_p: float = 0.2
    max_span: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.geometric_p < 1:
            raise CtxError(f"geometric_p={self.geometric_p} is out of range.", hint="use more than 0 and less than 1.")
        if self.max_span < 1:
            raise CtxError(f"max_span={self.max_span} selects no word.", hint="use 1 or more.")

    def budget(self, candidates: int) -> int:
        """Number of a row's candidates to select: the share, rounded up, at most `max_predictions`."""
        count = ceil(candidates * self.probability)
        return count if self.max_predictions is None else min(count, self.max_predictions)

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Positions to predict, ascending; a run of them is a span. See `MaskingRule.select`."""
        if word_ids is None:
            raise CtxError("The selection of spans of words needs word ids.", hint="give word_ids.")
        units = Units.of(candidates, word_ids)
        return anchored_spans(units, geometric(self.geometric_p, self.max_span), self.budget(len(units.positions)), rng)

    def draws(self, chosen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(selected,) numbers as in `MaskingRule.draws`, the same for the tokens of a span."""
        starts = np.append(True, np.diff(chosen) != 1)[: len(chosen)]
        return rng.random(int(starts.sum()))[np.cumsum(starts) - 1]


class TokenMasker:
    """Applies a `MaskingRule` to rows of token ids. Special tokens are neither selected nor drawn as replacements.

    Args:
        tokenizer: Gives the mask token, the special tokens and the vocabulary of random replacements.
        rule: The rule.

    Attributes:
        weights: (largest id + 1,) with which tokens are drawn, see `weigh`; None before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rule: MaskingRule) -> None:
        if tokenizer.mask_token_id is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no mask token, which masked language modelling needs.",
                hint="tokenizer.add_special_tokens({'mask_token': '[MASK]'}), and resize the model's embeddings.",
            )
        self.rule = rule
        self.mask_token_id = tokenizer.mask_token_id
        self.non_special = NonSpecialTokens(tokenizer)
        self.weights: np.ndarray | None = None

    def weigh(self, ids: np.ndarray) -> None:
        """Take the counts of the training text, for a rule with `smoothing`; a token that is not in it counts once.

        Args:
            ids: (tokens,) of all training text.
        """
        counts = np.bincount(ids, minlength=len(self.non_special.table))
        self.weights = np.maximum(counts, 1.0) ** -self.rule.smoothing

    def mask(
        self,
        ids: np.ndarray,
        word_ids: np.ndarray | None,
        rng: np.random.Generator,
        replacements: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt one row. Returns its new ids and its labels, both (tokens,) int64.

        Random tokens are drawn from `replacements`, without them from the vocabulary.
        """
        chosen = self._select(ids, word_ids, rng)
        replacements = self.non_special.ids if replacements is None else replacements
        return corrupt(ids, chosen, self.rule, self.mask_token_id, replacements, rng)

    def _select(self, ids: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        candidates = self.non_special.candidates(ids)
        if not self.rule.smoothing or not candidates.any():
            return self.rule.select(candidates, word_ids, rng)
        if self.weights is None:
            raise CtxError(
                "mlm_smoothing needs the counts of all training text, which was not read.",
                location="mlm_smoothing",
                hint="leave out --streaming and --sampling_alpha, or give the counts by collator.masker.weigh(ids).",
            )
        return self.rule.select_weighted(candidates, self.weights[ids], rng)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `count_selected`; maskable are the tokens that are not special."""
        ids, labels = batch["input_ids"], batch["labels"]
        maskable = torch.from_numpy(self.non_special.table).to(ids.device)[ids] | (labels != IGNORE_INDEX)
        return count_selected(ids, labels, maskable, self.mask_token_id)


def corrupt(
    ids: np.ndarray,
    chosen: np.ndarray,
    rule: MaskingRule,
    mask_token_id: int,
    replacements: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the chosen tokens of a row. Returns its new ids and its labels, both (tokens,) int64.

    Args:
        ids: (tokens,).
        chosen: Their positions.
        rule: Its shares decide between mask token, random token, and no replacement.
        mask_token_id: The mask token.
        replacements: Ids from which random tokens are drawn.
        rng: The row's generator.
    """
    corrupted = ids.astype(np.int64)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
    labels[chosen] = ids[chosen]
    draws = rule.draws(chosen, rng)
    corrupted[chosen[draws < rule.mask_share]] = mask_token_id
    random = chosen[(draws >= rule.mask_share) & (draws < rule.mask_share + rule.random_share)]
    corrupted[random] = replacements[rng.integers(len(replacements), size=len(random))]
    return corrupted, labels


def count_selected(
    ids: torch.Tensor, labels: torch.Tensor, maskable: torch.Tensor, mask_token_id: int
) -> dict[str, int]:
    """Counts of a collated batch: maskable and selected tokens, and their replacements. A random replacement that
    equals the original counts as kept.

    Args:
        ids, labels: (batch, width) of a masking collator.
        maskable: (batch, width) bool, True at the tokens that might have been selected.
        mask_token_id: The mask token.
    """
    selected = labels != IGNORE_INDEX
    masked = selected & (ids == mask_token_id)
    kept = selected & (ids == labels)
    run_starts = selected.clone()
    run_starts[:, 1:] &= ~selected[:, :-1]
    totals = torch.stack([each.sum() for each in (maskable, selected, run_starts, masked, kept)]).tolist()
    names = ("maskable_tokens", "selected_tokens", "selected_runs", "mask_tokens", "kept_tokens")
    return {"rows": len(ids), **dict(zip(names, totals))}


def masking_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Shares from the summed counts of `count_selected`."""
    selected = max(1, counts["selected_tokens"])
    mask, kept = counts["mask_tokens"] / selected, counts["kept_tokens"] / selected
    return {
        "selected_share": counts["selected_tokens"] / max(1, counts["maskable_tokens"]),
        "mask_token_share": mask,
        "random_token_share": max(0.0, 1 - mask - kept),
        "kept_token_share": kept,
        "selected_run_length": counts["selected_tokens"] / max(1, counts["selected_runs"]),
        "predictions_per_row": counts["selected_tokens"] / max(1, counts["rows"]),
    }
