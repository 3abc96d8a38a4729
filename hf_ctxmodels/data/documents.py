"""Documents: running text, a text with its translation, a labeled pair, or a news article; their parts; the held-out
split; and rule-based sentence splitting."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, islice
from typing import ClassVar, Self, TypeVar

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.seeding import Purpose, generator

Item = TypeVar("Item")
Reader = Callable[[], Iterator[list[str]]]
"""Opens a source and yields its documents as lists of paragraphs."""

PART_BYTES = 64 << 20
"""Size of the files that are read together as one part of a corpus; larger files are read in ranges of this size."""

_NUMBERS_PER_PART = 1 << 32
_MIN_SHARE = 1 << 20  # bytes that a sample of documents takes from a part
_OVERSAMPLING = 8


class TranslatedText(list[str]):
    """A text and its translation, joined by `separator` in a single string."""

    separator: ClassVar[str] = "\t"


class LabeledPair(list[str]):
    """Two texts of the same language, and the label of the pair."""

    def __init__(self, texts: Iterable[str], label: str) -> None:
        super().__init__(texts)
        self.label = label


class TextWithUnits(list[str]):
    """The paragraphs or sentences of a text, and its phrases that are units of knowledge."""

    def __init__(self, sentences: Iterable[str], units: Iterable[str]) -> None:
        super().__init__(sentences)
        self.units = tuple(units)


class TextWithCode(list[str]):
    """The paragraphs or sentences of a text, and its control code, the name of its source or label."""

    def __init__(self, sentences: Iterable[str], code: str) -> None:
        super().__init__(sentences)
        self.code = code


class NewsArticle(list[str]):
    """The texts of an article's non-empty fields; `fields` maps their names to the texts, and `location` is the
    `file:line` of an article that was read from a file."""

    def __init__(self, fields: Mapping[str, str], location: object = None) -> None:
        super().__init__(fields.values())
        self.fields, self.location = dict(fields), location


class NoDocumentError(CtxError):
    """A source, or its selected subset, has no document with text."""


class SingleDocumentError(CtxError):
    """The text has a single document, and the objective needs segments of two."""


def single_document_error(in_each_part: bool = False) -> SingleDocumentError:
    """The error for a text with a single document, or with one in each of its parts."""
    return SingleDocumentError(
        "The objective samples second segments from other documents, but there is only one document with text"
        + (" in each part of the dataset." if in_each_part else "."),
        hint="separate the documents (in a text file: by a blank line), or use the objective `mlm`.",
    )


@dataclass(frozen=True)
class HeldOut:
    """The numbers of the held-out documents: a random one of each `block` consecutive numbers."""

    block: int
    seed: int

    def __contains__(self, number: int) -> bool:
        block, offset = divmod(number, self.block)
        return _held_out_offset(self.seed, block, self.block) == offset


@lru_cache(maxsize=1024)  # a generator takes longer than reading a document
def _held_out_offset(seed: int, block: int, size: int) -> int:
    return int(generator(seed, 0, block, Purpose.HELD_OUT).integers(size))


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of one source that are read together: files, or a range of a file.

    Attributes:
        source: Number of the source.
        read: Reads the documents; can be pickled.
        num_bytes: Size of the files, compressed if they are; None if unknown.
    """

    source: int
    read: Reader
    num_bytes: int | None = None


@dataclass(frozen=True)
class Part:
    """Consecutive chunks, and the number of their first document, which identifies documents for `HeldOut`."""

    first: int
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the chunks of known size."""
        return sum(chunk.num_bytes or 0 for chunk in self.chunks)


def group_by_size(items: Iterable[Item], size_of: Callable[[Item], int | None]) -> list[list[Item]]:
    """Groups of consecutive items of up to `PART_BYTES` together; an unknown size counts as 0."""
    groups: list[list[Item]] = []
    total = 0
    for item in items:
        size = size_of(item) or 0
        total += size
        if not groups or total > PART_BYTES:
            groups.append([])
            total = size
        groups[-1].append(item)
    return groups


def group_chunks(chunks: Iterable[Chunk]) -> tuple[Part, ...]:
    """Consecutive chunks as parts of up to `PART_BYTES`; the documents of part p are numbered from `p << 32` on, so
    that they can be numbered without reading the parts before."""
    groups = group_by_size(chunks, lambda chunk: chunk.num_bytes)
    return tuple(Part(number * _NUMBERS_PER_PART, tuple(group)) for number, group in enumerate(groups))


@dataclass(frozen=True)
class Documents:
    """Documents that can be iterated repeatedly: non-empty lists of sentences (possibly `TextWithUnits` or
    `TextWithCode`), or `TranslatedText`, `LabeledPair` or `NewsArticle`, which are not split into sentences. Each
    iteration reads the sources from their start. Can be pickled.

    Attributes:
        name: Name of the source, for errors and cards.
        layout: What is read, in order.
        source_names: Name of each source, which chunks refer to by number.
        skip_empty: Skip documents without text instead of raising.
        subset: The documents to iterate: "all", "training" or "held-out".
        max_documents: Only the first documents, held-out ones included; None for all.
        may_be_empty: Yield nothing instead of raising `NoDocumentError`; for one of several parts.
    """

    name: str
    layout: tuple[Part, ...]
    source_names: tuple[str, ...]
    skip_empty: bool = False
    held_out: HeldOut | None = None
    subset: str = "all"
    max_documents: int | None = None
    may_be_empty: bool = False

    def __iter__(self) -> Iterator[list[str]]:
        """Yield documents; raises NoDocumentError if there is none, and CtxError if the source cannot be read, or a
        document has no text (unless `skip_empty`)."""
        is_empty = True
        for number, paragraphs in self._selected_paragraphs():
            is_running_text = not isinstance(paragraphs, TranslatedText | LabeledPair | NewsArticle)
            sentences = split_document(paragraphs) if is_running_text else paragraphs
            if sentences:
                is_empty = False
                yield sentences
            elif not self.skip_empty:
                part, position = divmod(number, _NUMBERS_PER_PART)
                raise CtxError(
                    f"Document {position}{f' of part {part}' if part else ''} (counted from 0) has no text.",
                    location=self.name,
                    hint="remove it from the data, or skip such documents: --skip_empty_documents.",
                )
        if is_empty and not self.may_be_empty:
            raise NoDocumentError(
                "The dataset is empty: it has no document with text.",
                location=self.name if self.subset == "all" else f"{self.name}, {self.subset} documents",
                hint="check the source and the held-out share.",
            )

    def paragraphs(self) -> Iterator[list[str]]:
        """Yield the documents as they are read: lists of paragraphs (for text files lines), not split into sentences;
        documents without text are skipped. Raises CtxError if the source cannot be read."""
        return (paragraphs for _, paragraphs in self._selected_paragraphs() if paragraphs)

    def _selected_paragraphs(self) -> Iterator[tuple[int, list[str]]]:
        """The numbered documents of the subset."""
        for number, paragraphs in islice(self._numbered_paragraphs(), self.max_documents):
            if self.held_out is None or (number in self.held_out) == (self.subset == "held-out"):
                yield number, paragraphs

    def _numbered_paragraphs(self) -> Iterator[tuple[int, list[str]]]:
        for part in self.layout:
            yield from enumerate((paragraphs for chunk in part.chunks for paragraphs in chunk.read()), part.first)

    @property
    def num_bytes(self) -> int | None:
        """Size of the files, compressed if they are; None if it is unknown."""
        sizes = [chunk.num_bytes for part in self.layout for chunk in part.chunks]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def parts(self) -> list[Self]:
        """The documents in parts of about `PART_BYTES` that can be read independently; one part if `max_documents` is
        set. Together they have the same documents, numbered and held out as here. A part of several may be empty."""
        if len(self.layout) == 1 or self.max_documents is not None:
            return [self]
        return [replace(self, layout=(part,), may_be_empty=True) for part in self.layout]

    def first_parts(self, num_bytes: int) -> Self:
        """The first parts of up to this size together, at least one."""
        sizes = accumulate(part.num_bytes for part in self.layout)
        return replace(self, layout=self.layout[: max(1, sum(size <= num_bytes for size in sizes))])

    def control_codes(self) -> set[str]:
        """The control codes of all documents, held-out ones included; reads the sources once."""
        return {text.code for _, text in self._numbered_paragraphs() if isinstance(text, TextWithCode)}

    def texts(self) -> "DocumentTexts":
        """The documents as strings, see `text_of`."""
        return DocumentTexts(self)

    def by_source(self) -> list[Self]:
        """The documents of each source, with the same documents held out; a part of several sources is read once to
        number its documents. `max_documents` then applies to each source."""
        layouts: list[list[Part]] = [[] for _ in self.source_names]
        for part in self.layout:
            first = part.first
            for source, group in groupby(part.chunks, key=lambda chunk: chunk.source):
                chunks = tuple(group)
                layouts[source].append(Part(first, chunks))
                if self.held_out is not None and chunks[-1] is not part.chunks[-1]:
                    first += sum(1 for chunk in chunks for _ in chunk.read())
        layout_by_name = zip(self.source_names, layouts, strict=True)
        return [replace(self, name=name, layout=tuple(layout)) for name, layout in layout_by_name if layout]

    def split(self, validation_fraction: float, seed: int = 0) -> tuple[Self, Self]:
        """Training documents and held-out documents, see `HeldOut`."""
        if not 0 < validation_fraction <= 0.5:
            raise CtxError(
                f"validation_fraction={validation_fraction} is out of range.", hint="use more than 0 and at most 0.5."
            )
        held_out = HeldOut(round(1 / validation_fraction), seed)
        return replace(self, held_out=held_out, subset="training"), replace(self, held_out=held_out, subset="held-out")

    def unsplit(self) -> Self:
        """The training and held-out documents together."""
        return replace(self, held_out=None, subset="all")


@dataclass(frozen=True)
class SampledDocuments:
    """A random sample of documents of about `num_bytes` of text, spread over the parts; the same in each iteration.

    Of a part, or of as many random parts as have shares of a mebibyte, the documents are sampled from the first eight
    times the share, or from all if the part is smaller: the remaining text is not read. Documents of sources of unknown
    size are read once before.
    """

    documents: Documents
    num_bytes: int
    seed: int = 0

    def __iter__(self) -> Iterator[list[str]]:
        parts, sizes = self.documents.parts(), self._part_sizes()
        number = min(len(parts), max(1, self.num_bytes // _MIN_SHARE))
        chosen = np.sort(generator(self.seed, 0, 0, Purpose.SAMPLING).permutation(len(parts))[:number]).tolist()
        total = max(1, sum(sizes[index] for index in chosen))
        for index in chosen:
            share = self.num_bytes * sizes[index] / total
            window = min(sizes[index], _OVERSAMPLING * share)
            rng = generator(self.seed, 1, index, Purpose.SAMPLING)
            num_read = num_sampled = 0
            for document in parts[index]:
                size = _num_bytes(document)
                num_read += size
                if rng.random() * window < share:
                    num_sampled += size
                    yield document
                if num_sampled >= share or num_read >= window:
                    break

    def _part_sizes(self) -> list[int]:
        return [
            part.num_bytes if part.max_documents is None and part.num_bytes is not None else sum(map(_num_bytes, part))
            for part in self.documents.parts()
        ]

    def by_source(self) -> list[Self]:
        """The samples of each source, of sizes in proportion."""
        sources = self.documents.by_source()
        sizes = [sum(replace(self, documents=source)._part_sizes()) for source in sources]
        total = max(1, sum(sizes))
        return [
            replace(self, documents=source, num_bytes=self.num_bytes * size // total)
            for source, size in zip(sources, sizes, strict=True)
        ]


def _num_bytes(document: list[str]) -> int:
    return sum(len(sentence.encode()) for sentence in document)


@dataclass(frozen=True)
class DocumentTexts:
    """Documents as strings, which can be iterated repeatedly."""

    documents: Iterable[list[str]]

    def __iter__(self) -> Iterator[str]:
        return map(text_of, self.documents)


def text_of(document: list[str]) -> str:
    """A document as one string: one sentence per line, or a text, a tab and its translation."""
    return (TranslatedText.separator if isinstance(document, TranslatedText) else "\n").join(document)


ABBREVIATIONS = frozenset(
    # titles and names, references, firms, months, dotted words, German, French and Spanish
    """
    mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt gov sen rep pres mt ft
    no nos vol fig eq sec ch art pp ed eds vs cf al approx
    dept est inc ltd co corp
    jan feb mar apr jun jul aug sep sept oct nov dec
    e.g i.e u.s u.k u.n
    z.b bzw ca usw nr str bd hr mme mlle sra srta dra
    """.split()  # noqa: SIM905  (a block of words is more readable than a list of literals)
)

_END = re.compile(
    r"""
    [.!?…。！？।॥؟۔։።፧។။]                    # a mark at the start of the expression makes the search fast
    (?:
        (?<=[.!?…]) [.!?…]* ["'”’»)\]]*      # further marks, closing quotes and brackets,
        (?=\s+ ["'“‘«(\[¿¡]* (?P<next>\w))   # before a word,
    |   (?<![.!?…]) [.!?。！？।॥؟۔։።፧។။]*     # or a mark that occurs only at the end of a sentence
        (?: [」』”’）»)\]] | ["'](?!\w) )*
    )
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"([^\W\d_][\w.]*)\.$")
_LONGEST_WORD = 32


def split_document(paragraphs: list[str], prefix: str = "") -> list[str]:
    """The sentences of a document, each after a prefix, with the units or the control code of the document."""
    sentences = [f"{prefix}{sentence}" for paragraph in paragraphs for sentence in split_sentences(paragraph)]
    if isinstance(paragraphs, TextWithUnits):
        return TextWithUnits(sentences, paragraphs.units)
    if isinstance(paragraphs, TextWithCode):
        return TextWithCode(sentences, paragraphs.code)
    return sentences


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, stripped and non-empty, with all of their visible characters, by fast rules.

    A sentence ends after `.`, `!`, `?` or `…` (and closing quotes and brackets) if white space follows and the next
    word does not begin with a lower-case letter, but not after a known abbreviation or an initial ("J. Smith").
    The full stops and question marks of Chinese, Japanese, Indic languages, Arabic, Urdu, Armenian, Ethiopic, Khmer and
    Burmese need no white space. In a paragraph without capitals a sentence ends at
    every such mark but an ellipsis.

    >>> split_sentences("Mr. Smith left. Was it late? It was 4.30 p.m. by the clock.")
    ['Mr. Smith left.', 'Was it late?', 'It was 4.30 p.m. by the clock.']
    >>> split_sentences("mr. smith left . was it late ... or not ? it was .")
    ['mr. smith left .', 'was it late ... or not ?', 'it was .']
    """
    sentences, start = [], 0
    has_capitals = not paragraph.islower()
    for match in _END.finditer(paragraph):
        following = match["next"]
        if following:
            continued = following.islower() if has_capitals else match[0].startswith(("..", "…"))
            if continued or _ends_in_abbreviation(paragraph[start : match.end()]):
                continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_in_abbreviation(text: str) -> bool:
    """Whether the full stop at the end of `text` is part of its last word."""
    match = _LAST_WORD.search(text[-_LONGEST_WORD:])
    if match is None:
        return False
    word = match[1]
    return (len(word) == 1 and word.isupper()) or word.lower() in ABBREVIATIONS
