"""Masked language modelling with the word and sentence structural objectives (Wang et al. 2019, "StructBERT")."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.data.seeding import Stream
from hf_ctxmodels.objectives.base import Batch, check_at_least
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument
from hf_ctxmodels.objectives.pairs.sentence_pairs import (
    Choice,
    DataCollatorForSentencePairs,
    Piece,
    SentencePairOptions,
    SentencePairs,
    filling_stop,
    random_split,
)

NEXT, PREVIOUS, RANDOM = 0, 1, 2
"""Values of `sentence_label`."""

SENTENCE_TASKS = {"three-way": (1 / 3, 1 / 3, 1 / 3), "next": (1 / 2, 0.0, 1 / 2), "none": (1.0, 0.0, 0.0)}
"""Shares of NEXT, PREVIOUS and RANDOM."""


@dataclass
class DataCollatorForMaskedLMWithStructure(DataCollatorForSentencePairs):
    """Masks pairs as `DataCollatorForMaskedLM` does, shuffles n-grams of the other tokens, and carries
    `sentence_label`.

    An n-gram is a window of `shuffled_length` neighbouring tokens, none of them special or selected for masking. A
    share of a row's n-grams, `shuffle_probability`, rounded, is drawn without overlaps. The tokens of each are
    permuted; every permutation is as likely, the original order too. All tokens of a drawn n-gram are targets, each the
    original token at its place, also where the permutation leaves it.

    Each feature holds, in addition to what the masking collator needs:
        token_type_ids: (tokens,), 0 for the first segment and 1 for the second.
        sentence_label: 0 when the second segment follows the first, 1 when it precedes it, 2 when it is of another
            document, -100 without a sentence task.

    Returns: what the masking collator returns, sentence_label (batch,) int64, and shuffle_labels (batch, width) int64,
    the original tokens of the drawn n-grams, -100 elsewhere.

    Args:
        shuffle_probability: Share of a row's n-grams to shuffle; 0 for none.
        shuffled_length: Tokens of an n-gram (the paper's K).
    """

    label = "sentence_label"
    objective = "MaskedLMWithStructure"

    shuffle_probability: float = 0.05
    shuffled_length: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shuffle_probability <= 1:
            raise CtxError(f"shuffle_probability={self.shuffle_probability} is not a probability.", hint="use 0 to 1.")
        check_at_least(2, shuffled_length=self.shuffled_length)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        batch = super().torch_call(features)
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        shuffle_labels = np.full_like(labels, IGNORE_INDEX)
        for row, feature in enumerate(features):
            rng = feature_generator(feature, self.seed, self.static, Stream.ORDER)
            free = self.masker.non_special.candidates(ids[row]) & (labels[row] == IGNORE_INDEX)
            for start in self.draw(free, rng):
                window = slice(start, start + self.shuffled_length)
                shuffle_labels[row, window] = ids[row, window]
                ids[row, window] = rng.permutation(ids[row, window])
        batch["shuffle_labels"] = torch.from_numpy(shuffle_labels)
        return batch

    def draw(self, free: np.ndarray, rng: np.random.Generator) -> list[int]:
        """Starts of the n-grams to shuffle in a row.

        Args:
            free: (tokens,) bool, True where a token may be shuffled.
            rng: The row's generator.
        """
        starts = self.ngrams(free)
        count = round(self.shuffle_probability * len(starts))
        chosen: list[int] = []
        taken = np.zeros(len(free), dtype=bool)
        for start in rng.permutation(starts).tolist() if count else ():
            window = slice(start, start + self.shuffled_length)
            if len(chosen) < count and not taken[window].any():
                taken[window] = True
                chosen.append(start)
        return chosen

    def ngrams(self, free: np.ndarray) -> np.ndarray:
        """Starts of all windows of `shuffled_length` True values; they overlap."""
        if len(free) < self.shuffled_length:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.lib.stride_tricks.sliding_window_view(free, self.shuffled_length).all(1))


@dataclass(frozen=True)
class StructureOptions(SentencePairOptions):
    """Options of `MaskedLMWithStructure`; see the collator."""

    shuffle_probability: float = flag(0.05, "Share of the n-grams without masked tokens to shuffle; 0: none.")
    shuffled_length: int = flag(3, "Tokens of a shuffled n-gram.")
    sentence_task: Literal["three-way", "next", "none"] = flag(
        "three-way",
        "`three-way`: the second segment follows, precedes, or is of another document; `next`: it follows or is of "
        "another document; `none`: it follows, and nothing is predicted.",
    )


class MaskedLMWithStructure(SentencePairs):
    """StructBERT's objective: masked tokens, the order of shuffled words, and the order of two segments.

    - Word structure: after masking, 5% of the trigrams of tokens that are not masked are shuffled; the masked-LM head
      predicts the original token at each of their places. The paper leaves open what the 5% are of; here they are of
      the windows of three neighbouring tokens, overlapping ones counted, of which those drawn do not overlap. So about
      a tenth of the tokens are shuffled.
    - Sentence structure: of two segments, with probability 1/3 each, the second follows the first (0), precedes it (1)
      or is of another document (2). A text of one sentence has no neighbour, and gets a segment of another document.

    Rows are made as for next-sentence prediction, see `SentencePairs`. Needs at least two documents, except with
    `sentence_task="none"`. The loss is the sum of the three terms, each a mean over its own targets.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; those of shuffled trigrams; one of three classes a row |

    References: Wang et al. 2019 (arXiv 1908.04577), section 2.2.
    Related: `MaskedLMWithNextSentence` has no shuffled words and two classes; `MaskedLMWithSentenceOrder` tells the
    first two classes apart.

    Example:
        >>> MaskedLMWithStructure(tokenizer, max_length=512, seed=0, shuffle_probability=0.0)  # without word structure
    """

    Options: ClassVar[type] = StructureOptions
    Collator = DataCollatorForMaskedLMWithStructure
    collate: DataCollatorForMaskedLMWithStructure

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        check_choice(SENTENCE_TASKS, sentence_task=self.options.sentence_task)

    @property
    def samples_other_documents(self) -> bool:
        """See `SentencePairs`."""
        return self.options.sentence_task != "none"

    def choices(
        self, document: TokenizedDocument, target: int, other: Callable[[int], Piece], rng: np.random.Generator
    ) -> Iterator[Choice]:
        """See `SentencePairs.choices`."""
        start = 0
        while start < len(document):
            stop = filling_stop(document, start, target)
            split = random_split(start, stop, rng)
            first, rest = Piece.of(document, start, split), Piece.of(document, split, stop)
            kind = int(rng.choice(3, p=SENTENCE_TASKS[self.options.sentence_task]))
            if not self.samples_other_documents:
                yield Choice((first, rest) if len(rest) else (first,), IGNORE_INDEX)
            elif kind == RANDOM or not len(rest):
                yield Choice((first, other(target - len(first))), RANDOM)
                stop = split
            else:
                yield Choice((first, rest) if kind == NEXT else (rest, first), kind)
            start = stop

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        labels, shuffled, kinds = batch["labels"], batch["shuffle_labels"], batch["sentence_label"]
        targets = shuffled != IGNORE_INDEX
        originals = torch.where(targets, shuffled, batch["input_ids"])
        table = torch.from_numpy(self.collate.masker.non_special.table)
        free = (table[originals] & (labels == IGNORE_INDEX)).numpy()
        return {
            **self.collate.masker.count(batch),
            "ngrams": sum(len(self.collate.ngrams(row)) for row in free),
            "shuffled_tokens": int(targets.sum()),
            "moved_tokens": int((targets & (shuffled != batch["input_ids"])).sum()),
            **{f"rows_{name}": int((kinds == kind).sum()) for name, kind in _KINDS.items()},
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; "shuffled_ngram_share" is of all n-grams without a masked token, and
        "moved_token_share" of the tokens of shuffled ones."""
        shuffled = counts["shuffled_tokens"]
        return {
            **masking_rates(counts),
            "shuffled_ngram_share": shuffled / self.options.shuffled_length / max(1, counts["ngrams"]),
            "shuffled_token_share": shuffled / max(1, counts["maskable_tokens"]),
            "moved_token_share": counts["moved_tokens"] / max(1, shuffled),
            **{f"{name}_share": counts[f"rows_{name}"] / max(1, counts["rows"]) for name in _KINDS},
        }


_KINDS = {"next": NEXT, "previous": PREVIOUS, "random": RANDOM}
