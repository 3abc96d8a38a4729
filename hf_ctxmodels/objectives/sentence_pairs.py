"""Masked language modeling on labeled pairs of segments: next-sentence prediction (Devlin et al. 2019, section 3.1 and
appendix A.2) and sentence-order prediction (Lan et al. 2019, section 3.1)."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.documents import single_document_error
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import Batch
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.masked_lm import MaskingCollator
from hf_ctxmodels.objectives.tokenized_documents import (
    SpecialTokensTemplate,
    TokenizedDocument,
    sentence_chunks,
    tokenized_batches,
)


@dataclass
class SentencePairCollator(MaskingCollator):
    """Base class of collators that mask pairs as `DataCollatorForMaskedLM` does and add the label of the pair.

    Features hold the columns of `DataCollatorForMaskedLM`, token_type_ids (tokens,) and the label.
    """

    label: ClassVar[str]
    """Name of the pair's label, as a feature and as an argument of the head."""

    label_classes: dict[str, int] = field(init=False, repr=False)
    """Name -> value of the labels to count."""

    whole_word: bool = flag(False, "Mask all tokens of a word or none.")
    ngram: int = flag(1, "Mask runs of 1 to this many whole words, n of them with probability proportional to 1/n.")

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask features; see the class for their columns and the returned ones."""
        for name in ("token_type_ids", self.label):
            if any(name not in feature for feature in features):
                raise CtxError(
                    f"{type(self).__name__} requires `{name}` in every feature.",
                    hint="make the pairs with the objective's `examples(documents)`.",
                )
        batch = super().collate(features)
        batch[self.label] = torch.tensor([int(feature[self.label]) for feature in features], dtype=torch.int64)
        return batch

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, labeled pairs, and pairs of each class."""
        labels = batch[self.label]
        counts = {f"{name}_pairs": int((labels == value).sum()) for name, value in self.label_classes.items()}
        return {**super().count_batch(batch), "labeled_pairs": int((labels != IGNORE_INDEX).sum()), **counts}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, of labeled pairs, and of each class among these."""
        labeled = counts["labeled_pairs"]
        shares = {f"{name}_share": counts[f"{name}_pairs"] / max(1, labeled) for name in self.label_classes}
        return {**super().rates(counts), "labeled_share": labeled / max(1, counts["examples"]), **shares}


@dataclass(frozen=True)
class Segment:
    """Tokens [start, stop) of a document."""

    document: TokenizedDocument
    start: int
    stop: int

    @classmethod
    def of(cls, document: TokenizedDocument, first: int, last: int) -> "Segment":
        """Sentences [first, last)."""
        return cls(document, int(document.bounds[first]), int(document.bounds[last]))

    def __len__(self) -> int:
        return self.stop - self.start

    def truncate(self, count: int, rng: np.random.Generator) -> "Segment":
        """Remove `count` tokens, each from the front or the end with equal probability."""
        front = int(rng.binomial(count, 0.5))
        return Segment(self.document, self.start + front, self.stop - (count - front))

    @property
    def ids(self) -> np.ndarray:
        """(tokens,) token ids."""
        return self.document.ids[self.start : self.stop]

    @property
    def word_ids(self) -> np.ndarray | None:
        """(tokens,) as in the document, or None."""
        return None if self.document.word_ids is None else self.document.word_ids[self.start : self.stop]


RandomSegment = Callable[[int], Segment]
"""Samples about this number of tokens from another document."""


class LabeledSegments(NamedTuple):
    """One or two segments of an example, and their label."""

    segments: tuple[Segment, ...]
    label: int


@dataclass
class SentencePairs(SentencePairCollator, Objective):
    """Base class of objectives with masked tokens and a label for two segments, made by `segment_pairs` of subclasses.

    As in the released data preparation of BERT and ALBERT, an example takes whole sentences of a document, and a random
    number of them, at least one and not all, is the first segment. Pairs that are too long lose tokens of the longer
    segment, each from a random end. One document in ten (`short_seq_probability`) makes shorter examples, of a length
    sampled uniformly from 2 tokens up. A segment of another document is sampled from the thousand documents that are
    tokenized together.
    """

    auto_class = "AutoModelForPreTraining"
    short_seq_probability: float = flag(0.1, "Share of the documents whose pairs get a random shorter length.")
    samples_other_documents: bool = field(default=True, init=False, repr=False)
    """Whether `segment_pairs` may sample a segment of another document, which requires two documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "short_seq_probability", at_least=0, at_most=1)
        self.templates = {segments: SpecialTokensTemplate(self.tokenizer, segments) for segments in (1, 2)}
        self.max_text_tokens = self.templates[2].num_text_tokens(self.max_length)

    def prepare(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document from which examples are made; a subclass may group its words."""
        return document

    @abstractmethod
    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples, of about `target` tokens, of a document with at least one sentence."""

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, token_type_ids, the label of the pair, and word_ids if whole words are masked."""
        number = 0
        for batch in tokenized_batches(self.tokenizer, documents, self.masker.rule.needs_words):
            usable = [(index, self.prepare(document)) for index, document in enumerate(batch) if len(document)]
            if self.samples_other_documents and len(usable) < 2:
                raise single_document_error()
            texts = [document for _, document in usable]
            for position, (index, document) in enumerate(usable):
                rng = generator(self.seed, epoch, number + index, Purpose.PAIRING)
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                target = self.max_text_tokens
                if rng.random() < self.short_seq_probability:
                    target = int(rng.integers(2, self.max_text_tokens, endpoint=True))
                random_segment = partial(_random_segment, texts, position, rng)
                for pair in self.segment_pairs(document, target, random_segment, rng):
                    yield self.example(pair, rng)
            number += len(batch)

    def check(self, examples: ExampleSet) -> None:
        """Print a warning if no document has two sentences."""
        super().check(examples)
        if 0 < examples.statistics.get("sentences", 0) == examples.statistics["documents"]:
            print_status(
                "warning: every document is a single sentence, so that no pair continues a document; separate "
                "documents of several sentences by blank lines, or use --objective mlm"
            )

    def example(self, pair: LabeledSegments, rng: np.random.Generator) -> Example:
        """The example of a pair, truncated to `max_length`."""
        segments = pair.segments
        template = self.templates[len(segments)]
        excess = sum(map(len, segments)) - template.num_text_tokens(self.max_length)
        if excess > 0:
            segments = _truncate(segments, excess, rng)
            for segment, truncated in zip(pair.segments, segments, strict=True):
                if segment.document is segments[0].document:  # a random segment's document has its own examples
                    self.statistics["truncated_tokens"] += len(segment) - len(truncated)
        example: Example = {
            "input_ids": template.fill(*(segment.ids for segment in segments)),
            "token_type_ids": template.token_types(*map(len, segments)),
            self.label: pair.label,
        }
        if self.masker.rule.needs_words:
            words = [segment.word_ids for segment in segments]
            example["word_ids"] = template.fill_words(*words)  # type: ignore[arg-type]
        return example


def end_of_target(document: TokenizedDocument, first: int, target: int) -> int:
    """The end of the sentences, from `first` on, that reach `target` tokens, or the document's end."""
    return min(int(np.searchsorted(document.bounds, document.bounds[first] + target)), len(document))


def random_split(first: int, last: int, rng: np.random.Generator) -> int:
    """Where the sentences [first, last) are split: at least one on either side; `last` if there is only one."""
    return first + int(rng.integers(1, last - first)) if last - first > 1 else last


def _random_segment(texts: list[TokenizedDocument], position: int, rng: np.random.Generator, target: int) -> Segment:
    """Sentences of another text than the one at `position`, from a random one on, until `target` tokens are reached or
    the text ends; at least one."""
    index = int(rng.integers(len(texts) - 1))
    document = texts[index + (index >= position)]
    start = int(rng.integers(len(document)))
    return Segment.of(document, start, max(start + 1, end_of_target(document, start, target)))


def _truncate(segments: tuple[Segment, ...], excess: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    """Remove `excess` tokens one by one, each from the currently longer segment (B when they are equal)."""
    if len(segments) == 1:
        return (segments[0].truncate(excess, rng),)
    a, b = segments
    difference = min(excess, abs(len(a) - len(b)))  # from the longer one until both are equal
    shared = excess - difference
    from_longer, from_shorter = difference + shared // 2, shared // 2
    if len(a) > len(b):
        from_a, from_b = from_longer, from_shorter + shared % 2
    else:
        from_a, from_b = from_shorter, from_longer + shared % 2
    return a.truncate(from_a, rng), b.truncate(from_b, rng)


CONTINUATION, RANDOM = 0, 1
"""Values of `next_sentence_label`, as in `transformers.BertForPreTraining`."""

SWAPPED = 1
"""The `sentence_order_label` of swapped segments; 0 in order."""

SentenceTask = Literal["next", "order", "none"]
SENTENCE_TASK_HELP = (
    "Classes of pairs: `next`: the second segment follows or is of another document; `order`: the segments are in "
    "order or swapped; `none`: they are in order, and nothing is predicted."
)
OneSegment = Literal["unlabeled", "random", "drop"]
ONE_SEGMENT_HELP = (
    "Treatment of text with only one segment by sentence_task=order: `unlabeled` masks it without an order label, "
    "`random` adds a segment of another document with the label swapped, `drop` skips it."
)


@dataclass(frozen=True)
class PairSampler:
    """Makes the pairs of next-sentence or sentence-order prediction. The label has the same values for both, so that
    one network can be trained on both (Lan et al. 2019, section 4.6 and table 5).

    Attributes:
        sentence_task: "next": the second segment continues the first (0) or is of another document (1), see
            `next_sentence_pairs`. "order": the segments are in order (0) or swapped (1), see
            `MaskedLMWithSentenceOrder`. "none": the pairs of "order", not swapped and without a label.
        one_segment: Text with only one segment, if the task is "order": "unlabeled" has no order label, "random" adds
            a segment of another document with the label "swapped", "drop" skips it.
        statistics: Counts text with only one segment (`one_segment_chunks`, `dropped_tokens`).
    """

    sentence_task: SentenceTask
    one_segment: OneSegment
    statistics: Counter[str]

    def __post_init__(self) -> None:
        check_choice(get_args(SentenceTask), sentence_task=self.sentence_task)
        check_choice(get_args(OneSegment), one_segment=self.one_segment)

    @property
    def samples_other_documents(self) -> bool:
        """Whether second segments may be of another document."""
        return self.sentence_task == "next" or (self.sentence_task == "order" and self.one_segment == "random")

    @property
    def label_classes(self) -> dict[str, int]:
        """Name -> value of the labels to count."""
        return {"next": {"random_next": RANDOM}, "order": {"swapped": SWAPPED}, "none": {}}[self.sentence_task]

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples of a document, see `SentencePairs.segment_pairs`."""
        if self.sentence_task == "next":
            return next_sentence_pairs(document, target, random_segment, rng)
        return self._ordered_pairs(document, target, random_segment, rng)

    def _ordered_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """Pairs of neighboring segments, half of them swapped."""
        for start, stop in sentence_chunks(document.bounds, target, from_end=rng.random() < 0.5):
            split = random_split(start, stop, rng)
            first, second = Segment.of(document, start, split), Segment.of(document, split, stop)
            if len(second):
                is_swapped = rng.random() < 0.5  # also sampled for "none", which has the same pairs as "order"
                if self.sentence_task == "none":
                    yield LabeledSegments((first, second), IGNORE_INDEX)
                else:
                    yield LabeledSegments((second, first) if is_swapped else (first, second), int(is_swapped))
                continue
            self.statistics["one_segment_chunks"] += 1
            if self.one_segment == "drop":
                self.statistics["dropped_tokens"] += len(first)
            elif self.samples_other_documents:
                yield LabeledSegments((first, random_segment(target - len(first))), SWAPPED)
            else:
                yield LabeledSegments((first,), IGNORE_INDEX)


@dataclass
class DataCollatorForMaskedLMWithNextSentence(SentencePairCollator):
    """Masks pairs as `DataCollatorForMaskedLM` does and adds `next_sentence_label`.

    Each feature holds, in addition to the columns of `SentencePairCollator`:
        next_sentence_label: 0 if the second segment continues the first, 1 if it is random; returned as (batch,).
    """

    label, label_classes = "next_sentence_label", {"random_next": RANDOM}


@dataclass
class MaskedLMWithNextSentence(DataCollatorForMaskedLMWithNextSentence, SentencePairs):
    """BERT's objective: predict masked tokens, and whether segment B follows segment A.

    Pairs are made as in the paper's released data preparation, see `SentencePairs`. Sentences are collected until they
    fill an example. With probability 1/2, or if there is only one sentence, B comes from a random position of another
    document and the unused sentences are returned; otherwise B is the rest. Requires at least two documents. With
    `sentence_task="order"` the label is ALBERT's, see `PairSampler`.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] A [SEP] B [SEP]` | 15% of the tokens; one class: B follows A (0) or is random (1) |

    References: Devlin et al. 2019, section 3.1 and appendix A.2; `create_pretraining_data.py` of its release.
    Related: `MaskedLM` is the first task alone; `MaskedLMWithSentenceOrder` predicts the order of two neighbors.

    Example:
        >>> MaskedLMWithNextSentence(tokenizer, max_length=128, seed=0, max_predictions=20)
    """

    sentence_task: SentenceTask = flag("next", SENTENCE_TASK_HELP)
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


def next_sentence_pairs(
    document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
) -> Iterator[LabeledSegments]:
    """Pairs of segments of which the second continues the first or is random; see `MaskedLMWithNextSentence`."""
    start = 0
    while start < len(document):
        stop = end_of_target(document, start, target)
        split = random_split(start, stop, rng)
        first = Segment.of(document, start, split)
        if split == stop or rng.random() < 0.5:
            yield LabeledSegments((first, random_segment(target - len(first))), RANDOM)
            start = split
        else:
            yield LabeledSegments((first, Segment.of(document, split, stop)), CONTINUATION)
            start = stop
