"""Masked language modelling with next-sentence prediction (Devlin et al. 2019, section 3.1 and appendix A.2)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hf_ctxmodels.objectives.components.masking import masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument
from hf_ctxmodels.objectives.pairs.sentence_pairs import (
    Choice,
    DataCollatorForSentencePairs,
    Piece,
    SentencePairs,
    filling_stop,
    random_split,
)

CONTINUATION, RANDOM = 0, 1
"""Values of `next_sentence_label`, as in `transformers.BertForPreTraining`."""


@dataclass
class DataCollatorForMaskedLMWithNextSentence(DataCollatorForSentencePairs):
    """Masks pairs as `DataCollatorForMaskedLM` does and carries `next_sentence_label`.

    Each feature holds, in addition to what the masking collator needs:
        token_type_ids: (tokens,), 0 for the first segment and 1 for the second.
        next_sentence_label: 0 when the second segment continues the first, 1 when it is random.

    Returns: what the masking collator returns, and next_sentence_label (batch,) int64.
    """

    label = "next_sentence_label"
    objective = "MaskedLMWithNextSentence"


class MaskedLMWithNextSentence(SentencePairs):
    """BERT's objective: predict masked tokens, and whether segment B follows segment A.

    Pairs are made as in the paper's released data preparation, see `SentencePairs`. Sentences are collected until they
    fill a row. With probability 1/2, or if there is only one sentence, B comes from a random place of another document
    and the unused sentences are returned; otherwise B is the rest. Needs at least two documents.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; one class per row: B follows A (0) or is random (1) |

    References: Devlin et al. 2019, section 3.1 and appendix A.2; `create_pretraining_data.py` of its release.
    Related: `MaskedLM` is the first task alone; `MaskedLMWithSentenceOrder` predicts the order of two neighbours.

    Example:
        >>> MaskedLMWithNextSentence(tokenizer, max_length=128, seed=0, max_predictions=20)
    """

    Collator = DataCollatorForMaskedLMWithNextSentence
    samples_other_documents = True

    def choices(
        self, document: TokenizedDocument, target: int, other: Callable[[int], Piece], rng: np.random.Generator
    ) -> Iterator[Choice]:
        """See `SentencePairs.choices`."""
        start = 0
        while start < len(document):
            stop = filling_stop(document, start, target)
            split = random_split(start, stop, rng)
            first = Piece.of(document, start, split)
            if split == stop or rng.random() < 0.5:
                yield Choice((first, other(target - len(first))), RANDOM)
                start = split
            else:
                yield Choice((first, Piece.of(document, split, stop)), CONTINUATION)
                start = stop

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        random_next = int((batch[self.Collator.label] == RANDOM).sum())
        return {**self.collate.masker.count(batch), "random_next": random_next}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {**masking_rates(counts), "random_next_share": counts["random_next"] / max(1, counts["rows"])}
