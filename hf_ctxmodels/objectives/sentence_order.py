"""Masked language modeling with sentence-order prediction (Lan et al. 2019, section 3.1)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.objectives.sentence_pairs import (
    ONE_SEGMENT_HELP,
    SENTENCE_TASK_HELP,
    SWAPPED,
    LabeledSegments,
    OneSegment,
    PairSampler,
    RandomSegment,
    SentencePairCollator,
    SentencePairs,
    SentenceTask,
)
from hf_ctxmodels.objectives.tokenized_documents import TokenizedDocument


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

    Section 4.6 compares the label with BERT's, `sentence_task="next"`, and with none; see `PairSampler`.

    References: Lan et al. 2019, section 3.1.
    Related: `MaskedLMWithNextSentence`, whose second segment is often of another document; `MaskedLM`, without pairs.

    Example:
        >>> MaskedLMWithSentenceOrder(tokenizer, max_length=512, seed=0, ngram=3)
    """

    sentence_task: SentenceTask = flag("order", SENTENCE_TASK_HELP)
    one_segment: OneSegment = flag("unlabeled", ONE_SEGMENT_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler = PairSampler(self.sentence_task, self.one_segment, self.statistics)
        self.samples_other_documents = self.sampler.samples_other_documents
        self.label_classes = self.sampler.label_classes

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples of a document, see `SentencePairs.segment_pairs`."""
        return self.sampler.segment_pairs(document, target, random_segment, rng)
