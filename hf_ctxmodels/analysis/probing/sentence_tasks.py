"""Sentence tasks of SentEval (Conneau et al. 2018, section 2), made from a treebank.

| task | labels | rule |
|---|---|---|
| `sentlen` | 6 bins of lengths | 5-8, 9-12, 13-16, 17-20, 21-25, 26-28 words |
| `wc` | 50 words | the only target word of the sentence; lower-cased, of rank above 200 and at least 4 letters |
| `bshift` | original, shifted | two adjacent words swapped, neither the first word nor punctuation |
| `tense` | Pres, Past | tense of the root, a finite verb |
| `subjnum`, `objnum` | Sing, Plur | number of the noun that is the subject or object of the root |
| `coordinv` | original, inverted | the clauses of the only coordination, of main clauses, swapped |
| `depdepth` | 2 to 6 | depth of the dependency tree, not of SentEval's constituents; correlates with the length |

Sentences have 5 to 28 words. SentEval's own files can be read as well (`senteval`). Each label has equally many
examples in a partition. The word that decides the label (of `tense`, `subjnum` and `objnum`) occurs in one partition
only, so that a probe cannot remember it; partitions differ between seeds. Only one version of a sentence is used.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from hf_ctxmodels.analysis.annotated_corpora import LabeledSentence
from hf_ctxmodels.analysis.probing.tasks import Example, ExampleSet, ProbingTask
from hf_ctxmodels.data.treebanks import TreebankSentence

LENGTH_BINS = ((5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, 28))
MIN_WORDS, MAX_WORDS = LENGTH_BINS[0][0], LENGTH_BINS[-1][1]
NUM_CONTENT_WORDS = 50
_SHARES = {"test": 0.2, "dev": 0.1}
_QUOTES = frozenset(("``", "''", '"', "'", "“", "”", "‘", "’", "«", "»"))


def _labeled(
    sentence: TreebankSentence, label: str, words: list[str] | None = None, forms: tuple[str, ...] = ()
) -> LabeledSentence:
    return LabeledSentence(words or sentence.words, label, sentence.location, forms)


def _sentence_lengths(sentences: Sequence[TreebankSentence]) -> Iterator[LabeledSentence]:
    for sentence in sentences:
        for first, last in LENGTH_BINS:
            if first <= len(sentence.words) <= last:
                yield _labeled(sentence, f"{first}-{last}")


def _word_contents(sentences: Sequence[TreebankSentence]) -> Iterator[LabeledSentence]:
    lowered = [[word.lower() for word in sentence.words] for sentence in sentences]
    ranked = [word for word, _ in Counter(word for words in lowered for word in words).most_common()]
    eligible = [word for word in ranked[200:] if len(word) >= 4 and word.isalpha()]
    targets = set(eligible[:NUM_CONTENT_WORDS])
    for sentence, words in zip(sentences, lowered, strict=True):
        contained = [word for word in words if word in targets]
        if len(contained) == 1:
            yield _labeled(sentence, contained[0])


def _bigram_shifts(sentences: Sequence[TreebankSentence]) -> Iterator[LabeledSentence]:
    generator = random.Random(0)
    for sentence in sentences:
        words, is_punctuation = list(sentence.words), sentence.is_punctuation()
        positions = [
            position
            for position in range(1, len(words) - 1)
            if not (is_punctuation[position] or is_punctuation[position + 1])
            and words[position].lower() != words[position + 1].lower()
        ]
        if not positions or _QUOTES.intersection(words):
            continue
        if generator.random() < 0.5:
            yield _labeled(sentence, "original")
        else:
            position = generator.choice(positions)
            words[position], words[position + 1] = words[position + 1], words[position]
            yield _labeled(sentence, "shifted", words)


def _tenses(sentences: Sequence[TreebankSentence]) -> Iterator[LabeledSentence]:
    for sentence in sentences:
        root = _root(sentence)
        features = sentence.features[root]
        is_finite = sentence.upos[root] == "VERB" and features.get("VerbForm") == "Fin"
        if is_finite and features.get("Tense") in ("Pres", "Past"):
            yield _labeled(sentence, features["Tense"], forms=(sentence.words[root].lower(),))


def _noun_numbers(sentences: Sequence[TreebankSentence], relation: str) -> Iterator[LabeledSentence]:
    for sentence in sentences:
        nouns = _dependents(sentence, _root(sentence), relation)
        if len(nouns) == 1 and sentence.upos[nouns[0]] == "NOUN":
            number = sentence.features[nouns[0]].get("Number")
            if number in ("Sing", "Plur"):
                yield _labeled(sentence, number, forms=(sentence.words[nouns[0]].lower(),))


def _coordination_inversions(sentences: Sequence[TreebankSentence]) -> Iterator[LabeledSentence]:
    generator = random.Random(0)
    for sentence in sentences:
        inverted = _invert_coordination(sentence)
        if inverted is not None:
            is_inverted = generator.random() < 0.5
            words = inverted if is_inverted else None
            yield _labeled(sentence, "inverted" if is_inverted else "original", words)


def _invert_coordination(sentence: TreebankSentence) -> list[str] | None:
    """Return "A, and B." as "B, and A.", if it is the only coordination; None for other sentences."""
    root, words, is_punctuation = _root(sentence), sentence.words, sentence.is_punctuation()
    clauses, conjunctions = _dependents(sentence, root, "conj"), sentence.relations.count("cc")
    if len(clauses) != 1 or conjunctions != 1 or sentence.relations.count("conj") != 1:
        return None
    conjunction = sentence.relations.index("cc")
    subtree = sentence.subtree(clauses[0])
    start, end = subtree[0], subtree[-1] + 1
    has_subjects = all(_dependents(sentence, verb, "nsubj") for verb in (root, clauses[0]))
    is_contiguous = len(subtree) == end - start and start <= conjunction < clauses[0]
    if not (has_subjects and is_contiguous and start and all(is_punctuation[start:conjunction] + is_punctuation[end:])):
        return None
    first, second = list(words[:start]), list(words[conjunction + 1 : end])
    if sentence.upos[0] != "PROPN" and first[0] != "I":
        first[0] = first[0].lower()
    second[0] = second[0][:1].upper() + second[0][1:]
    return [*second, *words[start : conjunction + 1], *first, *words[end:]]


def _dependency_depths(sentences: Sequence[TreebankSentence]) -> Iterator[LabeledSentence]:
    for sentence in sentences:
        depth = max(sentence.depths())
        if 2 <= depth <= 6:
            yield _labeled(sentence, str(depth))


def _root(sentence: TreebankSentence) -> int:
    return sentence.depths().index(0)


def _dependents(sentence: TreebankSentence, head: int, relation: str) -> list[int]:
    """Words with this head and relation, or a subtype of the relation."""
    return [
        word
        for word, (word_head, label) in enumerate(zip(sentence.heads, sentence.relations, strict=True))
        if word_head == head and label.partition(":")[0] == relation
    ]


SENTENCE_TASKS: dict[str, Callable[[Sequence[TreebankSentence]], Iterator[LabeledSentence]]] = {
    "sentlen": _sentence_lengths,
    "wc": _word_contents,
    "depdepth": _dependency_depths,
    "bshift": _bigram_shifts,
    "tense": _tenses,
    "subjnum": lambda sentences: _noun_numbers(sentences, "nsubj"),
    "objnum": lambda sentences: _noun_numbers(sentences, "obj"),
    "coordinv": _coordination_inversions,
}


def label_sentences(name: str, sentences: Sequence[TreebankSentence]) -> list[LabeledSentence]:
    """The labeled sentences of a task, of 5 to 28 words each."""
    eligible = [sentence for sentence in sentences if MIN_WORDS <= len(sentence.words) <= MAX_WORDS]
    return list(SENTENCE_TASKS[name](eligible))


def divide_sentences(name: str, sentences: Sequence[LabeledSentence], seed: int) -> ProbingTask:
    """Divide sentences into train (0.7), dev (0.1) and test (0.2), with equally many of each label in each of them.

    The sentences with the same `forms` are in one partition; a form that exceeds the shares of dev and test is in
    train.
    """
    generator = random.Random(seed)
    partitions: dict[str, list[LabeledSentence]] = {"train": [], "dev": [], "test": []}
    labels = sorted({sentence.label for sentence in sentences})
    partition_of: dict[object, str] = {}
    for label in labels:
        groups: dict[object, list[LabeledSentence]] = defaultdict(list)
        for number, sentence in enumerate(sentences):
            if sentence.label == label:
                groups[sentence.forms or number].append(sentence)
        keys = list(groups)
        generator.shuffle(keys)
        capacity = {split: share * sum(map(len, groups.values())) for split, share in _SHARES.items()}
        room = dict(capacity)
        for key in keys:
            fitting = [split for split in room if len(groups[key]) <= room[split]]
            emptiest = max(fitting, key=lambda split: room[split] / capacity[split], default="train")
            split = partition_of.setdefault(key, emptiest)
            partitions[split] += groups[key]
            if split in room:
                room[split] -= len(groups[key])
    return sentence_task(
        name, {split: _balance(partition, labels, generator) for split, partition in partitions.items()}
    )


def _balance(
    sentences: list[LabeledSentence], labels: Sequence[str], generator: random.Random
) -> list[LabeledSentence]:
    """Equally many sentences of each label, in random order."""
    by_label = {label: [sentence for sentence in sentences if sentence.label == label] for label in labels}
    size = min(map(len, by_label.values()), default=0)
    balanced = [sentence for group in by_label.values() for sentence in generator.sample(group, size)]
    generator.shuffle(balanced)
    return balanced


def sentence_task(name: str, partitions: Mapping[str, Sequence[LabeledSentence]]) -> ProbingTask:
    """A task whose examples are whole sentences."""
    splits = {
        split: ExampleSet(
            [sentence.words for sentence in sentences],
            [
                Example(index, ((0, len(sentence.words)),), (sentence.label,))
                for index, sentence in enumerate(sentences)
            ],
        )
        for split, sentences in partitions.items()
    }
    return ProbingTask(name, splits, is_sentence_level=True)
