"""Filters of C4 for raw text from the web (Raffel et al. 2020, section 2.2).

Where the paper gives no detail, the rules and their order follow the released code (tensorflow_datasets,
`c4_utils`). Differences: duplicates are spans of three sentences, as in the paper, where the code removes duplicate
lines, and the language is checked before duplicates are removed; sentences are split by `split_sentences`; a line may
also end in a curly quotation mark; space before or after a citation mark at the end of a line is removed with it, where
the code removes the line.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.output_files import replacing, write_compressed
from hf_ctxmodels.data.documents import split_sentences
from hf_ctxmodels.data.files import compression_suffix, file_suffix
from hf_ctxmodels.data.overlap import ngram_hashes

END_MARKS = (".", "?", "!", '"', "”")
_ELLIPSIS = "..."
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
SPAN_SENTENCES = 3
_MAX_WORD_LENGTH = 1000

RULES = {
    "long_words": "lines with a word of more than 1,000 characters",
    "citations": "Wikipedia's citation marks, such as [3] or [citation needed]",
    "end_marks": "lines that do not end in terminal punctuation, or that end in an ellipsis",
    "short_lines": "lines of fewer words than `min_words`",
    "lorem_ipsum": 'documents with the phrase "lorem ipsum"',
    "javascript": 'lines with the word "javascript"',
    "brackets": "documents with a curly bracket, as in program code",
    "policy": "lines about cookies, terms of use or privacy policies",
    "bad_words": "documents with a word of the list `bad_words`",
    "sentences": "documents of fewer sentences than `min_sentences`",
    "language": "documents that are not in the language `language`",
    "duplicates": "all but one of the spans of three sentences that occur more than once",
}
"""The rules in their order, and what they remove."""
_DOCUMENT_RULES = ("lorem_ipsum", "brackets", "bad_words", "sentences", "language")


@dataclass
class CleaningRules:
    """Rules that remove lines and documents.

    A rule sees the lines that the rules before it have left, and a rule for documents ends the document at once.

    Attributes:
        skip: Names of `RULES` that are disabled; "bad_words" and "language" are off without a list or a language.
        min_words: Minimum number of words in a line.
        min_sentences: Minimum number of sentences in a document, before and after duplicates are removed.
        bad_words: Words or phrases; they match without regard to case, but not within words.
        is_in_language: Tells whether a text is in the language, see `LanguageFilter`.
    """

    skip: Sequence[str] = ()
    min_words: int = 5
    min_sentences: int = 3
    bad_words: Sequence[str] = ()
    is_in_language: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.skip) - set(RULES)):
            raise CtxError(f"Unknown rule {unknown[0]!r}.", hint=f"use one of: {', '.join(RULES)}.")
        check_range(self, "min_words", "min_sentences", at_least=1)
        self.active = frozenset(RULES) - set(self.skip)
        checks: dict[str, Callable[[str, str], object]] = {
            "end_marks": lambda line, lower: not line.endswith(END_MARKS) or line.endswith(_ELLIPSIS),
            "short_lines": lambda line, lower: len(line.split()) < self.min_words,
            "lorem_ipsum": lambda line, lower: "lorem ipsum" in lower,
            "javascript": lambda line, lower: "javascript" in lower,
            "brackets": lambda line, lower: "{" in line,
            "policy": lambda line, lower: any(policy in lower for policy in _POLICIES),
        }
        if self.bad_words:
            words = "|".join(re.escape(word.lower()) for word in self.bad_words)
            pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
            checks["bad_words"] = lambda line, lower: pattern.search(lower)
        self._line_checks = [(rule, check) for rule, check in checks.items() if rule in self.active]

    def clean_lines(self, lines: Iterable[str], removed: Counter[str]) -> list[str] | None:
        """The lines that remain of a document, stripped; None for a document that is removed. Counts what the rules
        remove."""
        remaining = []
        for line in lines:
            if "long_words" in self.active and self._has_long_word(line):
                removed["long_words"] += 1
                continue
            if "citations" in self.active:
                line, number = _CITATION.subn("", line)
                removed["citations"] += number
            line = line.strip()
            if not line:
                continue
            lower = line.lower()
            rule = next((rule for rule, check in self._line_checks if check(line, lower)), None)
            if rule is None:
                remaining.append(line)
                continue
            removed[rule] += 1
            if rule in _DOCUMENT_RULES:
                return None
        return remaining

    def _has_long_word(self, line: str) -> bool:
        return len(line) > _MAX_WORD_LENGTH and any(len(word) > _MAX_WORD_LENGTH for word in line.split())

    def removing_rule(self, lines: Sequence[str], num_sentences: int) -> str | None:
        """The rule that removes a document with these lines, or None."""
        if "sentences" in self.active and num_sentences < self.min_sentences:
            return "sentences"
        if "language" in self.active and self.is_in_language is not None and not self.is_in_language("\n".join(lines)):
            return "language"
        return None


class LanguageFilter:
    """Tells whether a text is in a language with at least a probability, by py3langid.

    Raises:
        CtxError: The package is not installed, or does not know the language.
    """

    def __init__(self, language: str, min_probability: float = 0.99) -> None:
        check_range({"min_language_probability": min_probability}, at_least=0, at_most=1)
        try:
            from py3langid import langid
        except ImportError as error:
            raise CtxError(
                "The language filter needs the package py3langid, which is not installed.",
                location=f"--language {language}",
                hint="pip install 'hf_ctxmodels[language]'",
            ) from error
        self.language, self.min_probability = language, min_probability
        self._identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        labels = sorted(map(str, self._identifier.labels))
        if language not in labels:
            raise CtxError(
                f"Unknown language {language!r}.", location="--language", hint=f"use one of: {', '.join(labels)}."
            )

    def __call__(self, text: str) -> bool:
        """Whether the text is in the language."""
        language, probability = self._identifier.classify(text)
        return bool(language == self.language and probability >= self.min_probability)


class HashSet:
    """Set of 64-bit hashes in an open-addressing table: 12 to 24 bytes for each, and half as much again for a moment
    while the table grows."""

    def __init__(self) -> None:
        self._table, self._size = np.zeros(1 << 10, dtype=np.uint64), 0

    def __len__(self) -> int:
        return self._size

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """(hashes,) whether each is in the set."""
        mask = np.uint64(len(self._table) - 1)
        result, indices = np.zeros(len(hashes), dtype=bool), np.arange(len(hashes))
        hashes = np.maximum(hashes, 1)
        slots = hashes & mask
        while len(indices):
            values = self._table[slots]
            result[indices[values == hashes]] = True
            pending = (values != hashes) & (values != 0)
            indices, hashes, slots = indices[pending], hashes[pending], (slots[pending] + np.uint64(1)) & mask
        return result

    def add(self, hashes: np.ndarray) -> None:
        """Add distinct hashes that are not in the set."""
        self._size += len(hashes)
        if 3 * self._size > 2 * len(self._table):
            values = self._table[self._table != 0]
            self._table = np.zeros(1 << int(np.ceil(np.log2(2 * self._size))), dtype=np.uint64)
            self._insert(values)
        self._insert(np.maximum(hashes, 1))

    def _insert(self, hashes: np.ndarray) -> None:
        mask = np.uint64(len(self._table) - 1)
        slots = hashes & mask
        while len(hashes):
            is_free = self._table[slots] == 0
            self._table[slots[is_free]] = hashes[is_free]  # the last of several hashes for a slot
            pending = self._table[slots] != hashes
            hashes, slots = hashes[pending], (slots[pending] + np.uint64(1)) & mask


@dataclass
class TextCounts:
    """Size of a text."""

    documents: int = 0
    lines: int = 0
    characters: int = 0

    def add(self, lines: Sequence[str]) -> None:
        """Add a document."""
        self.documents += 1
        self.lines += len(lines)
        self.characters += sum(map(len, lines))


@dataclass
class TextCleaner:
    """Removes documents, lines and duplicates from a stream of documents, and counts what each rule removes.

    All but one of the spans of three consecutive sentences that occur more than once, without regard to case, are
    removed; the first one remains. The hashes of the spans are in memory, see `HashSet`: about one for each sentence.

    Attributes:
        read, written: Size of the text before and after.
        removed: What each rule removed: lines, documents, citation marks, or for "duplicates" sentences.
    """

    rules: CleaningRules
    read: TextCounts = field(default_factory=TextCounts)
    written: TextCounts = field(default_factory=TextCounts)
    removed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._spans = HashSet()

    def clean(self, documents: Iterable[Sequence[str]]) -> Iterator[list[str]]:
        """Documents as lists of lines -> the documents that remain, with the lines that remain."""
        for document in documents:
            self.read.add(document)
            lines = self.rules.clean_lines(document, self.removed)
            if lines is None:
                continue
            sentences_by_line = [split_sentences(line) for line in lines]
            rule = self.rules.removing_rule(lines, sum(map(len, sentences_by_line)))
            if rule is not None:
                self.removed[rule] += 1
                continue
            if "duplicates" in self.rules.active:
                lines = self._remove_duplicates(lines, sentences_by_line)
            if lines:
                self.written.add(lines)
                yield lines

    def _remove_duplicates(self, lines: list[str], sentences_by_line: list[list[str]]) -> list[str]:
        """The lines without duplicate spans; no lines if too few sentences remain."""
        sentences = [sentence for sentences in sentences_by_line for sentence in sentences]
        hashes = np.array([_sentence_hash(sentence) for sentence in sentences], dtype=np.uint64)
        spans, _ = ngram_hashes(hashes, np.zeros(len(hashes), dtype=np.int64), SPAN_SENTENCES)
        is_removed = self._duplicate_sentences(spans, len(sentences))
        number = int(is_removed.sum())
        self.removed["duplicates"] += number
        min_sentences = self.rules.min_sentences if "sentences" in self.rules.active else 1
        if number and len(sentences) - number < min_sentences:
            self.removed["sentences"] += 1
            return []
        if len(spans):
            is_intact = ~np.lib.stride_tricks.sliding_window_view(is_removed, SPAN_SENTENCES).any(1)
            self._spans.add(np.unique(spans[is_intact]))
        if not number:
            return lines
        remaining, first = [], 0
        for line, line_sentences in zip(lines, sentences_by_line, strict=True):
            removed_here = is_removed[first : first + len(line_sentences)]
            first += len(line_sentences)
            if not removed_here.any():
                remaining.append(line)
            elif not removed_here.all():
                remaining.append(" ".join(text for text, is_out in zip(line_sentences, removed_here) if not is_out))
        return remaining

    def _duplicate_sentences(self, spans: np.ndarray, num_sentences: int) -> np.ndarray:
        """(sentences,) whether a sentence is in a span of an earlier document, or in a repetition of a span of this
        document that begins before."""
        is_removed = np.zeros(num_sentences, dtype=bool)
        first_starts: dict[int, int] = {}
        for start, (span, is_old) in enumerate(zip(spans.tolist(), self._spans.contains(spans).tolist())):
            stop, first = start + SPAN_SENTENCES, first_starts.setdefault(span, start)
            if is_old:
                is_removed[start:stop] = True
            elif first < start:  # a repetition that overlaps with the span that remains loses only its last sentences
                is_removed[max(start, first + SPAN_SENTENCES) : stop] = True
        return is_removed

    def to_json(self) -> dict[str, Any]:
        """All numbers, of all active rules."""
        removed = {rule: self.removed[rule] for rule in RULES if rule in self.rules.active}
        return {"read": asdict(self.read), "written": asdict(self.written), "removed": removed}

    def to_text(self) -> str:
        """A table of the numbers."""
        lines = [f"{'':<14}{'documents':>12}{'lines':>14}{'characters':>18}"]
        for name, counts in (("read", self.read), ("written", self.written)):
            lines.append(f"{name:<14}{counts.documents:>12,}{counts.lines:>14,}{counts.characters:>18,}")
        lines += ["", f"{'rule':<14}{'removed':>12}"]
        for rule, number in self.to_json()["removed"].items():
            lines.append(f"{rule:<14}{number:>12,}  {RULES[rule]}")
        return "\n".join(lines)


def _sentence_hash(sentence: str) -> int:
    text = " ".join(sentence.lower().split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def write_documents(file: str | Path, documents: Iterable[Sequence[str]]) -> None:
    """Write documents atomically: `.txt` with a line for each paragraph and a blank line after each document, or
    `.jsonl` with the column "text"; with `.gz` or `.zst` compressed. Raises CtxError for another suffix."""
    suffix = check_text_suffix(file)
    with replacing(file) as temporary, write_compressed(temporary, compression_suffix(file)) as output:
        for lines in documents:
            text = "\n".join(lines)
            line = json.dumps({"text": text}, ensure_ascii=False) if suffix == ".jsonl" else f"{text}\n"
            output.write(f"{line}\n".encode("utf-8", "replace"))


def check_text_suffix(file: str | Path) -> str:
    """The suffix of a file of documents, ".txt" or ".jsonl"; raises CtxError for another one."""
    suffix = file_suffix(file)
    if suffix not in (".txt", ".jsonl"):
        raise CtxError(
            f"Cannot write text to a file with the suffix {suffix!r}.",
            location=str(file),
            hint="use .txt or .jsonl, plain or with .gz or .zst.",
        )
    return suffix
