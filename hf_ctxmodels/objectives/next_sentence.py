"""Masked language modelling with next-sentence prediction (Devlin et al. 2019, section 3.1 and appendix A.2)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.flags import flag
from hf_ctxmodels.objectives.base import Batch, Example, Objective
from hf_ctxmodels.objectives.masked_lm import (
    DOCUMENTS_PER_BATCH,
    DataCollatorForMaskedLanguageModeling,
    MaskingOptions,
)
from hf_ctxmodels.objectives.masking import masking_rates
from hf_ctxmodels.objectives.seeding import Stream, generator
from hf_ctxmodels.objectives.segments import RowTemplate, TokenizedDocument, tokenized_batches

CONTINUATION, RANDOM = 0, 1
"""Values of `next_sentence_label`, as in `transformers.BertForPreTraining`."""


@dataclass
class DataCollatorForNextSentencePrediction(DataCollatorForMaskedLanguageModeling):
    """Masks pairs as `DataCollatorForMaskedLanguageModeling` does and carries `next_sentence_label`.

    Each feature holds, beside what the masking collator needs:
        token_type_ids: (tokens,), 0 for the first segment and 1 for the second.
        next_sentence_label: 0 when the second segment continues the first, 1 when it is random.

    Returns: what the masking collator returns, and next_sentence_label (batch,) int64.
    """

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        for name in ("token_type_ids", "next_sentence_label"):
            if any(name not in feature for feature in features):
                raise CtxError(
                    f"Next-sentence prediction needs `{name}` in every feature.",
                    mend="build the pairs from documents with MaskedLMWithNextSentence.examples(documents).",
                )
        batch = super().torch_call(features)
        labels = [int(feature["next_sentence_label"]) for feature in features]
        batch["next_sentence_label"] = torch.tensor(labels, dtype=torch.int64)
        return batch


@dataclass(frozen=True)
class NextSentenceOptions(MaskingOptions):
    """Options of `MaskedLMWithNextSentence`."""

    short_seq_probability: float = flag(0.1, "Share of the documents whose pairs get a random shorter length.")


@dataclass(frozen=True)
class _Piece:
    """Tokens [start, stop) of a document."""

    document: TokenizedDocument
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, count: int, rng: np.random.Generator) -> "_Piece":
        """Without `count` tokens, each taken from the front or the end with equal chance."""
        front = int(rng.binomial(count, 0.5))
        return _Piece(self.document, self.start + front, self.stop - (count - front))

    @property
    def ids(self) -> np.ndarray:
        return self.document.ids[self.start : self.stop]

    @property
    def word_ids(self) -> np.ndarray | None:
        return None if self.document.word_ids is None else self.document.word_ids[self.start : self.stop]


class MaskedLMWithNextSentence(Objective):
    """BERT's own objective: masked tokens, and whether segment B follows segment A.

    Pairs are made as in the paper's released data preparation. Sentences of a document are gathered until they fill a
    row; a random number of them, at least one and not all, becomes A. With probability 1/2, or when only one sentence
    was gathered, B comes from a random place of another document and the sentences not used are put back; otherwise B
    is the rest. Pairs that are too long lose tokens of the longer segment, from a random end each. One document in ten
    (`short_seq_probability`) aims at a shorter row, drawn uniformly from 2 tokens up.

    The other document is drawn among the thousand that are tokenised together, which makes a stream and a data set in
    memory give the same pairs. Needs at least two documents.

    Related: `MaskedLM` is the first task alone.
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = NextSentenceOptions
    collate: DataCollatorForNextSentencePrediction

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not 0 <= self.options.short_seq_probability <= 1:
            raise CtxError(
                f"short_seq_probability={self.options.short_seq_probability} is not a probability.",
                mend="use 0 to 1.",
            )
        self.template = RowTemplate(tokenizer, segments=2)
        self.room = self.template.room(max_length)
        self.collate = self.options.collator(DataCollatorForNextSentencePrediction, tokenizer, seed)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, token_type_ids, next_sentence_label, and word_ids for whole words."""
        number = 0
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, self.options.whole_word):
            usable = [index for index, document in enumerate(batch) if len(document)]
            if len(usable) < 2:
                raise CtxError(
                    "Next-sentence prediction draws the random second segment from another document, and there is only "
                    "one document with text.",
                    mend="separate the documents (in a text file: by a blank line), or use the objective `mlm`.",
                )
            for place, index in enumerate(usable):
                rng = generator(self.seed, pass_index, number + index, Stream.PAIRING)
                yield from self._pairs(batch, usable, place, rng)
            number += len(batch)

    def _pairs(
        self, batch: list[TokenizedDocument], usable: list[int], place: int, rng: np.random.Generator
    ) -> Iterator[Example]:
        """All pairs of one document, `batch[usable[place]]`."""
        document = batch[usable[place]]
        self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
        target = self.room
        if rng.random() < self.options.short_seq_probability:
            target = int(rng.integers(2, self.room, endpoint=True))
        first = 0
        while first < len(document):
            last = self._gather(document, first, target)
            split = first + int(rng.integers(1, last - first)) if last - first > 1 else last
            a = _Piece(document, int(document.bounds[first]), int(document.bounds[split]))
            if split == last or rng.random() < 0.5:
                other = int(rng.integers(len(usable) - 1))
                b = _random_piece(batch[usable[other + (other >= place)]], target - len(a), rng)
                label, first = RANDOM, split
            else:
                b = _Piece(document, int(document.bounds[split]), int(document.bounds[last]))
                label, first = CONTINUATION, last
            yield self._row(a, b, label, rng)

    @staticmethod
    def _gather(document: TokenizedDocument, first: int, target: int) -> int:
        """Sentence after the last one needed to reach `target` tokens from sentence `first` on."""
        reached = int(np.searchsorted(document.bounds, document.bounds[first] + target))
        return min(reached, len(document))

    def _row(self, a: _Piece, b: _Piece, label: int, rng: np.random.Generator) -> Example:
        excess = len(a) + len(b) - self.room
        if excess > 0:
            self.statistics["truncated_tokens"] += excess
            a, b = _truncate(a, b, excess, rng)
        row: Example = {
            "input_ids": self.template.fill(a.ids, b.ids),
            "token_type_ids": self.template.token_types(len(a), len(b)),
            "next_sentence_label": label,
        }
        if a.word_ids is not None and b.word_ids is not None:
            row["word_ids"] = self.template.fill_words(a.word_ids, b.word_ids)
        return row

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        random_next = int((batch["next_sentence_label"] == RANDOM).sum())
        return {**self.collate.masker.count(batch), "random_next": random_next}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {**masking_rates(counts), "random_next_share": counts["random_next"] / max(1, counts["rows"])}


def _random_piece(document: TokenizedDocument, target: int, rng: np.random.Generator) -> _Piece:
    """Sentences from a random one on, until `target` tokens are reached or the document ends; at least one."""
    start = int(rng.integers(len(document)))
    stop = max(start + 1, int(np.searchsorted(document.bounds, document.bounds[start] + target)))
    return _Piece(document, int(document.bounds[start]), int(document.bounds[min(stop, len(document))]))


def _truncate(a: _Piece, b: _Piece, excess: int, rng: np.random.Generator) -> tuple[_Piece, _Piece]:
    """Take `excess` tokens away, always from the segment that is longer at that moment (B when they are equal)."""
    difference = abs(len(a) - len(b))
    alone = min(excess, difference)  # taken from the longer one until both are equal
    both = excess - alone
    from_longer, from_shorter = alone + both // 2, both // 2
    if len(a) > len(b):
        from_a, from_b = from_longer, from_shorter + both % 2
    else:
        from_a, from_b = from_shorter, from_longer + both % 2
    return a.cut(from_a, rng), b.cut(from_b, rng)
