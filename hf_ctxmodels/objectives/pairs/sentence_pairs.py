"""Masked language modelling on labelled pairs: the base of next-sentence and sentence-order prediction."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.base import Batch, Objective
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    RowTemplate,
    TokenizedDocument,
    tokenized_batches,
)
from hf_ctxmodels.objectives.masked.masked_lm import DataCollatorForMaskedLM, MaskingOptions


@dataclass
class DataCollatorForSentencePairs(DataCollatorForMaskedLM):
    """Masks pairs as `DataCollatorForMaskedLM` does and carries the label of the pair."""

    label: ClassVar[str]
    """Name of the pair's label, as a feature and as an argument of the head."""

    objective: ClassVar[str]
    """Class whose `examples` makes such pairs, for the error message."""

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        for name in ("token_type_ids", self.label):
            if any(name not in feature for feature in features):
                raise CtxError(
                    f"{type(self).__name__} needs `{name}` in every feature.",
                    hint=f"build the pairs from documents with {self.objective}.examples(documents).",
                )
        batch = super().torch_call(features)
        batch[self.label] = torch.tensor([int(feature[self.label]) for feature in features], dtype=torch.int64)
        return batch


@dataclass(frozen=True)
class SentencePairOptions(MaskingOptions):
    """Options of all objectives with pairs of segments."""

    short_seq_probability: float = flag(0.1, "Share of the documents whose pairs get a random shorter length.")


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a document."""

    document: TokenizedDocument
    start: int
    stop: int

    @classmethod
    def of(cls, document: TokenizedDocument, first: int, last: int) -> "Piece":
        """Sentences [first, last)."""
        return cls(document, int(document.bounds[first]), int(document.bounds[last]))

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, count: int, rng: np.random.Generator) -> "Piece":
        """Remove `count` tokens, each from the front or the end with equal probability."""
        front = int(rng.binomial(count, 0.5))
        return Piece(self.document, self.start + front, self.stop - (count - front))

    @property
    def ids(self) -> np.ndarray:
        """(tokens,) token ids."""
        return self.document.ids[self.start : self.stop]

    @property
    def word_ids(self) -> np.ndarray | None:
        """(tokens,) as in the document, or None."""
        return None if self.document.word_ids is None else self.document.word_ids[self.start : self.stop]


class Choice(NamedTuple):
    """One or two segments of a row, and their label."""

    segments: tuple[Piece, ...]
    label: int


class SentencePairs(Objective):
    """Masked tokens, and a label for two segments, which a subclass makes in `choices`.

    As in the released data preparation of BERT and ALBERT, a row takes whole sentences of a document, and a random
    number of them, at least one and not all, is the first segment. Pairs that are too long lose tokens of the longer
    segment, each from a random end. One document in ten (`short_seq_probability`) makes shorter rows, of a length drawn
    uniformly from 2 tokens up.

    A segment of another document is drawn from the thousand documents that are tokenised together, so a stream and a
    data set in memory give the same pairs.
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = SentencePairOptions
    Collator: ClassVar[type[DataCollatorForSentencePairs]]
    collate: DataCollatorForSentencePairs

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if not 0 <= self.options.short_seq_probability <= 1:
            raise CtxError(
                f"short_seq_probability={self.options.short_seq_probability} is not a probability.",
                hint="use 0 to 1.",
            )
        self.templates = {segments: RowTemplate(tokenizer, segments) for segments in (1, 2)}
        self.room = self.templates[2].room(max_length)
        self.collate = self.options.collator(self.Collator, tokenizer, seed)

    @property
    @abstractmethod
    def samples_other_documents(self) -> bool:
        """Whether `choices` may draw a segment of another document, which needs two documents."""

    def prepare(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document as rows are made of it; for a subclass that groups its words."""
        return document

    @abstractmethod
    def choices(
        self, document: TokenizedDocument, target: int, other: Callable[[int], Piece], rng: np.random.Generator
    ) -> Iterator[Choice]:
        """The rows made of a document.

        Args:
            document: A document with at least one sentence.
            target: Desired number of tokens of a row.
            other: Draws about this number of tokens from another document.
            rng: The document's generator.
        """

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, token_type_ids, the label of the pair, and word_ids if whole words are masked."""
        number, with_words = 0, self.collate.masker.rule.needs_words
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, with_words):
            batch = [self.prepare(document) for document in batch]
            usable = [index for index, document in enumerate(batch) if len(document)]
            if self.samples_other_documents and len(usable) < 2:
                raise CtxError(
                    f"{type(self).__name__} draws second segments from other documents, but there is only one document "
                    "with text.",
                    hint="separate the documents (in a text file: by a blank line), or use the objective `mlm`.",
                )
            for place, index in enumerate(usable):
                rng = generator(self.seed, pass_index, number + index, Stream.PAIRING)
                yield from self._rows(batch, usable, place, rng)
            number += len(batch)

    def _rows(
        self, batch: list[TokenizedDocument], usable: list[int], place: int, rng: np.random.Generator
    ) -> Iterator[Example]:
        """All rows of one document, `batch[usable[place]]`."""
        document = batch[usable[place]]
        self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
        target = self.room
        if rng.random() < self.options.short_seq_probability:
            target = int(rng.integers(2, self.room, endpoint=True))

        def other(tokens: int) -> Piece:
            drawn = int(rng.integers(len(usable) - 1))
            return _random_piece(batch[usable[drawn + (drawn >= place)]], tokens, rng)

        for choice in self.choices(document, target, other, rng):
            yield self._row(choice, rng)

    def _row(self, choice: Choice, rng: np.random.Generator) -> Example:
        segments = choice.segments
        template = self.templates[len(segments)]
        excess = sum(map(len, segments)) - template.room(self.max_length)
        if excess > 0:
            self.statistics["truncated_tokens"] += excess
            segments = _truncate(segments, excess, rng)
        row: Example = {
            "input_ids": template.fill(*(segment.ids for segment in segments)),
            "token_type_ids": template.token_types(*map(len, segments)),
            self.Collator.label: choice.label,
        }
        words = [segment.word_ids for segment in segments]
        if self.collate.masker.rule.needs_words:
            row["word_ids"] = template.fill_words(*words)  # type: ignore[arg-type]
        return row


def filling_stop(document: TokenizedDocument, first: int, target: int) -> int:
    """The sentence after those, from `first` on, that reach `target` tokens, or the document's end."""
    return min(int(np.searchsorted(document.bounds, document.bounds[first] + target)), len(document))


def random_split(first: int, last: int, rng: np.random.Generator) -> int:
    """Where the sentences [first, last) are split: at least one on either side; `last` if there is only one."""
    return first + int(rng.integers(1, last - first)) if last - first > 1 else last


def _random_piece(document: TokenizedDocument, target: int, rng: np.random.Generator) -> Piece:
    """Sentences from a random one on, until `target` tokens are reached or the document ends; at least one."""
    start = int(rng.integers(len(document)))
    return Piece.of(document, start, max(start + 1, filling_stop(document, start, target)))


def _truncate(segments: tuple[Piece, ...], excess: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """Remove `excess` tokens one by one, each from the currently longer segment (B when they are equal)."""
    if len(segments) == 1:
        return (segments[0].cut(excess, rng),)
    a, b = segments
    alone = min(excess, abs(len(a) - len(b)))  # from the longer one until both are equal
    both = excess - alone
    from_longer, from_shorter = alone + both // 2, both // 2
    if len(a) > len(b):
        from_a, from_b = from_longer, from_shorter + both % 2
    else:
        from_a, from_b = from_shorter, from_longer + both % 2
    return a.cut(from_a, rng), b.cut(from_b, rng)
