"""Masked language modeling with sentence-order prediction (Lan et al. 2019, section 3.1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.objectives.sentence_pairs import (
    LabeledSegments,
    RandomSegment,
    Segment,
    SentencePairCollator,
    SentencePairs,
    random_split,
)
from hf_ctxmodels.objectives.tokenized_documents import TokenizedDocument, sentence_chunks

SWAPPED = 1
"""The `sentence_order_label` of swapped segments; 0 in order."""

OneSegment = Literal["unlabeled", "random", "drop"]


@dataclass
class DataCollatorForMaskedLMWithSentenceOrder(SentencePairCollator):
    """Masks pairs as `DataCollatorForMaskedLM` does and adds `sentence_order_label`.

    Each feature holds, in addition to the columns of `SentencePairCollator`:
        sentence_order_label: 0 if the segments are in order, 1 if they are swapped, -100 for one segment; returned as
            (batch,).
    """

    label, label_classes = "sentence_order_label", {"swapped": SWAPPED}


@dataclass
class MaskedLMWithSentenceOrder(DataCollatorForMaskedLMWithSentenceOrder, SentencePairs):
    """ALBERT's objective: predict masked tokens, and whether two neighboring segments are in order or swapped.

    An example takes the sentences that fit, at least two, and splits them at random; in half of the pairs the segments
    are swapped. ALBERT masks runs of up to three words: `ngram=3`.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; one class: in order (0) or swapped (1) |
    | one sentence | `[CLS] A [SEP]` | 15% of the tokens |

    The released data preparation differs in two points:

    - It also takes the first sentence that does not fit, and cuts it, so that the longer segment reveals the order.
      Here an example ends before that sentence, and half of the documents are processed from their end, so that neither
      segment is longer on average.
    - A single sentence has no order. The release takes a second segment from another document with the label 1:
      `one_segment="random"`. This is next-sentence prediction, which section 3.1 finds to be solved by the topic. By
      default such text has masked tokens and the label -100; `"drop"` skips it. `statistics` counts it
      (`one_segment_chunks`, `dropped_tokens`).

    References: Lan et al. 2019, section 3.1.
    Related: `MaskedLMWithNextSentence`, whose second segment is often of another document; `MaskedLM`, without pairs.

    Example:
        >>> MaskedLMWithSentenceOrder(tokenizer, max_length=512, seed=0, ngram=3)
    """

    one_segment: OneSegment = flag(
        "unlabeled",
        "Treatment of text with only one segment: `unlabeled` masks it without an order label, `random` adds a "
        "segment of another document with the label swapped, `drop` skips it.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(get_args(OneSegment), one_segment=self.one_segment)
        self.samples_other_documents = self.one_segment == "random"

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples of a document, see `SentencePairs.segment_pairs`."""
        for start, stop in sentence_chunks(document.bounds, target, from_end=rng.random() < 0.5):
            split = random_split(start, stop, rng)
            first, second = Segment.of(document, start, split), Segment.of(document, split, stop)
            if len(second):
                is_swapped = rng.random() < 0.5
                yield LabeledSegments((second, first) if is_swapped else (first, second), int(is_swapped))
                continue
            self.statistics["one_segment_chunks"] += 1
            if self.one_segment == "random":
                yield LabeledSegments((first, random_segment(target - len(first))), SWAPPED)
            elif self.one_segment == "unlabeled":
                yield LabeledSegments((first,), IGNORE_INDEX)
            else:
                self.statistics["dropped_tokens"] += len(first)
