"""Masked language modeling with the word and sentence structural objectives (Wang et al. 2019, "StructBERT")."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.padding import Batch
from hf_ctxmodels.data.seeding import Purpose
from hf_ctxmodels.objectives.features import feature_generator
from hf_ctxmodels.objectives.sentence_pairs import (
    LabeledSegments,
    RandomSegment,
    Segment,
    SentencePairCollator,
    SentencePairs,
    end_of_target,
    random_split,
)
from hf_ctxmodels.objectives.tokenized_documents import TokenizedDocument

NEXT, PREVIOUS, RANDOM = 0, 1, 2
"""Values of `sentence_label`."""

SENTENCE_TASKS = {
    "three-way": (1 / 3, 1 / 3, 1 / 3),
    "next": (1 / 2, 0.0, 1 / 2),
    "order": (1 / 2, 1 / 2, 0.0),
    "none": (1.0, 0.0, 0.0),
}
"""Shares of NEXT, PREVIOUS and RANDOM."""


@dataclass
class DataCollatorForMaskedLMWithStructure(SentencePairCollator):
    """Masks pairs as `DataCollatorForMaskedLM` does, shuffles n-grams of the other tokens, and adds `sentence_label`.

    An n-gram is a window of `shuffled_length` neighboring tokens, none of them special or selected for masking. The
    share `shuffle_probability` of the n-grams is sampled without overlaps, and the tokens of each are permuted; the
    identity is as likely as any permutation. All tokens of a sampled n-gram are targets.

    Each feature holds, in addition to the columns of `SentencePairCollator`:
        sentence_label: 0 if the second segment follows the first, 1 if it precedes it, 2 if it is of another document,
            -100 without a sentence task.

    Returns: what `DataCollatorForMaskedLM` returns, sentence_label (batch,) int64, and shuffle_labels (batch, width)
    int64, the original tokens of the sampled n-grams, -100 elsewhere.
    """

    label, label_classes = "sentence_label", {"next": NEXT, "previous": PREVIOUS, "random": RANDOM}

    shuffle_probability: float = flag(0.05, "Share of the n-grams without masked tokens to shuffle; 0: none.")
    shuffled_length: int = flag(3, "Tokens of a shuffled n-gram (the paper's K).")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "shuffle_probability", at_least=0, at_most=1)
        check_range(self, "shuffled_length", at_least=2)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and shuffle features; see the class for their columns and the returned ones."""
        batch = super().collate(features)
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        shuffle_labels = np.full_like(labels, IGNORE_INDEX)
        for row, feature in enumerate(features):
            rng = feature_generator(feature, self.seed, Purpose.ORDER, period=self.mask_period)
            shufflable = self.masker.non_special.candidates(ids[row]) & (labels[row] == IGNORE_INDEX)
            for start in self.sample_ngrams(shufflable, rng):
                window = slice(start, start + self.shuffled_length)
                shuffle_labels[row, window] = ids[row, window]
                ids[row, window] = rng.permutation(ids[row, window])
        batch["shuffle_labels"] = torch.from_numpy(shuffle_labels)
        return batch

    def sample_ngrams(self, shufflable: np.ndarray, rng: np.random.Generator) -> list[int]:
        """Starts of the n-grams to shuffle in a sequence; `shufflable` is (tokens,) bool."""
        candidates = self.ngrams(shufflable)
        count = round(self.shuffle_probability * len(candidates))
        starts: list[int] = []
        occupied = np.zeros(len(shufflable), dtype=bool)
        for start in rng.permutation(candidates).tolist() if count else ():
            window = slice(start, start + self.shuffled_length)
            if len(starts) < count and not occupied[window].any():
                occupied[window] = True
                starts.append(start)
        return starts

    def ngrams(self, shufflable: np.ndarray) -> np.ndarray:
        """Starts of all windows of `shuffled_length` True values; they overlap."""
        if len(shufflable) < self.shuffled_length:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.lib.stride_tricks.sliding_window_view(shufflable, self.shuffled_length).all(1))

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking and the pairs, n-grams, and shuffled and moved tokens."""
        labels, shuffle_labels = batch["labels"], batch["shuffle_labels"]
        is_shuffled = shuffle_labels != IGNORE_INDEX
        originals = torch.where(is_shuffled, shuffle_labels, batch["input_ids"])
        is_non_special = torch.from_numpy(self.masker.non_special.table)[originals]
        shufflable = (is_non_special & (labels == IGNORE_INDEX)).numpy()
        return {
            **super().count_batch(batch),
            "ngrams": sum(len(self.ngrams(row)) for row in shufflable),
            "shuffled_tokens": int(is_shuffled.sum()),
            "moved_tokens": int((is_shuffled & (shuffle_labels != batch["input_ids"])).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking and the pairs, of n-grams without a masked token, and of tokens of shuffled n-grams."""
        shuffled = counts["shuffled_tokens"]
        return {
            **super().rates(counts),
            "shuffled_ngram_share": shuffled / self.shuffled_length / max(1, counts["ngrams"]),
            "shuffled_token_share": shuffled / max(1, counts["maskable_tokens"]),
            "moved_token_share": counts["moved_tokens"] / max(1, shuffled),
        }


@dataclass
class MaskedLMWithStructure(DataCollatorForMaskedLMWithStructure, SentencePairs):
    """StructBERT's objective: masked tokens, the order of shuffled words, and the order of two segments.

    - Word structure: after masking, 5% of the trigrams of unmasked tokens are shuffled; the masked-LM head predicts the
      original token at each of their positions. The share is of all trigrams, which overlap, while the sampled ones do
      not, so about a tenth of the tokens are shuffled.
    - Sentence structure: of two segments, with probability 1/3 each, the second follows the first (0), precedes it (1)
      or is of another document (2). A text of one sentence is paired with a segment of another document.

    Examples are made as for next-sentence prediction, see `SentencePairs`. Requires at least two documents, except with
    `sentence_task="order"`, which has the first two classes and no label for a text of one sentence, and "none". The
    loss is the sum of the three terms, each a mean over its targets.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; the tokens of shuffled trigrams; one of three classes |

    References: Wang et al. 2019 (arXiv 1908.04577), section 2.2.
    Related: `MaskedLMWithNextSentence` has no shuffled words and two classes; `MaskedLMWithSentenceOrder` distinguishes
    the first two classes.

    Example:
        >>> MaskedLMWithStructure(tokenizer, max_length=512, seed=0, shuffle_probability=0.0)  # without word structure
    """

    sentence_task: Literal["three-way", "next", "order", "none"] = flag(
        "three-way",
        "`three-way`: the second segment follows, precedes, or is of another document; `next`: it follows or is of "
        "another document; `order`: it follows or precedes; `none`: it follows, and nothing is predicted.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(SENTENCE_TASKS, sentence_task=self.sentence_task)
        self.samples_other_documents = self.sentence_task in ("three-way", "next")

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples of a document, see `SentencePairs.segment_pairs`."""
        start = 0
        while start < len(document):
            stop = end_of_target(document, start, target)
            split = random_split(start, stop, rng)
            first, second = Segment.of(document, start, split), Segment.of(document, split, stop)
            label = int(rng.choice(3, p=SENTENCE_TASKS[self.sentence_task]))
            if self.sentence_task == "none" or not (len(second) or self.samples_other_documents):
                yield LabeledSegments((first, second) if len(second) else (first,), IGNORE_INDEX)
            elif label == RANDOM or not len(second):
                yield LabeledSegments((first, random_segment(target - len(first))), RANDOM)
                stop = split
            else:
                yield LabeledSegments((first, second) if label == NEXT else (second, first), label)
            start = stop
