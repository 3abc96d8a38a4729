"""Files with coreference clusters -> documents, with errors that name the file and the line.

Files may be compressed (`.gz` or `.zst`), or URLs:

- `.conllu`: mentions in the `Entity` attribute of MISC, as in GUM and CorefUD; `# newdoc` begins a document;
- `.jsonl`: one document per line, with "sentences", lists of words, and "clusters", lists of [first, last] words
  counted over the document (as in the data of Lee et al. 2017); "doc_key" is its name;
- other files are CoNLL-2012 columns: the word in the fourth, the clusters in the last; `#begin document` begins a
  document, a blank line ends a sentence.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.record_files import has_records, read_records
from hf_ctxmodels.data.table_files import conllu_cells, split_cells
from hf_ctxmodels.data.text_files import read_text

Span = tuple[int, int]
"""First word of a document, and the word after the last."""

_BRACKET = re.compile(r"\((?P<opened>[^()|-]+)[^()|]*(?P<is_closed>\))?|(?P<closed>[^()|-]+)\)|\|")
_WORD_COLUMN = 3
_JSON_HINT = 'write {"sentences": [["A", "word", ...], ...], "clusters": [[[first, last], ...], ...]}.'


@dataclass(frozen=True)
class CoreferenceDocument:
    """A document, or a window of its sentences.

    Attributes:
        name: Name of the document, with the number of the window.
        sentences: The words of each sentence.
        clusters: Mentions of the same entity, in order.
        location: `file:line` of its beginning.
    """

    name: str
    sentences: list[list[str]]
    clusters: list[list[Span]]
    location: str

    @property
    def words(self) -> list[str]:
        """All words."""
        return [word for sentence in self.sentences for word in sentence]

    def windows(self, max_words: int) -> list["CoreferenceDocument"]:
        """Divide the document into windows of whole sentences with at most `max_words` words.

        A longer sentence is divided. Clusters are divided, too, and mentions that cross a border are left out.
        """
        pieces = [
            sentence[start : start + max_words]
            for sentence in self.sentences
            for start in range(0, len(sentence), max_words)
        ]
        groups: list[list[list[str]]] = []
        num_words = 0
        for piece in pieces:
            if not groups or num_words + len(piece) > max_words:
                groups.append([])
                num_words = 0
            groups[-1].append(piece)
            num_words += len(piece)
        windows = []
        ends = list(accumulate(sum(map(len, group)) for group in groups))
        for number, (sentences, start, end) in enumerate(zip(groups, [0, *ends], ends, strict=False), 1):
            clusters = [
                [(first - start, last - start) for first, last in cluster if start <= first and last <= end]
                for cluster in self.clusters
            ]
            clusters = [cluster for cluster in clusters if cluster]
            windows.append(CoreferenceDocument(f"{self.name}, window {number}", sentences, clusters, self.location))
        return windows


def read_coreference(file: str | Path, labeled: bool = True) -> list[CoreferenceDocument]:
    """The documents of a file in one of the formats above, without clusters unless `labeled`.

    Raises:
        CtxError: The file is invalid, a mention does not end, or there is no document.
    """
    suffix = file_suffix(file)
    if has_records(file):
        documents = list(_read_json(file, labeled))
    else:
        lines = _conllu_lines(file) if suffix == ".conllu" else _conll_lines(file, labeled)
        lines = lines if labeled else (replace(line, brackets="") for line in lines)
        documents = [document for document in _documents(lines) if document.sentences]
    if not documents:
        raise CtxError("The file has no documents.", location=str(file), hint="use a file with at least one document.")
    return documents


@dataclass(frozen=True)
class _Line:
    """A line of columns: the name of a document that begins, or a word with its brackets, or the end of a sentence."""

    location: str
    document: str | None = None
    word: str | None = None
    brackets: str = ""


def _conll_lines(file: str | Path, labeled: bool) -> Iterator[_Line]:
    for number, line in enumerate(read_text(file).split("\n"), 1):
        location, cells = f"{file}:{number}", split_cells(line)
        if match := re.match(r"#begin document\s*\((.*)\);?(.*)$", line):
            yield _Line(location, document=f"{match[1]};{match[2]}" if match[2].strip() else match[1])
        elif line.startswith("#") or not cells:
            yield _Line(location)
        elif len(cells) <= _WORD_COLUMN + labeled:
            raise CtxError(
                f"{len(cells)} columns in {line[:100]!r}, expected the word in column {_WORD_COLUMN + 1}"
                + (", and clusters in the last." if labeled else "."),
                location=location,
                hint="use the columns of CoNLL-2012: document, part, number, word, ..., clusters.",
            )
        else:
            yield _Line(location, word=cells[_WORD_COLUMN], brackets=cells[-1].removeprefix("-"))


def _conllu_lines(file: str | Path) -> Iterator[_Line]:
    for number, line in enumerate(read_text(file).split("\n"), 1):
        location = f"{file}:{number}"
        if match := re.match(r"#\s*newdoc(?:\s+id\s*=\s*(.*))?$", line.rstrip("\r")):
            yield _Line(location, document=match[1] or location)
        elif not line.strip():
            yield _Line(location)
        elif cells := conllu_cells(line.rstrip("\r"), location):
            attributes = dict(field.partition("=")[::2] for field in cells[9].split("|"))
            yield _Line(location, word=cells[1], brackets=attributes.get("Entity", ""))


def _documents(lines: Iterable[_Line]) -> Iterator[CoreferenceDocument]:
    """Documents of lines; a file that names none is one document."""
    group: list[_Line] = []
    for line in lines:
        if line.document is not None and group:
            yield _document(group)
            group = []
        group.append(line)
    if group:
        yield _document(group)


def _document(lines: Sequence[_Line]) -> CoreferenceDocument:
    name, num_words = "document", 0
    sentences: list[list[str]] = [[]]
    mentions: dict[str, list[Span]] = defaultdict(list)
    starts: dict[str, list[tuple[int, str]]] = defaultdict(list)  # of mentions that have not ended
    for line in lines:
        if line.document is not None:
            name = line.document
        elif line.word is None:
            sentences.append([])
        else:
            sentences[-1].append(line.word)
            for entity, begins, ends in _brackets(line):
                if begins:
                    starts[entity].append((num_words, line.location))
                if ends:
                    if not starts[entity]:
                        raise _bracket_error(f"{entity})", line.location, "does not begin")
                    mentions[entity].append((starts[entity].pop()[0], num_words + 1))
            num_words += 1
    for entity, opened in starts.items():
        if opened:
            raise _bracket_error(f"({entity}", opened[-1][1], "does not end")
    # of two entities with the same span, the first has it
    entities = {span: entity for entity, spans in reversed(mentions.items()) for span in spans}
    clusters: dict[str, list[Span]] = defaultdict(list)
    for span, entity in sorted(entities.items()):
        clusters[entity].append(span)
    return CoreferenceDocument(name, [*filter(None, sentences)], sorted(clusters.values()), lines[0].location)


def _brackets(line: _Line) -> Iterator[tuple[str, bool, bool]]:
    """The entities of a cell such as `(25|(24)`, or GUM's `(7-abstract-new-...(3-...)`: whether a mention begins and
    ends."""
    position = 0
    for match in _BRACKET.finditer(line.brackets):
        entity = match["opened"] or match["closed"] or ""
        if match.start() != position or "[" in entity:
            break
        position = match.end()
        if entity:
            yield entity, match["opened"] is not None, bool(match["closed"] or match["is_closed"])
    if position != len(line.brackets):
        raise CtxError(
            f"Not a list of mentions: {line.brackets[:100]!r}.",
            location=line.location,
            hint="write (1 where a mention of entity 1 begins, 1) where it ends, and (1) around one word; mentions of "
            "several parts, as in (1[1/2], are not supported.",
        )


def _bracket_error(bracket: str, location: str, problem: str) -> CtxError:
    return CtxError(
        f"The mention {bracket} {problem} in its document.",
        location=location,
        hint="write (1 where a mention of entity 1 begins, and 1) where it ends.",
    )


def _read_json(file: str | Path, labeled: bool) -> Iterator[CoreferenceDocument]:
    for number, (record, location) in enumerate(read_records(file), 1):
        with wrap_errors("Not a document", location=str(location), hint=_JSON_HINT):
            sentences: Sequence[Sequence[str]] = record["sentences"]
            if not all(isinstance(sentence, list) for sentence in sentences):
                raise TypeError("a sentence is not a list of words")
            if not all(isinstance(word, str) for sentence in sentences for word in sentence):
                raise TypeError("a word is not a text")
            if not all(word.strip() for sentence in sentences for word in sentence):
                raise ValueError("a word is blank")
            num_words = sum(map(len, sentences))
            clusters = [
                sorted({(int(first), int(last) + 1) for first, last in cluster})
                for cluster in (labeled and record.get("clusters")) or []
            ]
            for first, end in (span for cluster in clusters for span in cluster):
                if not 0 <= first < end <= num_words:
                    raise ValueError(f"[{first}, {end - 1}] is not a span of {num_words} words")
            name = str(record.get("doc_key", f"document {number}"))
            if num_words:
                yield CoreferenceDocument(name, [[*s] for s in sentences if s], sorted(clusters), str(location))
