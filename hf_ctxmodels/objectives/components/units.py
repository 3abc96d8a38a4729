"""Units of knowledge: words, and the phrases and entities of a list, masked as a whole (Sun et al. 2019, section
3.2)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.objectives.components.masking import MaskingRule
from hf_ctxmodels.objectives.components.spans import Units
from hf_ctxmodels.objectives.components.tokenized_documents import NO_WORD, TokenizedDocument

_END = None  # key of a node at which a phrase ends
Word = tuple[int, ...]


@dataclass(frozen=True)
class UnitMaskingRule(MaskingRule):
    """Select a share of a row's units, at least one, and predict all tokens of each.

    Attributes:
        probability: Share of the units, not of the tokens.
        unit_rows: Probability that a row's units are those of `word_ids`; the other rows have single tokens.
        max_predictions: Units that would exceed it are left out, but one is kept.
    """

    unit_rows: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.unit_rows <= 1:
            raise CtxError(f"unit_rows={self.unit_rows} is not a probability.", hint="use 0 to 1.")

    @classmethod
    def of(cls, arguments: Any) -> Self:
        """The rule of a collator's fields."""
        return cls(
            probability=arguments.mlm_probability,
            mask_share=arguments.mask_share,
            random_share=arguments.random_share,
            max_predictions=arguments.max_predictions,
            unit_rows=arguments.unit_rows,
        )

    @property
    def needs_words(self) -> bool:
        """Whether the rule needs word ids."""
        return self.unit_rows > 0

    def select(self, candidates: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """See `MaskingRule.select`; neighbours with the same word id form a unit."""
        by_units = rng.random() < self.unit_rows
        units = Units.of(candidates, word_ids if by_units else None)
        count = max(1, round(len(units) * self.probability)) if len(units) else 0
        chosen = rng.choice(len(units), count, replace=False) if count else np.zeros(0, dtype=np.int64)
        if self.max_predictions is not None:
            sizes = np.cumsum(units.lengths[chosen])
            chosen = chosen[: max(1, int(np.searchsorted(sizes, self.max_predictions, side="right")))]
        return units.tokens(chosen)


class Phrases:
    """A list of phrases, found in tokenised text from left to right, the longest first.

    A phrase is a sequence of words, and a word the sequence of its tokens, so the tokenizer decides what is equal.

    Args:
        tokenizer: Splits the phrases.
        phrases: Phrases of several words. Words alone are units anyway; phrases with an unknown token are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, phrases: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        self._first: dict[Word | None, Any] = {}
        for phrase in phrases:
            encoded = tokenizer(phrase, add_special_tokens=False, verbose=False)
            ids = encoded["input_ids"]
            words = list(_words(np.array(ids), np.array(encoded.word_ids())))
            if len(words) < 2 or tokenizer.unk_token_id in ids:
                continue
            node = self._first
            for word in words:
                node = node.setdefault(word, {})
            node[_END] = True
        self._first_tokens = np.unique([word[0] for word in self._first if word])

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase, file: str | Path) -> Self:
        """The phrases of a file, one per line; blank lines are skipped.

        Raises:
            CtxError: No phrase is left.
        """
        phrases = cls(tokenizer, filter(None, (line.strip() for line in read_lines(Path(file)))))
        if not phrases._first:
            raise CtxError(
                "There is no phrase of two or more words that the tokenizer knows.",
                location=str(file),
                hint="give one phrase per line, for example from `hf-ctxmodels find-units`.",
            )
        return phrases

    def join(self, ids: np.ndarray, word_ids: np.ndarray) -> np.ndarray:
        """(tokens,) numbers of the units: a phrase is one, any other word one of its own.

        Args:
            ids: (tokens,) of a text.
            word_ids: (tokens,) neighbours with the same number form a word; `NO_WORD` is kept.
        """
        words = list(_words(ids, word_ids))
        starts = np.flatnonzero(np.diff(word_ids, prepend=NO_WORD - 1) != 0)
        units = np.arange(len(words))
        place = 0
        for first in np.flatnonzero(np.isin(ids[starts], self._first_tokens)).tolist():
            if first < place:  # inside the phrase before
                continue
            place = max(first + 1, self._longest(words, first))
            units[first:place] = first
        joined = np.repeat(units, np.diff(np.append(starts, len(ids)))).astype(np.int32)
        return np.where(word_ids == NO_WORD, NO_WORD, joined).astype(np.int32)

    def _longest(self, words: list[Word], first: int) -> int:
        """The word after the longest phrase that begins at `first`; `first` where none does."""
        node, found = self._first, first
        for number in range(first, len(words)):
            if (following := node.get(words[number])) is None:
                break
            node = following
            if _END in node:
                found = number + 1
        return found

    def join_document(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with units in place of words: with those that it has of its own, else with these."""
        phrases = Phrases(self.tokenizer, document.units) if document.units else self
        if document.word_ids is None or not phrases._first:
            return document
        return replace(document, word_ids=phrases.join(document.ids, document.word_ids))


def _words(ids: np.ndarray, word_ids: np.ndarray) -> Iterator[Word]:
    """The words of a text; special tokens are empty ones, which no phrase has."""
    if len(ids):
        cuts = np.flatnonzero(np.diff(word_ids)) + 1
        for part, numbers in zip(np.split(ids, cuts), np.split(word_ids, cuts), strict=True):
            yield () if numbers[0] == NO_WORD else tuple(part.tolist())
