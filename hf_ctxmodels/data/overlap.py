"""Overlap of evaluation data with a training text in n-grams of words (Brown et al. 2020, appendix C; Radford et al.
2019, section 4).

The n-grams of the evaluation data are in memory, 16 bytes for each; the training text is streamed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import regex

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.word_patterns import LETTER
from hf_ctxmodels.data.benchmark_files import BenchmarkFile
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.processes import map_in_processes

GPT2_NGRAM = 8
_PUNCTUATION = regex.compile(rf"[^{LETTER}--_]+", regex.V1)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_CACHED_WORDS = 1 << 20
_BATCH_WORDS = 1 << 16  # the arrays of a batch fit into the caches of a processor
_MAX_TABLE_BITS = 24


@dataclass(frozen=True)
class OverlapRule:
    """Which n-grams of words are compared, and which examples are dirty.

    N is the 5th percentile of the lengths of a benchmark's examples in words, within the limits. An example is dirty if
    one of its N-grams occurs in the training text. N-grams in more than `max_documents` training documents are ignored:
    they are phrases in common use.

    Attributes:
        min_size, max_size: Limits of N.
        max_documents: Largest number of training documents with an n-gram that counts.
    """

    min_size: int = 8
    max_size: int = 13
    max_documents: int = 10

    def __post_init__(self) -> None:
        check_range(self, "min_size", "max_documents", at_least=1)
        check_range(self, "max_size", at_least=self.min_size)

    def ngram_size(self, lengths: Sequence[int]) -> int:
        """N from the lengths of the examples in words."""
        return int(np.clip(np.percentile(lengths, 5), self.min_size, self.max_size))


@dataclass(frozen=True)
class DirtyExample:
    """An example with an N-gram of the training text: the number of its N-grams that match, and the first of them."""

    location: str
    matches: int
    first_match: str


@dataclass(frozen=True)
class FileOverlap:
    """Overlap of a file with the training text.

    Attributes:
        ngram_size: N.
        num_short: Examples with fewer than N words, which are counted as clean.
        num_ignored: Distinct N-grams in too many training documents.
        ngram_share: Share of the N-grams that occur in the training text, without the ignored ones.
        gpt2_share: Share of the 8-grams that occur in the training text.
        clean: Numbers of the clean examples.
    """

    file: str
    num_examples: int
    ngram_size: int
    num_dirty: int
    num_short: int
    num_ignored: int
    ngram_share: float
    gpt2_share: float
    dirty_examples: list[DirtyExample]
    clean: list[int] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The fields without the numbers of the clean examples, and the number of these."""
        record = asdict(self)
        return {**record, "clean": len(self.clean)}


@dataclass(frozen=True)
class Overlap:
    """Overlap of benchmarks with a training text of this many documents and words."""

    num_documents: int
    num_words: int
    files: list[FileOverlap]

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        return {**asdict(self), "files": [file.to_json() for file in self.files]}

    def to_markdown(self) -> str:
        """A table with a row for each file."""
        lines = [
            "| file | examples | N | dirty | clean | too short | N-gram overlap | 8-gram overlap (GPT-2) |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for file in self.files:
            share = file.num_dirty / file.num_examples
            lines.append(
                f"| {file.file} | {file.num_examples} | {file.ngram_size} | {file.num_dirty} ({share:.1%}) | "
                f"{len(file.clean)} | {file.num_short} | {file.ngram_share:.2%} | {file.gpt2_share:.2%} |"
            )
        caption = f"Training text: {self.num_documents:,} documents, {self.num_words:,} words."
        return "\n".join([*lines, "", caption, ""])


class WordHashes(dict[str, int]):
    """64-bit hashes of the words of texts: lower-cased, separated by white space, without punctuation.

    Maps each token to the hash of its word, 0 for punctuation alone; the most recent million of tokens are kept.
    """

    def __missing__(self, token: str) -> int:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        word = normalize_word(token)
        digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self[token] = value = int.from_bytes(digest, "little") if word else 0
        return value

    def __call__(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Texts -> (words,) uint64 hashes and (words,) the number of each word's text."""
        tokens_by_text = [text.split() for text in texts]
        counts = [len(tokens) for tokens in tokens_by_text]
        tokens = chain.from_iterable(tokens_by_text)
        hashes = np.fromiter(map(self.__getitem__, tokens), np.uint64, sum(counts))
        is_word = hashes != 0
        return hashes[is_word], np.repeat(np.arange(len(counts)), counts)[is_word]


def normalize_word(token: str) -> str:
    """A token in lower case without punctuation (Brown et al. 2020, appendix C: "lowercase, whitespace delimited word
    with no punctuation")."""
    return _PUNCTUATION.sub("", token.lower())


def ngram_hashes(words: np.ndarray, texts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(n-grams,) uint64 hashes of the n-grams within texts and (n-grams,) positions of their first words, from (words,)
    hashes and text numbers. Two different n-grams have the same hash with probability 2^-64."""
    count = len(words) - size + 1
    if count < 1:
        return words[:0], np.arange(0)
    hashes = words[:count].copy()
    for offset in range(1, size):
        hashes *= _MULTIPLIER
        hashes += words[offset : offset + count]
    positions = np.flatnonzero(texts[:count] == texts[size - 1 :])
    return hashes[positions], positions


class NgramCounter:
    """Numbers of training documents that contain each of a set of n-grams.

    Attributes:
        hashes: (n-grams,) sorted hashes.
        counts: (n-grams,) numbers of documents.
    """

    def __init__(self, size: int, hashes: np.ndarray) -> None:
        self.size, self.hashes = size, np.unique(hashes)
        self.counts = np.zeros(len(self.hashes), dtype=np.int64)
        self._table_bits = min(_MAX_TABLE_BITS, (16 * len(self.hashes)).bit_length())
        self._table: np.ndarray | None = None

    def add(self, words: np.ndarray, documents: np.ndarray) -> None:
        """Count the n-grams of whole documents, from (words,) hashes and document numbers."""
        if not len(self.hashes):
            return
        shift = np.uint64(64 - self._table_bits)
        if self._table is None:  # rules out most n-grams by the first bits of their hashes
            self._table = np.zeros(1 << self._table_bits, dtype=bool)
            self._table[self.hashes >> shift] = True
        hashes, positions = ngram_hashes(words, documents, self.size)
        candidates = np.flatnonzero(self._table[hashes >> shift])
        hashes = hashes[candidates]
        indices = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        is_match = self.hashes[indices] == hashes
        documents_of_matches = documents[positions[candidates[is_match]]]
        pairs = np.unique(documents_of_matches * len(self.hashes) + indices[is_match])
        np.add.at(self.counts, pairs % len(self.hashes), 1)

    def __getitem__(self, hashes: np.ndarray) -> np.ndarray:
        """The counts of n-grams of the set."""
        return self.counts[np.searchsorted(self.hashes, hashes)]


@dataclass
class TrainingCounts:
    """Counts of a training text: n-grams by their size, documents and words."""

    counters: dict[int, NgramCounter]
    num_documents: int = 0
    num_words: int = 0

    def count(self, documents: Documents, show_progress: bool = False) -> "TrainingCounts":
        """Add the documents of a text, or of a part of it; returns the counts."""
        word_hashes = WordHashes()
        paragraphs = progress_bar(documents.paragraphs(), "reading", unit="documents", enabled=show_progress)
        for batch in _batches(paragraphs):
            words, texts = word_hashes(batch)
            self.num_documents, self.num_words = self.num_documents + len(batch), self.num_words + len(words)
            for counter in self.counters.values():
                counter.add(words, texts)
        return self

    def merge(self, counts: "TrainingCounts") -> None:
        """Add the counts of other documents."""
        self.num_documents += counts.num_documents
        self.num_words += counts.num_words
        for size, counter in self.counters.items():
            counter.counts += counts.counters[size].counts


def measure_overlap(
    documents: Documents,
    benchmarks: Sequence[BenchmarkFile],
    rule: OverlapRule | None = None,
    *,
    num_proc: int = 1,
    show_progress: bool = False,
) -> Overlap:
    """Measure the overlap of benchmarks with a training text.

    Args:
        num_proc: Number of processes, which read the parts of the text.

    Raises:
        CtxError: The training text cannot be read.
    """
    rule = rule or OverlapRule()
    word_hashes = WordHashes()
    indexed = [_IndexedBenchmark(benchmark, word_hashes, rule) for benchmark in benchmarks]
    sizes = sorted({GPT2_NGRAM, *(benchmark.size for benchmark in indexed)})
    hashes_by_size: dict[int, list[np.ndarray]] = {size: [] for size in sizes}
    for benchmark in indexed:
        for size in {GPT2_NGRAM, benchmark.size}:
            hashes_by_size[size].append(benchmark.ngrams(size)[0])
    counters = {size: NgramCounter(size, np.concatenate(hashes)) for size, hashes in hashes_by_size.items()}
    counts = TrainingCounts(counters)
    parts = documents.parts()
    if num_proc == 1 or len(parts) == 1:
        counts.count(documents, show_progress)
    else:
        results = map_in_processes(partial(_count_part, counts), parts, min(num_proc, len(parts)))
        for result in progress_bar(results, "reading", unit="parts", total=len(parts), enabled=show_progress):
            counts.merge(result)
    files = [benchmark.compare(counters, rule.max_documents) for benchmark in indexed]
    return Overlap(counts.num_documents, counts.num_words, files)


def _count_part(empty_counts: TrainingCounts, documents: Documents) -> TrainingCounts:
    counters = {size: NgramCounter(size, counter.hashes) for size, counter in empty_counts.counters.items()}
    counts = TrainingCounts(counters).count(documents)
    for counter in counts.counters.values():
        counter._table = None  # not sent to the main process
    return counts


def _batches(documents: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """The documents as strings, in batches of about `_BATCH_WORDS`."""
    batch: list[str] = []
    size = 0
    for paragraphs in documents:
        batch.append(" ".join(paragraphs))
        size += len(batch[-1]) // 6
        if size >= _BATCH_WORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _IndexedBenchmark:
    """The words of the examples of a benchmark, and its N."""

    def __init__(self, benchmark: BenchmarkFile, word_hashes: WordHashes, rule: OverlapRule) -> None:
        self.benchmark, examples = benchmark, benchmark.examples
        self.words, self.texts = word_hashes(text for example in examples for text in example.texts)
        self.example_of_text = np.repeat(np.arange(len(examples)), [len(example.texts) for example in examples])
        self.lengths = np.bincount(self.example_of_text[self.texts], minlength=len(examples))
        self.size = rule.ngram_size(self.lengths.tolist())

    def ngrams(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and positions, see `ngram_hashes`."""
        return ngram_hashes(self.words, self.texts, size)

    def compare(self, counters: dict[int, NgramCounter], max_documents: int) -> FileOverlap:
        """The overlap with the counted training text."""
        (hashes, positions), (gpt2_hashes, _) = self.ngrams(self.size), self.ngrams(GPT2_NGRAM)
        counts, examples = counters[self.size][hashes], self.benchmark.examples
        is_match = (counts > 0) & (counts <= max_documents)
        example_of_match = self.example_of_text[self.texts[positions[is_match]]]
        dirty, first_indices, matches = np.unique(example_of_match, return_index=True, return_counts=True)
        dirty_examples = [
            DirtyExample(examples[number].location, int(count), self._ngram(int(position)))
            for number, count, position in zip(dirty, matches, positions[is_match][first_indices])
        ]
        return FileOverlap(
            file=self.benchmark.name,
            num_examples=len(examples),
            ngram_size=self.size,
            num_dirty=len(dirty),
            num_short=len(examples) - len(np.unique(self.example_of_text[self.texts[positions]])),
            num_ignored=len(np.unique(hashes[counts > max_documents])),
            ngram_share=float(is_match.mean()) if len(is_match) else 0.0,
            gpt2_share=float((counters[GPT2_NGRAM][gpt2_hashes] > 0).mean()) if len(gpt2_hashes) else 0.0,
            dirty_examples=dirty_examples,
            clean=np.setdiff1d(np.arange(len(examples)), dirty).tolist(),
        )

    def _ngram(self, position: int) -> str:
        """The words of the N-gram at a position among the words of all texts."""
        text = int(self.texts[position])
        texts = self.benchmark.examples[self.example_of_text[text]].texts
        string = texts[text - int(np.searchsorted(self.example_of_text, self.example_of_text[text]))]
        words = [word for word in map(normalize_word, string.split()) if word]
        start = position - int(np.searchsorted(self.texts, text))
        return " ".join(words[start : start + self.size])
