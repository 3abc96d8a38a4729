"""Text files -> lines, JSON objects and documents of running text, with errors that name the file and the line.

Files are read line by line or batch by batch. A document is a list of paragraphs, which may be empty. (The readers of
`datasets` report neither line numbers nor, for CSV, the file, and infer types across lines.)

A file, or a range of it, is read: bytes of an uncompressed text or JSON lines file, or row groups of a Parquet file.
Documents belong to the range in which they begin: all ranges of a file together have exactly its documents.
"""

import io
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import parse_json
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.documents import TextWithCode, TextWithUnits, TranslatedText
from hf_ctxmodels.data.files import (
    DATA_SUFFIXES,
    DataFile,
    compression_suffix,
    file_errors,
    file_suffix,
    missing_file_error,
    open_file,
)

if TYPE_CHECKING:
    import pyarrow

_ARCHIVES = {  # first bytes -> format of archives and compressed files
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"Rar!\x1a\x07": "RAR",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
FILE_SUFFIXES = (".txt", ".jsonl", ".parquet")
_ISO_639_1 = (
    "aa ab af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu "
    "ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my "
    "na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm "
    "sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za "
    "zh zu"
)
_LANGUAGES = frozenset(_ISO_639_1.split())
_SAMPLE_SIZE = 1 << 20  # characters of the first file that `guess_separator` reads
_SMALL_FILE = 1 << 16  # bytes
_BLOCK_SIZE = 1 << 20

Separator = Literal["line", "blank", "file"]
"""End of a document in text files: the end of the line, a blank line, or the end of the file."""


class FileRange(NamedTuple):
    """A file, or a range of its bytes or row groups, from `start` to before `stop` (None: to its end)."""

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class LineLocation:
    """`file:line`; lines are counted from `start`, the first byte of a range, and those before it when it is
    printed."""

    path: str
    number: int
    start: int = 0

    def __str__(self) -> str:
        number, remaining = self.number, self.start
        if remaining:
            with file_errors(self.path), open_file(self.path) as file:
                while remaining and (block := file.read(min(remaining, _BLOCK_SIZE))):
                    number += block.count(b"\n")
                    remaining -= len(block)
        return f"{self.path}:{number}"


class TextColumns(NamedTuple):
    """Columns of a record: the document's text, and the list of its phrases or its control code, or None; all may be
    null."""

    text: str = "text"
    units: str | None = None
    control: str | None = None


def document_suffix(path: str | Path) -> str:
    """`file_suffix`, or ".txt" for a file with the code of a language, such as `news.en`, and for a compressed file
    without the suffix of a known format."""
    suffix = file_suffix(path)
    is_text = suffix not in DATA_SUFFIXES if compression_suffix(path) else suffix.removeprefix(".") in _LANGUAGES
    return ".txt" if is_text else suffix


def guess_separator(files: Sequence[DataFile], is_directory: bool = False) -> Separator:
    """Guess what ends a document in text files.

    If a directory has several files, or a pattern matches at least ten, and their median size is at most `_SMALL_FILE`,
    each file is a document. Otherwise the first MiB of the first file decides: if it has at least 20 lines of text and
    no blank line between them, each line is a document; else a blank line ends a document.
    """
    sizes = sorted(file.size or 0 for file in files)
    if len(files) >= (2 if is_directory else 10) and sizes[len(sizes) // 2] <= _SMALL_FILE:
        return "file"
    num_lines = num_blank = size = 0
    for line in read_lines(files[0].path):
        if not line.strip():
            num_blank += 1
        elif num_lines and num_blank:
            return "blank"
        else:
            num_lines, num_blank = num_lines + 1, 0
        size += len(line)
        if size > _SAMPLE_SIZE:
            break
    return "line" if num_lines >= 20 else "blank"


def find_boundary(file: BinaryIO, position: int, separator: Separator) -> int:
    """The first byte of the first document that begins at or after a position: of a line, or of the text after a blank
    line; the size of the file if there is none."""
    if position == 0:
        return 0
    file.seek(position - 1)
    position += len(file.readline()) - 1
    if separator == "line":
        return position
    follows_blank_line = False
    for line in file:
        is_blank = not line.decode("utf-8", "replace").strip()
        if follows_blank_line and not is_blank:
            return position
        follows_blank_line |= is_blank
        position += len(line)
    return position


def read_lines(path: str | Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Lines of a UTF-8 file with their line feeds, decompressed if it ends in `.gz` or `.zst`, without a byte order
    mark; raises CtxError if the file is missing, damaged, an archive, or not UTF-8.

    Only line feeds end a line, or, in a file without any, carriage returns: `str.splitlines` also splits at U+2028 and
    others, which JSON allows within strings, and the lines of parallel texts may contain carriage returns.

    Args:
        start: First byte of the first line.
        stop: The lines begin before this byte; None for all.
    """
    path, offset, line = local_path(path), start, b""
    try:
        with file_errors(path), open_file(path) as file:
            if start:
                file.seek(start)
            for line in file:
                if stop is not None and offset >= stop:
                    return
                if offset == 0 and (archive := _archive_format(line)):
                    raise _archive_error(path, archive)
                # only the first line may begin with a byte order mark
                text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
                if text.count("\0") > max(1, len(line) // 4):  # UTF-16: every second byte of most texts
                    raise _utf16_error(path, line, offset)
                if offset == 0 and "\r" in text and not text.endswith("\n"):
                    yield from io.StringIO(text.replace("\r", "\n"))
                else:
                    yield text
                offset += len(line)
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "WINDOWS-1252"
        position = offset + error.start + len(line) - len(error.object)  # error.object lacks the byte order mark
        raise CtxError(
            f"Not UTF-8: byte {position} is 0x{error.object[error.start]:02x}.",
            location=f"{path}, byte {position}{' after decompression' if compression_suffix(path) else ''}",
            hint=f"convert the file, for example: iconv -f {encoding} -t UTF-8 OLD > NEW.",
        ) from error


def _archive_format(line: bytes) -> str | None:
    """The format of a file that begins with this line, if it is an archive or compressed."""
    if line[257:262] == b"ustar":
        return "tar"
    return next((name for start, name in _ARCHIVES.items() if line.startswith(start)), None)


def _archive_error(path: str, archive: str) -> CtxError:
    """The error for a file in the format of an archive."""
    is_decompressed = compression_suffix(path)
    hint = "extract the file."
    if archive in ("gzip", "Zstandard") and not is_decompressed:
        hint = f"rename the file to end in {'.gz' if archive == 'gzip' else '.zst'}."
    location = f"{path}{' after decompression' if is_decompressed else ''}"
    return CtxError(f"The content is {archive} data, not text.", location=location, hint=hint)


def _utf16_error(path: str, line: bytes, offset: int) -> CtxError:
    """The error for a line in UTF-16 at an offset."""
    position = offset + line.index(0)
    encoding = "UTF-16LE" if position % 2 else "UTF-16BE"
    return CtxError(
        f"Not UTF-8, probably {encoding} without a byte order mark: byte {position} is a NUL character.",
        location=f"{path}, byte {position}{' after decompression' if compression_suffix(path) else ''}",
        hint=f"convert the file, for example: iconv -f {encoding} -t UTF-8 OLD > NEW.",
    )


def read_text(file: str | Path) -> str:
    """The whole text of a file; raises CtxError as `read_lines`, or if it is empty."""
    text = "".join(read_lines(file))
    if not text.strip():
        raise CtxError("The file is empty.", location=str(file), hint="use a file with at least one example.")
    return text


def read_json_lines(
    file: str | Path, start: int = 0, stop: int | None = None
) -> Iterator[tuple[dict[str, Any], LineLocation]]:
    """The objects of a file with one JSON object per line, and their locations (`file:line`); raises CtxError as
    `read_lines`, or if a line is not a JSON object."""
    path = local_path(file)
    for number, line in enumerate(read_lines(path, start, stop), start=1):
        if not line.strip():
            continue
        location = LineLocation(path, number, start)
        row = parse_json(line, location=location, hint="write one JSON object per line.")
        if not isinstance(row, dict):
            raise CtxError(
                f"Expected a JSON object, got {type(row).__name__}.",
                location=location,
                hint='write {"column": value, ...}.',
            )
        yield row, location


def align_range(selection: FileRange, separator: Separator) -> FileRange:
    """A range of bytes whose ends are boundaries of documents, see `find_boundary`."""
    if selection.start == 0 and selection.stop is None:
        return selection
    with file_errors(selection.path), open_file(selection.path) as file:
        stop = None if selection.stop is None else find_boundary(file, selection.stop, separator)
        return FileRange(selection.path, find_boundary(file, selection.start, separator), stop)


def read_file(selection: FileRange, columns: TextColumns, separator: Separator = "blank") -> Iterator[list[str]]:
    """Documents of a file with one of the `FILE_SUFFIXES`, plain or compressed, or of a range of a file; raises
    CtxError if it is missing or damaged, not UTF-8, or has no such columns.

    In text files each line is a paragraph, and `separator` ends a document; in `.jsonl` each line, and in `.parquet`
    each row, is a document.
    """
    suffix = document_suffix(selection.path)
    if suffix == ".txt":
        for option, name in (("units_column", columns.units), ("control_column", columns.control)):
            if name is not None:
                raise CtxError(
                    f"A text file has no column {name!r}.",
                    location=selection.path,
                    hint=f"use a .jsonl or .parquet file, or omit {option}.",
                )
        return _text_documents(selection, separator)
    if suffix == ".jsonl":
        return _json_documents(selection, columns)
    return _parquet_documents(selection, columns)


def read_translated(path: str, translation: str, tag: str = "") -> Iterator[list[str]]:
    """The lines of two files as translations, which begin with a tag, without pairs with a blank side; raises CtxError
    as `read_lines`, or if one file has more lines than the other."""
    for number, (line, translated) in enumerate(zip_longest(read_lines(path), read_lines(translation)), start=1):
        if line is None or translated is None:
            short, long = (path, translation) if line is None else (translation, path)
            raise CtxError(
                f"The file has {number - 1} lines, but {long} has more.",
                location=short,
                hint="use files whose lines are translations of each other.",
            )
        if line.strip() and translated.strip():
            yield TranslatedText([line.strip(), f"{tag}{translated.strip()}"])


def split_paragraphs(text: str | None) -> list[str]:
    """The non-blank lines of a text."""
    return [line for line in (text or "").splitlines() if line.strip()]


def _text_documents(selection: FileRange, separator: Separator) -> Iterator[list[str]]:
    if separator == "file":
        yield [line.rstrip("\r\n") for line in read_lines(selection.path) if line.strip()]
        return
    lines_of_range = read_lines(*align_range(selection, separator))
    for has_text, lines in groupby(lines_of_range, key=lambda line: bool(line.strip())):
        paragraphs = (line.rstrip("\r\n") for line in lines)
        if has_text and separator == "blank":
            yield list(paragraphs)
        elif has_text:
            yield from ([paragraph] for paragraph in paragraphs)


def _json_documents(selection: FileRange, columns: TextColumns) -> Iterator[list[str]]:
    for row, location in read_json_lines(*align_range(selection, "line")):
        yield record_to_document(row, columns, location)


def record_to_document(row: dict[str, Any], columns: TextColumns, location: object) -> list[str]:
    """The paragraphs of a record, with its units or control code; raises CtxError if a column is missing, or of another
    type."""
    paragraphs = split_paragraphs(_string(row, columns.text, "text_column", "text", location))
    if columns.control is not None:
        code = (_string(row, columns.control, "control_column", "a control code", location) or "").strip()
        return TextWithCode(paragraphs, code) if code else paragraphs
    if columns.units is None:
        return paragraphs
    units = _column(row, columns.units, "units_column", location) or []
    if not isinstance(units, list) or not all(isinstance(unit, str) for unit in units):
        raise CtxError(
            f"Column {columns.units!r} does not contain a list of phrases.",
            location=location,
            hint='write it as ["New York", "of the same"], with the spelling of the text.',
        )
    return TextWithUnits(paragraphs, units)


def _string(row: dict[str, Any], name: str, option: str, content: str, location: object) -> str | None:
    value = _column(row, name, option, location)
    if value is not None and not isinstance(value, str):
        raise CtxError(
            f"Column {name!r} contains a {type(value).__name__}, not {content}.",
            location=location,
            hint=f"set {option} to a column of strings.",
        )
    return value


def _column(row: dict[str, Any], name: str, option: str, location: object) -> Any:
    if name not in row:
        raise CtxError(
            f"No column {name!r}; the columns are {', '.join(map(repr, row))}.",
            location=location,
            hint=f"set {option} to a column of the data.",
        )
    return row[name]


def _parquet_documents(selection: FileRange, columns: TextColumns) -> Iterator[list[str]]:
    path = selection.path
    with parquet_errors(path):
        file = open_parquet(path)
        column_names = file.schema_arrow.names
        selected = [name for name in columns if name is not None]
        if not set(selected) <= set(column_names):
            record_to_document(dict.fromkeys(column_names), columns, path)  # raises
        stop = file.num_row_groups if selection.stop is None else selection.stop
        number = sum(file.metadata.row_group(index).num_rows for index in range(selection.start))
        groups = range(selection.start, stop)
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=selected):
            for row in batch.to_pylist():
                yield record_to_document(row, columns, f"{path}, row {number}")
                number += 1


def open_parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    """Open a Parquet file, plain or compressed; raises CtxError if it is missing or damaged, or has two columns with
    the same name, of which `datasets` and dictionaries of rows keep the last one."""
    import pyarrow.parquet

    path = local_path(path)
    with file_errors(path):
        source: Any = path
        if compression_suffix(path):  # Parquet is read from its end, so the file is decompressed first
            with open_file(path) as compressed:
                source = io.BytesIO(compressed.read())
        elif is_url(path):
            source = open_file(path)
        elif not Path(path).is_file():
            raise missing_file_error(path)
        with parquet_errors(path):
            file = pyarrow.parquet.ParquetFile(source)
    for name, count in Counter(file.schema_arrow.names).items():
        if count > 1:
            hint = "rename them, or remove all but one."
            raise CtxError(f"{count} columns are named {name!r}.", location=path, hint=hint)
    return file


@contextmanager
def parquet_errors(path: str) -> Iterator[None]:
    """Convert errors of reading a Parquet file to CtxError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise CtxError(
            f"The Parquet file is damaged: {error}.", location=path, hint="download or write it again."
        ) from error
