"""Masking of words, phrases and entities as units, with pairs of segments (Sun et al. 2019, section 3.2)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.objectives.masking import UnitMaskingRule
from hf_ctxmodels.objectives.phrases import Phrases
from hf_ctxmodels.objectives.sentence_pairs import (
    CONTINUATION,
    RANDOM,
    LabelledSegments,
    RandomSegment,
    Segment,
    SentencePairCollator,
    SentencePairs,
    next_sentence_pairs,
)
from hf_ctxmodels.objectives.tokenized_documents import TokenizedDocument, sentence_chunks

Pairs = Literal["random", "swapped"]


@dataclass
class DataCollatorForUnitMaskingWithPairs(SentencePairCollator):
    """Masks units of pairs: all tokens of 15% of the units, each replaced independently: 80% -> mask token, 10% ->
    random, 10% unchanged.

    Each feature holds, in addition to the columns of `DataCollatorForMaskedLM`:
        word_ids: (tokens,) numbers of units; -1 for special tokens.
        next_sentence_labels: 0 when the second segment follows the first, 1 when not, -100 for one segment;
            returned as (batch,).
    """

    label = "next_sentence_labels"
    rule_class = UnitMaskingRule

    whole_word: bool = field(default=True, init=False)
    ngram: int = field(default=1, init=False)
    unit_rows: float = flag(1.0, "Probability that units are masked in an example instead of single tokens.")
    mlm_probability: float = flag(0.15, "Share of the units of an example to predict.")


@dataclass
class UnitMaskingWithPairs(DataCollatorForUnitMaskingWithPairs, SentencePairs):
    """ERNIE 1.0's objective: predict masked words, phrases or entities, and whether two segments belong together.

    15% of the units are selected, at least one. All tokens of a unit are targets, and each is replaced independently.
    The units are words and, with `units`, the phrases of a file, matched from left to right, the longest first; the
    phrases of a document (`--units_column`) replace them. The stages of the paper (words, phrases, entities) are runs
    with different files, each continued from the previous run. With `unit_rows` below 1 the other examples have masks
    of single tokens.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the units; one class: B follows A (0) or not (1) |

    The negative pairs:

    - `pairs=random`: B is of another document, as in BERT. The first released reader takes B from the next example of a
      shuffled buffer.
    - `pairs=swapped`: the halves of a text, split at the sentence nearest to its middle, are swapped with probability
      1/2, as in the later release. A text of one sentence is split at its middle token.

    References: Sun et al. 2019, sections 3.2 and 4.2; the readers of the PaddlePaddle/ERNIE releases.
    Related: `MaskedLMWithNextSentence` selects 15% of the tokens; `ContinualTasks` adds the tasks of ERNIE 2.0.

    Example:
        >>> UnitMaskingWithPairs(tokenizer, max_length=128, seed=0, units="phrases.txt", pairs="swapped")
    """

    units: str = flag("", "File of phrases, one per line, that are units; empty: only words are units.")
    pairs: Pairs = flag(
        "random",
        "Negative pairs: `random` takes the second segment of another document, `swapped` the halves of a text in the "
        "wrong order.",
    )
    short_seq_probability: float = flag(0.15, "Share of the documents whose pairs get a random shorter length.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(get_args(Pairs), pairs=self.pairs)
        self.phrases = Phrases.from_file(self.tokenizer, self.units)
        self.samples_other_documents = self.pairs == "random"
        self.config_fields = {"pretraining_tasks": {"next_sentence": 2}}

    def prepare(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with phrases as units."""
        return self.phrases.join_document(document)

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabelledSegments]:
        """The examples of a document, see `SentencePairs.segment_pairs`."""
        if self.pairs == "random":
            yield from next_sentence_pairs(document, target, random_segment, rng)
            return
        for first, last in sentence_chunks(document.bounds, target, from_end=rng.random() < 0.5):
            text = Segment.of(document, first, last)
            if len(text) < 2:
                yield LabelledSegments((text,), IGNORE_INDEX)
                continue
            bounds = document.bounds[first : last + 1]
            middle = (text.start + text.stop) // 2
            if len(bounds) > 2:  # the sentence end nearest to the middle, the earlier of two
                middle = int(min(bounds[1:-1], key=lambda bound: abs(2 * bound - text.start - text.stop)))
            halves = (Segment(document, text.start, middle), Segment(document, middle, text.stop))
            is_swapped = rng.random() < 0.5
            yield LabelledSegments(halves[::-1], RANDOM) if is_swapped else LabelledSegments(halves, CONTINUATION)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, and negative pairs."""
        return {**super().count(batch), "random_next": int((batch[self.label] == RANDOM).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, and of negative pairs."""
        return {**super().rates(counts), "random_next_share": counts["random_next"] / max(1, counts["rows"])}
