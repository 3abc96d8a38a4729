"""Annotated corpora -> sentences: CoNLL-U treebanks, CoNLL columns, edge-probing JSONL and SentEval's tables.

Files may be compressed (`.gz` or `.zst`), or URLs. Errors name the file and the line.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import conllu_cells, line_blocks, read_conll
from hf_ctxmodels.data.text_files import read_json_lines, read_text

Span = tuple[int, int]
"""First word, and the word after the last."""

PTB_PUNCTUATION = frozenset(("''", ",", ".", ":", "``", "-LRB-", "-RRB-"))
_BRACKET = re.compile(r"\(([^()\s]+)|([^()\s]*)\)")
_SENTEVAL_SPLITS = {"tr": "train", "va": "validation", "te": "test"}


@dataclass(frozen=True)
class TreebankSentence:
    """The syntactic words of a sentence with their annotation, one item per word in each list.

    `heads` are word indices from 0, -1 for the root. Multiword tokens (`3-4`) and empty nodes (`8.1`) are left out.
    """

    words: list[str]
    lemmas: list[str]
    upos: list[str]
    xpos: list[str]
    features: list[dict[str, str]]
    heads: list[int]
    relations: list[str]
    misc: list[dict[str, str]]
    sentence_id: str
    document: str
    location: str

    def is_punctuation(self) -> list[bool]:
        """Words with the UPOS tag PUNCT or SYM; without UPOS tags, with a punctuation tag of the Penn Treebank."""
        return [
            upos in ("PUNCT", "SYM") or (upos == "_" and xpos in PTB_PUNCTUATION)
            for upos, xpos in zip(self.upos, self.xpos, strict=True)
        ]

    def depths(self) -> list[int]:
        """Number of arcs between each word and the root, which has depth 0; raises CtxError unless the heads are a
        tree."""
        roots = [word for word, head in enumerate(self.heads) if head < 0]
        dependents = defaultdict(list)
        for word, head in enumerate(self.heads):
            dependents[head].append(word)
        depths = dict.fromkeys(roots, 0)
        queue = list(roots)
        for word in queue:
            queue += dependents[word]
            depths |= dict.fromkeys(dependents[word], depths[word] + 1)
        if len(roots) != 1 or len(depths) != len(self.words):
            raise CtxError(
                f"The heads are not a tree: {len(roots)} roots, {len(self.words) - len(depths)} words in a circle.",
                location=self.location,
                hint="correct the HEAD column, exactly one word has the head 0.",
            )
        return [depths[word] for word in range(len(self.words))]

    def subtree(self, root: int) -> list[int]:
        """The words below a word and the word itself, in order."""
        words = {root}
        while added := {word for word, head in enumerate(self.heads) if head in words} - words:
            words |= added
        return sorted(words)


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


def read_treebank(file: str | Path) -> list[TreebankSentence]:
    """Sentences of a CoNLL-U file (Universal Dependencies).

    A head that is not annotated (`_`) is -1: `depths` then raises an error, and tags can still be read.

    Raises:
        CtxError: A line is invalid, word ids are not 1, 2, 3, ..., a head is not a word of the sentence, or there are
            no sentences.
    """
    sentences = []
    document = ""
    for lines in line_blocks(file):
        sentence_id, first_line = "", 0
        rows: list[list[str]] = []
        for number, line in lines:
            if match := re.match(r"#\s*newdoc(?:\s+id\s*=\s*(.*))?$", line):
                document = (match[1] or "").strip() or f"{file}:{number}"
            elif match := re.match(r"#\s*sent_id\s*=\s*(.*)$", line):
                sentence_id = match[1].strip()
            cells = conllu_cells(line, f"{file}:{number}")
            if not cells:
                continue
            first_line = first_line or number
            if int(cells[0]) != len(rows) + 1:
                raise CtxError(
                    f"Word {cells[0]} follows word {len(rows)}.",
                    location=f"{file}:{number}",
                    hint="number the words of a sentence from 1, and write a blank line between sentences.",
                )
            rows.append(cells)
        if rows:
            locations = [f"{file}:{number}" for number, line in lines if line.split("\t")[0].isdecimal()]
            heads = [_head(cells, len(rows), location) for cells, location in zip(rows, locations, strict=True)]
            columns = list(zip(*rows))
            sentences.append(
                TreebankSentence(
                    words=list(columns[1]),
                    lemmas=list(columns[2]),
                    upos=list(columns[3]),
                    xpos=list(columns[4]),
                    features=[_attributes(cell) for cell in columns[5]],
                    heads=heads,
                    relations=list(columns[7]),
                    misc=[_attributes(cell) for cell in columns[9]],
                    sentence_id=sentence_id,
                    document=document,
                    location=f"{file}:{first_line}",
                )
            )
    if not sentences:
        raise CtxError("No sentences.", location=str(file), hint="use a CoNLL-U file with at least one sentence.")
    return sentences


def _head(cells: Sequence[str], num_words: int, location: str) -> int:
    """Index of the head of a word; -1 for the root and without annotation."""
    if cells[6] == "_":
        return -1
    if not cells[6].isdecimal() or int(cells[6]) > num_words or cells[6] == cells[0]:
        raise CtxError(
            f"The head {cells[6]!r} of word {cells[0]} ({cells[1]}) is no other word of the sentence.",
            location=location,
            hint=f"use 0 for the root, or another number up to {num_words}.",
        )
    return int(cells[6]) - 1


def _attributes(cell: str) -> dict[str, str]:
    """`A=x|B=y` as a dictionary."""
    return dict(item.partition("=")[::2] for item in cell.split("|")) if cell != "_" else {}  # type: ignore[misc]


def is_treebank(file: str | Path) -> bool:
    """Whether a file is in CoNLL-U by its name."""
    return Path(file).name.removesuffix(".gz").removesuffix(".zst").endswith(".conllu")


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


def read_bio_spans(file: str | Path, tag_column: int = -1) -> list[SpanSentence]:
    """Chunks or entities of a file of CoNLL columns with BIO or IOB1 tags, as labeled spans."""
    sentences = []
    for sentence in read_conll(file, tag_column=tag_column):
        targets: list[SpanTarget] = []
        start = 0
        for end, tag in enumerate([*sentence.tags[1:], "O"], 1):
            label = sentence.tags[end - 1][2:]
            if tag[:2] != "I-" or tag[2:] != label:
                if label:
                    targets.append(SpanTarget((start, end), None, (label,)))
                start = end
        sentences.append(SpanSentence(sentence.words, targets, sentence.location))
    return sentences


def read_propbank(file: str | Path) -> list[SpanSentence]:
    """Predicates and their arguments: a target has the predicate's word, the argument's span and its role.

    Lines have tab-separated columns: id, word, XPOS, head, relation, roleset (`_` if the word is not a predicate), and
    for each predicate a column with its bracketed arguments, `(ARG1*` and `*)`. The spans of verbs (`V`, `C-V`) are
    skipped.
    """
    sentences = []
    for lines in line_blocks(file):
        located = [(line.split("\t"), f"{file}:{number}") for number, line in lines if not line.startswith("#")]
        if not located:
            continue
        rows, locations = [row for row, _ in located], [location for _, location in located]
        predicates = [word for word, row in enumerate(rows) if row[5:6] not in ([], ["_"])]
        width = 6 + len(predicates)
        for row, location in located:
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
    if is_treebank(file):
        sentences = read_treebank(file)
        mentions = [
            (sentence.words, [(entity, span) for entity, _, span in entity_mentions(sentence)], sentence)
            for sentence in sentences
        ]
        return [
            SpanSentence(words, _mention_pairs(spans), sentence.location, sentence.document)
            for words, spans, sentence in mentions
        ]
    pairs = []
    for lines in line_blocks(file):
        located = [(line.split(), f"{file}:{number}") for number, line in lines if not line.startswith("#")]
        if not located:
            continue
        rows, locations = [row for row, _ in located], [location for _, location in located]
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
