"""Probing tasks: labeled words, spans and pairs of annotated corpora.

| task | file | examples | source |
|---|---|---|---|
| `pos`, `xpos` | CoNLL-U | tag of a word | Liu et al. 2019, section 3.1 |
| `morphology:NAME` | CoNLL-U | value of a feature, of the words that have it | |
| `arc` | CoNLL-U | whether a word is the head of another, balanced | Liu et al. 2019, section 3.3 |
| `deprel` | CoNLL-U | relation of a word and its head; the root is its own head | Tenney et al. 2019 |
| `tags` | CoNLL columns | tag of a word, such as BIO | Liu et al. 2019, section 3.2 |
| `chunks`, `entities` | CoNLL columns; GUM | type of a span | Tenney et al. 2019 |
| `srl` | PropBank columns | role of a span for a predicate | Tenney et al. 2019 |
| `coreference` | CoNLL columns; GUM | whether two mentions corefer | Tenney et al. 2019 |
| `spans` | JSONL of jiant | labels of spans or pairs of spans | Tenney et al. 2019 |
| sentence tasks | CoNLL-U, SentEval | label of a sentence | Conneau et al. 2018, see `sentence_tasks` |

The structural probes `distance` and `depth` are in `structural`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_ctxmodels.analysis.annotated_corpora import (
    Span,
    SpanSentence,
    entity_mentions,
    read_bio_spans,
    read_coreference,
    read_edge_probing,
    read_propbank,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import read_conll
from hf_ctxmodels.data.treebanks import TreebankSentence, is_treebank, read_treebank

SPLITS = ("train", "dev", "test")


class Example(NamedTuple):
    """Labels of one span or of a pair of spans of a sentence."""

    sentence: int
    spans: tuple[Span, ...]
    labels: tuple[str, ...]


@dataclass
class ExampleSet:
    """Examples of a split, in the order of their sentences."""

    sentences: list[list[str]]
    examples: list[Example]

    def word_type(self, example: Example) -> str:
        """The words of the first span, the unit of the control task (Hewitt & Liang 2019)."""
        start, end = example.spans[0]
        return " ".join(self.sentences[example.sentence][start:end])

    def word_types(self) -> list[str]:
        """`word_type` of all examples."""
        return [self.word_type(example) for example in self.examples]

    def span_words(self, example: Example) -> tuple[str, ...]:
        """The words of each span."""
        words = self.sentences[example.sentence]
        return tuple(" ".join(words[start:end]) for start, end in example.spans)


@dataclass
class ProbingTask:
    """A probing task with its examples.

    Attributes:
        labels: The labels of the training examples.
        is_sentence_level: The span of an example is its sentence; there is no control task of word types.
        positive_label: The score is the F1 of this label instead of the accuracy.
    """

    name: str
    splits: dict[str, ExampleSet]
    is_sentence_level: bool = False
    positive_label: str | None = None

    def __post_init__(self) -> None:
        counts = Counter(label for example in self.splits["train"].examples for label in example.labels)
        self.labels = sorted(counts)
        if len(self.labels) < 2:
            labels = f"only the label {self.labels[0]!r}" if self.labels else "no label"
            raise CtxError(
                f"The training examples of {self.name} have {labels}; a probe needs two.",
                location=f"--tasks {self.name}",
                hint="use a larger --train_file, or remove the task.",
            )
        for split in ("dev", "test"):
            if not self.splits[split].examples:
                raise CtxError(
                    f"There is no example of {self.name} in {split}.",
                    location=f"--tasks {self.name}",
                    hint="use larger files, or remove the task.",
                )

    @property
    def num_slots(self) -> int:
        """Spans of an example: 1 or 2."""
        return len(self.splits["train"].examples[0].spans)

    @property
    def is_multilabel(self) -> bool:
        """Whether an example has several labels."""
        return any(len(example.labels) > 1 for split in self.splits.values() for example in split.examples)


def word_examples(sentences: Sequence[Any], labels: Iterable[Sequence[str | None]]) -> ExampleSet:
    """An example for each word of sentences with `words` that has a label, from the labels of each sentence."""
    examples = [
        Example(index, ((word, word + 1),), (label,))
        for index, (_, word_labels) in enumerate(zip(sentences, labels, strict=True))
        for word, label in enumerate(word_labels)
        if label is not None
    ]
    return ExampleSet([sentence.words for sentence in sentences], examples)


def relation_examples(sentences: Sequence[TreebankSentence]) -> ExampleSet:
    """Relations of pairs (word, head); the head of the root is the root itself (Tenney et al. 2019, appendix B)."""
    examples = []
    for index, sentence in enumerate(sentences):
        sentence.depths()  # checks that the heads are a tree
        for word, head in enumerate(sentence.heads):
            second = word if head < 0 else head
            spans = ((word, word + 1), (second, second + 1))
            examples.append(Example(index, spans, (sentence.relations[word],)))
    return ExampleSet([sentence.words for sentence in sentences], examples)


def arc_examples(sentences: Sequence[TreebankSentence]) -> ExampleSet:
    """Pairs (word, candidate head): the head, and a random word that is neither the word nor its head; roots and
    sentences of two words, which have no such word, are left out (Liu et al. 2019, section 3.3)."""
    generator = random.Random(0)
    examples = []
    for index, sentence in enumerate(sentences):
        sentence.depths()
        for word, head in enumerate(sentence.heads):
            candidates = [candidate for candidate in range(len(sentence.words)) if candidate not in (word, head)]
            if head < 0 or not candidates:
                continue
            for candidate, label in ((head, "1"), (generator.choice(candidates), "0")):
                examples.append(Example(index, ((word, word + 1), (candidate, candidate + 1)), (label,)))
    return ExampleSet([sentence.words for sentence in sentences], examples)


def span_examples(sentences: Sequence[SpanSentence]) -> ExampleSet:
    """Examples of labeled spans.

    Raises:
        CtxError: Some targets have one span and others two.
    """
    examples = []
    num_slots = None
    for index, sentence in enumerate(sentences):
        for target in sentence.targets:
            spans = (target.span1,) if target.span2 is None else (target.span1, target.span2)
            num_slots = num_slots or len(spans)
            if len(spans) != num_slots:
                raise CtxError(
                    "Targets with one span and with two spans.",
                    location=sentence.location,
                    hint="divide the file into one for each task.",
                )
            examples.append(Example(index, spans, target.labels))
    return ExampleSet([sentence.words for sentence in sentences], examples)


def tag_examples(file: str | Path) -> ExampleSet:
    """A tag for each word of a file of CoNLL columns; BIO for chunks and entities."""
    sentences = read_conll(file)
    return word_examples(sentences, (sentence.tags for sentence in sentences))


def entity_examples(file: str | Path) -> ExampleSet:
    """Types of the entities or chunks in BIO columns, or of the mentions in a CoNLL-U file (GUM)."""
    if not is_treebank(file):
        return span_examples(read_bio_spans(file))
    sentences = read_treebank(file)
    examples = [
        Example(index, (span,), (entity_type,))
        for index, sentence in enumerate(sentences)
        for _, entity_type, span in entity_mentions(sentence)
    ]
    return ExampleSet([sentence.words for sentence in sentences], examples)


def _without_empty(tags: Sequence[str]) -> list[str | None]:
    return [None if tag == "_" else tag for tag in tags]


TREEBANK_TASKS: dict[str, Callable[[Sequence[TreebankSentence]], ExampleSet]] = {
    "pos": lambda sentences: word_examples(sentences, (_without_empty(sentence.upos) for sentence in sentences)),
    "xpos": lambda sentences: word_examples(sentences, (_without_empty(sentence.xpos) for sentence in sentences)),
    "arc": arc_examples,
    "deprel": relation_examples,
}
FILE_TASKS: dict[str, Callable[[str | Path], ExampleSet]] = {
    "tags": tag_examples,
    "chunks": entity_examples,
    "entities": entity_examples,
    "srl": lambda file: span_examples(read_propbank(file)),
    "coreference": lambda file: span_examples(read_coreference(file)),
    "spans": lambda file: span_examples(read_edge_probing(file)),
}
MORPHOLOGY = "morphology:"


def is_treebank_task(name: str) -> bool:
    """Whether the examples of a word or pair task are made from a treebank."""
    return name in TREEBANK_TASKS or name.startswith(MORPHOLOGY)


def build_treebank_task(name: str, treebanks: Mapping[str, Sequence[TreebankSentence]]) -> ProbingTask:
    """Examples of a task from the sentences of each split."""
    feature = name.removeprefix(MORPHOLOGY)

    def examples(sentences: Sequence[TreebankSentence]) -> ExampleSet:
        if name in TREEBANK_TASKS:
            return TREEBANK_TASKS[name](sentences)
        return word_examples(sentences, ([word.get(feature) for word in sentence.features] for sentence in sentences))

    return ProbingTask(name, {split: examples(sentences) for split, sentences in treebanks.items()})


def build_file_task(name: str, files: Mapping[str, str]) -> ProbingTask:
    """Examples of a task from the file of each split."""
    splits = {split: FILE_TASKS[name](file) for split, file in files.items()}
    return ProbingTask(name, splits, positive_label="1" if name == "coreference" else None)
