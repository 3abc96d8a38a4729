"""Masked language modelling with next-sentence prediction (Devlin et al. 2019, section 3.1 and appendix A.2)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument
from hf_ctxmodels.objectives.pairs.sentence_pairs import (
    LabelledSegments,
    RandomSegment,
    Segment,
    SentencePairCollator,
    SentencePairs,
    end_of_target,
    random_split,
)

CONTINUATION, RANDOM = 0, 1
"""Values of `next_sentence_label`, as in `transformers.BertForPreTraining`."""


@dataclass
class DataCollatorForMaskedLMWithNextSentence(SentencePairCollator):
    """Masks pairs as `DataCollatorForMaskedLM` does and adds `next_sentence_label`.

    Each feature holds, in addition to the columns of `DataCollatorForMaskedLM`:
        token_type_ids: (tokens,), 0 for the first segment and 1 for the second.
        next_sentence_label: 0 when the second segment continues the first, 1 when it is random; returned as (batch,).
    """

    label = "next_sentence_label"


@dataclass
class MaskedLMWithNextSentence(DataCollatorForMaskedLMWithNextSentence, SentencePairs):
    """BERT's objective: predict masked tokens, and whether segment B follows segment A.

    Pairs are made as in the paper's released data preparation, see `SentencePairs`. Sentences are collected until they
    fill an example. With probability 1/2, or if there is only one sentence, B comes from a random position of another
    document and the unused sentences are returned; otherwise B is the rest. Requires at least two documents.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; one class: B follows A (0) or is random (1) |

    References: Devlin et al. 2019, section 3.1 and appendix A.2; `create_pretraining_data.py` of its release.
    Related: `MaskedLM` is the first task alone; `MaskedLMWithSentenceOrder` predicts the order of two neighbours.

    Example:
        >>> MaskedLMWithNextSentence(tokenizer, max_length=128, seed=0, max_predictions=20)
    """

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabelledSegments]:
        """See `next_sentence_pairs`."""
        return next_sentence_pairs(document, target, random_segment, rng)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, and random second segments."""
        return {**super().count(batch), "random_next": int((batch[self.label] == RANDOM).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, and of random second segments."""
        return {**super().rates(counts), "random_next_share": counts["random_next"] / max(1, counts["rows"])}


def next_sentence_pairs(
    document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
) -> Iterator[LabelledSegments]:
    """Pairs of segments of which the second continues the first or is random; see `MaskedLMWithNextSentence`."""
    start = 0
    while start < len(document):
        stop = end_of_target(document, start, target)
        split = random_split(start, stop, rng)
        first = Segment.of(document, start, split)
        if split == stop or rng.random() < 0.5:
            yield LabelledSegments((first, random_segment(target - len(first))), RANDOM)
            start = split
        else:
            yield LabelledSegments((first, Segment.of(document, split, stop)), CONTINUATION)
            start = stop
