"""Annotated corpora -> labeled spans and sentences: treebanks, CoNLL columns, edge-probing JSONL, SentEval's tables.

Files may be compressed (`.gz` or `.zst`), or URLs. Errors name the file and the line.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import line_blocks, read_conll
from hf_ctxmodels.data.text_files import read_json_lines, read_text
from hf_ctxmodels.data.treebanks import TreebankSentence, is_treebank, read_treebank

Span = tuple[int, int]
"""First word, and the word after the last."""

_BRACKET = re.compile(r"\(([^()\s]+)|([^()\s]*)\)")
_SENTEVAL_SPLITS = {"tr": "train", "va": "validation", "te": "test"}


@dataclass(frozen=True)
class SpanTarget:
    """Labels of a span, or of a pair of spans."""

    span1: Span
    span2: Span | None
    labels: tuple[str, ...]


@dataclass(frozen=True)
class SpanSentence:
    """Words with labeled spans (Tenney et al. 2019); `document` groups the sentences of a text."""

    words: list[str]
    targets: list[SpanTarget]
    location: str
    document: str = ""


@dataclass(frozen=True)
class LabeledSentence:
    """Words with one label; `forms` are the words that decide the label, which no other partition may have."""

    words: list[str]
    label: str
    location: str
    forms: tuple[str, ...] = ()


def read_edge_probing(file: str | Path) -> list[SpanSentence]:
    """Sentences of an edge-probing file of jiant, one JSON object per line (Tenney et al. 2019).

    An object has a `text` whose words are separated by spaces, and `targets` with `span1`, optionally `span2`, both
    `[first, after last]`, and `label`, a string or a list of strings.

    Raises:
        CtxError: A field is missing, or a span is empty or outside the text.
    """
    sentences = []
    for record, location in read_json_lines(file):
        text, targets = record.get("text"), record.get("targets")
        if not isinstance(text, str) or not text.split() or not isinstance(targets, list):
            raise CtxError(
                "Expected a non-empty text and a list of targets.",
                location=location,
                hint='write {"text": "...", "targets": [{"span1": [0, 1], "label": "..."}]}.',
            )
        words = text.split()
        spans = [_span_target(target, len(words), str(location)) for target in targets]
        document = str((record.get("info") or {}).get("document", ""))
        sentences.append(SpanSentence(words, spans, str(location), document))
    if not any(sentence.targets for sentence in sentences):
        raise CtxError("No targets.", location=str(file), hint="use a file with at least one labeled span.")
    return sentences


def _span_target(target: Any, num_words: int, location: str) -> SpanTarget:
    if not isinstance(target, dict) or "span1" not in target or not target.get("label"):
        raise CtxError(f"Target {target!r} lacks span1 or label.", location=location, hint="add them.")
    spans = []
    for name in ("span1", "span2"):
        span = target.get(name)
        if span is None:
            continue
        is_pair = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
        if not is_pair or not 0 <= span[0] < span[1] <= num_words:
            raise CtxError(
                f"{name} {span!r} is not a span of the {num_words} words.",
                location=location,
                hint="write [first word, word after the last], counted from 0.",
            )
        spans.append((span[0], span[1]))
    label = target["label"]
    labels = tuple(map(str, label)) if isinstance(label, list) else (str(label),)
    return SpanTarget(spans[0], spans[1] if len(spans) == 2 else None, labels)


def read_senteval(file: str | Path) -> dict[str, list[LabeledSentence]]:
    """The partitions `train`, `validation` and `test` of a SentEval probing file, whose lines are `tr`, `va` or `te`, a
    label and a sentence, separated by tabs (Conneau et al. 2018)."""
    partitions: dict[str, list[LabeledSentence]] = {name: [] for name in _SENTEVAL_SPLITS.values()}
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != 3 or cells[0] not in _SENTEVAL_SPLITS or not cells[2].split():
            raise CtxError(
                f"Not a line of a SentEval file: {line[:100]!r}.",
                location=f"{file}:{number}",
                hint="write tr, va or te, a label and a sentence, separated by tabs.",
            )
        sentence = LabeledSentence(cells[2].split(), cells[1], f"{file}:{number}")
        partitions[_SENTEVAL_SPLITS[cells[0]]].append(sentence)
    return partitions


def read_bio_spans(file: str | Path) -> list[SpanSentence]:
    """Chunks or entities of a file of CoNLL columns with BIO or IOB1 tags, as labeled spans."""
    from seqeval.metrics.sequence_labeling import get_entities

    sentences = []
    for sentence in read_conll(file):
        spans = get_entities(list(sentence.tags))
        targets = [SpanTarget((first, last + 1), None, (label,)) for label, first, last in spans]
        sentences.append(SpanSentence(sentence.words, targets, sentence.location))
    return sentences


def read_propbank(file: str | Path) -> list[SpanSentence]:
    """Predicates and their arguments: a target has the predicate's word, the argument's span and its role.

    Lines have tab-separated columns: id, word, XPOS, head, relation, roleset (`_` or `-` if the word is not a
    predicate), and for each predicate a column with its bracketed arguments, `(ARG1*` and `*)`. The spans of verbs
    (`V`, `C-V`) are skipped.
    """
    sentences = []
    for rows, locations in _column_blocks(file, "\t"):
        predicates = [word for word, row in enumerate(rows) if row[5:6] not in ([], ["_"], ["-"])]
        width = 6 + len(predicates)
        for row, location in zip(rows, locations, strict=True):
            if len(row) != width:
                raise CtxError(
                    f"{len(row)} columns for {len(predicates)} predicates, expected {width}.",
                    location=location,
                    hint="write one column of arguments for each predicate of the sentence.",
                )
        targets = []
        for column, predicate in enumerate(predicates, 6):
            cells = [row[column].replace("*", "") for row in rows]
            for label, span in bracketed_spans(cells, locations):
                if label not in ("V", "C-V"):
                    targets.append(SpanTarget((predicate, predicate + 1), span, (label,)))
        sentences.append(SpanSentence([row[1] for row in rows], targets, locations[0]))
    return sentences


def _column_blocks(file: str | Path, separator: str | None = None) -> Iterator[tuple[list[list[str]], list[str]]]:
    """The cells and the location of each line of a sentence, by default separated by white space, without comments."""
    for lines in line_blocks(file):
        numbered = [(number, line) for number, line in lines if not line.startswith("#")]
        if numbered:
            yield [line.split(separator) for _, line in numbered], [f"{file}:{number}" for number, _ in numbered]


def bracketed_spans(cells: Sequence[str], locations: Sequence[str]) -> list[tuple[str, Span]]:
    """Labels and spans of brackets, `(A` ... `)` or `(A` ... `A)`, which may nest and share a cell.

    Raises:
        CtxError: A bracket is not opened or not closed within the sentence.
    """
    spans: list[tuple[str, Span]] = []
    open_spans: list[tuple[str, int]] = []
    for word, cell in enumerate(cells):
        for match in _BRACKET.finditer(cell):
            if match[1]:
                open_spans.append((match[1], word))
                continue
            matching = [i for i, (label, _) in enumerate(open_spans) if not match[2] or label == match[2]]
            if not matching:
                raise CtxError(
                    f"Bracket {match[0]!r} was not opened.", location=locations[word], hint="correct the brackets."
                )
            label, start = open_spans.pop(matching[-1])
            spans.append((label, (start, word + 1)))
    if open_spans:
        label, start = open_spans[0]
        raise CtxError(
            f"Bracket ({label} is not closed in its sentence.", location=locations[start], hint="correct the brackets."
        )
    return spans


def read_coreference(file: str | Path) -> list[SpanSentence]:
    """Pairs of mentions of a sentence, with the label `1` if they are coreferent, else `0` (Tenney et al. 2019).

    The file has CoNLL columns: the document first, the word last but one, and its clusters last, as `(3|(5)` and `3)`;
    `-` for none. A CoNLL-U file has its mentions as `Entity` in MISC (GUM).
    """
    pairs = []
    if is_treebank(file):
        for sentence in read_treebank(file):
            mentions = [(entity, span) for entity, _, span in entity_mentions(sentence)]
            pairs.append(SpanSentence(sentence.words, _mention_pairs(mentions), sentence.location, sentence.document))
        return pairs
    for rows, locations in _column_blocks(file):
        if any(len(row) < 3 for row in rows):
            raise CtxError("Expected columns with a document, a word and clusters.", location=locations[0])
        cells = [row[-1].replace("-", "").replace("|", " ") for row in rows]
        targets = _mention_pairs(bracketed_spans(cells, locations))
        pairs.append(SpanSentence([row[-2] for row in rows], targets, locations[0], rows[0][0]))
    return pairs


def entity_mentions(sentence: TreebankSentence) -> list[tuple[str, str, Span]]:
    """Entity, type and span of the mentions of a sentence of GUM (`Entity` in MISC); discontinuous mentions are left
    out."""
    cells = [re.sub(r"\(([^()-]+)-([^()-]+)[^()]*", r"(\1-\2", misc.get("Entity", "")) for misc in sentence.misc]
    matches = [match for cell in cells for match in re.finditer(r"\(([^()-]+)-([^()-]+)", cell)]
    types = {match[1]: match[2] for match in matches}
    brackets = [re.sub(r"\(([^()-]+)-[^()]+", r"(\1", cell) for cell in cells]
    mentions = bracketed_spans(brackets, [sentence.location] * len(brackets))
    return [(entity, types[entity], span) for entity, span in mentions if "[" not in entity]


def _mention_pairs(mentions: Sequence[tuple[str, Span]]) -> list[SpanTarget]:
    """All pairs of mentions of a sentence, the earlier one second."""
    return [
        SpanTarget(later, earlier, (str(int(entity == previous)),))
        for (previous, earlier), (entity, later) in combinations(sorted(mentions, key=lambda pair: pair[1]), 2)
    ]
