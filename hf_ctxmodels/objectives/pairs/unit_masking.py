"""Masking of words, phrases and entities as units, with pairs of segments (Sun et al. 2019, section 3.2)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.objectives.base import collator_options
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument, sentence_chunks
from hf_ctxmodels.objectives.components.units import Phrases, UnitMaskingRule
from hf_ctxmodels.objectives.pairs.next_sentence import CONTINUATION, RANDOM, MaskedLMWithNextSentence
from hf_ctxmodels.objectives.pairs.sentence_pairs import Choice, DataCollatorForSentencePairs, Piece

PAIRS = ("random", "swapped")


@dataclass
class DataCollatorForUnitMaskingWithPairs(DataCollatorForSentencePairs):
    """Masks units of pairs: 15% of a row's units, each of whose tokens is replaced by itself: 80% -> mask token, 10% ->
    random, 10% kept.

    Each feature holds what `DataCollatorForSentencePairs` needs, with the label `next_sentence_labels`; its word_ids
    are the numbers of units.

    Returns: what the masking collator returns, and next_sentence_labels (batch,) int64.
    """

    label = "next_sentence_labels"
    objective = "UnitMaskingWithPairs"

    unit_rows: float = 1.0

    def rule(self) -> UnitMaskingRule:
        """The rule that the fields describe."""
        return UnitMaskingRule.of(self)


@dataclass(frozen=True)
class UnitMaskingOptions:
    """Options of objectives with masked units."""

    units: str = flag("", "File of phrases, one per line, that are units; words alone are units without one.")
    unit_rows: float = flag(1.0, "Probability that units are masked in a row; in the others single tokens are.")
    mlm_probability: float = flag(0.15, "Share of the units of a row to predict.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is kept.")
    max_predictions: int | None = flag(None, "Maximum number of predicted tokens in a row.")
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")
    pad_to_multiple_of: int | None = flag(None, "Round the width of every batch up to a multiple of this.")

    def collator(self, kind: type, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
        """A collator of class `kind` with these options."""
        return kind(tokenizer, seed=seed, **collator_options(kind, self))

    def phrases(self, tokenizer: PreTrainedTokenizerBase) -> Phrases:
        """The phrases of the file, none without one."""
        return Phrases.read(tokenizer, self.units) if self.units else Phrases(tokenizer, ())


@dataclass(frozen=True)
class UnitPairOptions(UnitMaskingOptions):
    """Options of `UnitMaskingWithPairs`."""

    pairs: Literal["random", "swapped"] = flag(
        "random",
        "The wrong pairs: `random` takes the second segment of another document, `swapped` the halves of a text in the "
        "wrong order.",
    )
    short_seq_probability: float = flag(0.15, "Share of the documents whose pairs get a random shorter length.")


class UnitMaskingWithPairs(MaskedLMWithNextSentence):
    """ERNIE 1.0's objective: predict masked words, phrases or entities, and whether two segments belong together.

    15% of a row's units are selected, at least one. All tokens of a unit are targets, and each draws its own
    replacement. The units are words, and with `units` the phrases of a file, found from left to right, the longest
    first; a document with phrases of its own (`--units_column`) has those in their place. The stages of the paper
    (words, phrases, entities) are runs with other files, each going on from the run before. With `unit_rows` below 1
    the other rows have masks of single tokens.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the units; one class per row: B follows A (0) or not (1) |

    The wrong pairs:

    - `pairs=random`: B is of another document; the pairs are made as BERT's. The first released reader takes B from the
      next example of a shuffled buffer.
    - `pairs=swapped`: the halves of a text, split at the sentence nearest to its middle, change places with probability
      1/2, as in the later release. A text of one sentence is split at its middle token.

    References: Sun et al. 2019, sections 3.2 and 4.2; the readers of the PaddlePaddle/ERNIE releases.
    Related: `MaskedLMWithNextSentence` selects 15% of the tokens; `ContinualTasks` adds the tasks of ERNIE 2.0.

    Example:
        >>> UnitMaskingWithPairs(tokenizer, max_length=128, seed=0, units="phrases.txt", pairs="swapped")
    """

    Options: ClassVar[type] = UnitPairOptions
    Collator = DataCollatorForUnitMaskingWithPairs
    collate: DataCollatorForUnitMaskingWithPairs

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        check_choice(PAIRS, pairs=self.options.pairs)
        self.phrases = self.options.phrases(tokenizer)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The task beside masked units."""
        return {"pretraining_tasks": {"next_sentence": 2}}

    @property
    def samples_other_documents(self) -> bool:  # type: ignore[override]
        """See `SentencePairs`."""
        return self.options.pairs == "random"

    def prepare(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with phrases as units."""
        return self.phrases.join_document(document)

    def choices(
        self, document: TokenizedDocument, target: int, other: Callable[[int], Piece], rng: np.random.Generator
    ) -> Iterator[Choice]:
        """See `SentencePairs.choices`."""
        if self.options.pairs == "random":
            yield from super().choices(document, target, other, rng)
            return
        for first, last in sentence_chunks(document.bounds, target, from_end=rng.random() < 0.5):
            text = Piece.of(document, first, last)
            if len(text) < 2:
                yield Choice((text,), IGNORE_INDEX)
                continue
            middle = _middle(document.bounds[first : last + 1])
            halves = (Piece(document, text.start, middle), Piece(document, middle, text.stop))
            yield Choice(halves[::-1], RANDOM) if rng.random() < 0.5 else Choice(halves, CONTINUATION)


def _middle(bounds: np.ndarray) -> int:
    """The inner bound nearest to the middle of a text, the earlier of two; its middle token if there is none.

    Args:
        bounds: (sentences + 1,) first tokens of the sentences, and the end.
    """
    middle = (int(bounds[0]) + int(bounds[-1])) / 2
    return int(min(bounds[1:-1], key=lambda bound: abs(bound - middle))) if len(bounds) > 2 else int(middle)
