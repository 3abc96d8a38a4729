"""Masked language modelling with sentence-order prediction (Lan et al. 2019, section 3.1)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument, sentence_chunks
from hf_ctxmodels.objectives.pairs.sentence_pairs import (
    Choice,
    DataCollatorForSentencePairs,
    Piece,
    SentencePairOptions,
    SentencePairs,
    random_split,
)

IN_ORDER, SWAPPED = 0, 1
"""Values of `sentence_order_label`, as in `transformers.AlbertForPreTraining`."""

ONE_SEGMENT = ("unlabelled", "random", "drop")


@dataclass
class DataCollatorForMaskedLMWithSentenceOrder(DataCollatorForSentencePairs):
    """Masks pairs as `DataCollatorForMaskedLM` does and carries `sentence_order_label`.

    Each feature holds, in addition to what the masking collator needs:
        token_type_ids: (tokens,), 0 for the first segment and 1 for the second.
        sentence_order_label: 0 when the segments are in order, 1 when they are swapped, -100 for a row of one
            segment, which has no order.

    Returns: what the masking collator returns, and sentence_order_label (batch,) int64.
    """

    label = "sentence_order_label"
    objective = "MaskedLMWithSentenceOrder"


@dataclass(frozen=True)
class SentenceOrderOptions(SentencePairOptions):
    """Options of `MaskedLMWithSentenceOrder`."""

    one_segment: Literal["unlabelled", "random", "drop"] = flag(
        "unlabelled",
        "Treatment of text with only one segment: `unlabelled` masks it without an order label, `random` adds a "
        "segment of another document with the label swapped, `drop` leaves it out.",
    )


class MaskedLMWithSentenceOrder(SentencePairs):
    """ALBERT's objective: predict masked tokens, and whether two neighbouring segments are in order or swapped.

    A row takes the sentences that fit, at least two, and splits them at random; in half of the pairs the segments are
    swapped. See `SentencePairs` for the rest. ALBERT masks runs of up to three words: `ngram=3`.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; one class per row: in order (0) or swapped (1) |
    | one sentence | `[CLS] A [SEP]` | 15% of the tokens |

    The released data preparation differs in two points:

    - It also takes the first sentence that does not fit, and cuts it. Such a sentence is longer than others, so the
      longer segment reveals the order, and at 128 tokens a seventh of the text is lost. Here a row ends before that
      sentence, and half of the documents are processed from their end, so that neither segment is longer on average.
    - A single sentence (a short document, or the end of a long one) has no order. The release takes a second segment
      from another document with the label 1: `one_segment="random"`. That is next-sentence prediction, which section
      3.1 finds to be solved by the topic, and more than half of the labels become 1. By default such text has masked
      tokens and the label -100; `"drop"` leaves it out. `statistics` counts it (`one_segment_chunks`,
      `dropped_tokens`), and `rates` gives the share of labelled rows.

    References: Lan et al. 2019, section 3.1.
    Related: `MaskedLMWithNextSentence`, whose second segment is often of another document; `MaskedLM`, without pairs.

    Example:
        >>> MaskedLMWithSentenceOrder(tokenizer, max_length=512, seed=0, ngram=3)
    """

    Options: ClassVar[type] = SentenceOrderOptions
    Collator = DataCollatorForMaskedLMWithSentenceOrder

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        check_choice(ONE_SEGMENT, one_segment=self.options.one_segment)

    @property
    def samples_other_documents(self) -> bool:
        """See `SentencePairs`."""
        return self.options.one_segment == "random"

    def choices(
        self, document: TokenizedDocument, target: int, other: Callable[[int], Piece], rng: np.random.Generator
    ) -> Iterator[Choice]:
        """See `SentencePairs.choices`."""
        for start, stop in sentence_chunks(document.bounds, target, from_end=rng.random() < 0.5):
            split = random_split(start, stop, rng)
            first, rest = Piece.of(document, start, split), Piece.of(document, split, stop)
            if len(rest):
                yield Choice((rest, first), SWAPPED) if rng.random() < 0.5 else Choice((first, rest), IN_ORDER)
                continue
            self.statistics["one_segment_chunks"] += 1
            if self.options.one_segment == "random":
                yield Choice((first, other(target - len(first))), SWAPPED)
            elif self.options.one_segment == "unlabelled":
                yield Choice((first,), IGNORE_INDEX)
            else:
                self.statistics["dropped_tokens"] += len(first)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        labels = batch["sentence_order_label"]
        swapped, ordered = int((labels == SWAPPED).sum()), int((labels == IN_ORDER).sum())
        return {**self.collate.masker.count(batch), "swapped_rows": swapped, "labelled_rows": swapped + ordered}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        labelled = counts["labelled_rows"]
        return {
            **masking_rates(counts),
            "swapped_share": counts["swapped_rows"] / max(1, labelled),
            "labelled_share": labelled / max(1, counts["rows"]),
        }
