"""Local files -> lines, JSON objects and documents of running text, with errors that name the file and the line.

Files are read line by line or batch by batch. A document is a list of paragraphs, which may be empty. (The readers of
`datasets` report neither line numbers nor, for CSV, the file, and infer types across lines.)
"""

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import parse_json
from hf_ctxmodels.data.documents import TextWithUnits, TranslatedText

FILE_SUFFIXES = (".txt", ".jsonl", ".parquet")
_OTHER_FORMATS = (".csv", ".tsv", ".json", ".conll", ".conllu", ".xml", ".html", ".tar")
_SAMPLE_SIZE = 1 << 20  # characters of the first file that `guess_separator` reads
_SMALL_FILE = 1 << 16  # bytes

Separator = Literal["line", "blank", "file"]
"""End of a document in text files: the end of the line, a blank line, or the end of the file."""


class TextColumns(NamedTuple):
    """Columns of a record: the document's text, and the list of its phrases, or None; both may be null."""

    text: str = "text"
    units: str | None = None


def file_suffix(path: Path) -> str:
    """The suffix of a file without `.gz`, such as ".txt", ".jsonl" or ".parquet"."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def document_suffix(path: Path) -> str:
    """`file_suffix`, or ".txt" for a `.gz` file without the suffix of a known format, such as `news.en.gz`."""
    suffix = file_suffix(path)
    is_text = path.suffix == ".gz" and suffix not in (*FILE_SUFFIXES, *_OTHER_FORMATS)
    return ".txt" if is_text else suffix


def guess_separator(files: Sequence[Path], is_directory: bool = False) -> Separator:
    """Guess what ends a document in text files.

    If a directory has several files, or a pattern matches at least ten, and their median size is at most `_SMALL_FILE`,
    each file is a document. Otherwise the first file decides: if it has at least 20 lines of text and no blank line
    between them, each line is a document; else a blank line ends a document.
    """
    sizes = sorted(file.stat().st_size for file in files)
    if len(files) >= (2 if is_directory else 10) and sizes[len(sizes) // 2] <= _SMALL_FILE:
        return "file"
    num_lines = num_blank = size = 0
    for line in read_lines(files[0]):
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


def check_file(path: Path) -> None:
    """Raise CtxError unless the file exists."""
    if not path.is_file():
        raise CtxError("No such file.", location=str(path), hint="use the path of a data file, or `demo`.")


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file with their line feeds, decompressed if it ends in `.gz`, without a byte order mark; raises
    CtxError if the file is missing, damaged, or not UTF-8.

    Only line feeds end a line: `str.splitlines` also splits at U+2028 and others, which JSON allows within strings.
    """
    check_file(path)
    offset = 0
    is_compressed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if is_compressed else path.open("rb") as file:
            for line in file:
                # only the first line may begin with a byte order mark
                yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
                offset += len(line)
    except UnicodeDecodeError as error:
        position = offset + error.start + len(line) - len(error.object)  # error.object lacks the byte order mark
        raise CtxError(
            f"Not UTF-8: byte {position} is 0x{error.object[error.start]:02x}.",
            location=f"{path}, byte {position}{' after decompression' if is_compressed else ''}",
            hint="convert the file, for example: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW.",
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CtxError(
            f"The gzip file is damaged: {error}.", location=str(path), hint="download or compress it again."
        ) from error
    except OSError as error:
        raise CtxError(
            f"The file cannot be read: {error.strerror or error}.", location=str(path), hint="check its permissions."
        ) from error


def read_text(file: str | Path) -> str:
    """The whole text of a file; raises CtxError as `read_lines`, or if it is empty."""
    text = "".join(read_lines(Path(file)))
    if not text.strip():
        raise CtxError("The file is empty.", location=str(file), hint="use a file with at least one example.")
    return text


def read_json_lines(file: str | Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a file with one JSON object per line, and their locations (`file:line`); raises CtxError as
    `read_lines`, or if a line is not a JSON object."""
    for number, line in enumerate(read_lines(Path(file)), start=1):
        if not line.strip():
            continue
        location = f"{file}:{number}"
        row = parse_json(line, location=location, hint="write one JSON object per line.")
        if not isinstance(row, dict):
            raise CtxError(
                f"Expected a JSON object, got {type(row).__name__}.",
                location=location,
                hint='write {"column": value, ...}.',
            )
        yield row, location


def read_file(path: Path, columns: TextColumns, separator: Separator = "blank") -> Iterator[list[str]]:
    """Documents of a file with one of the `FILE_SUFFIXES`, plain or gzipped; raises CtxError if it is missing or
    damaged, not UTF-8, or has no such columns.

    In text files each line is a paragraph, and `separator` ends a document; in `.jsonl` each line, and in `.parquet`
    each row, is a document.
    """
    suffix = document_suffix(path)
    if suffix == ".txt":
        if columns.units is not None:
            raise CtxError(
                f"A text file has no column {columns.units!r}.",
                location=str(path),
                hint="use a .jsonl or .parquet file, or omit units_column.",
            )
        return _text_documents(path, separator)
    if suffix == ".jsonl":
        return (record_to_document(row, columns, location) for row, location in read_json_lines(path))
    return _parquet_documents(path, columns)


def read_translated(path: Path, translation: Path, tag: str = "") -> Iterator[list[str]]:
    """The lines of two files as translations, which begin with a tag, without pairs with a blank side; raises CtxError
    as `read_lines`, or if one file has more lines than the other."""
    for number, (line, translated) in enumerate(zip_longest(read_lines(path), read_lines(translation)), start=1):
        if line is None or translated is None:
            short, long = (path, translation) if line is None else (translation, path)
            raise CtxError(
                f"The file has {number - 1} lines, but {long} has more.",
                location=str(short),
                hint="use files whose lines are translations of each other.",
            )
        if line.strip() and translated.strip():
            yield TranslatedText([line.strip(), f"{tag}{translated.strip()}"])


def split_paragraphs(text: str | None) -> list[str]:
    """The non-blank lines of a text."""
    return [line for line in (text or "").splitlines() if not line.isspace()]


def _text_documents(path: Path, separator: Separator) -> Iterator[list[str]]:
    if separator == "file":
        yield [line.rstrip("\r\n") for line in read_lines(path) if line.strip()]
        return
    for has_text, lines in groupby(read_lines(path), key=lambda line: bool(line.strip())):
        paragraphs = (line.rstrip("\r\n") for line in lines)
        if has_text and separator == "blank":
            yield list(paragraphs)
        elif has_text:
            yield from ([paragraph] for paragraph in paragraphs)


def record_to_document(row: dict[str, Any], columns: TextColumns, location: str) -> list[str]:
    """The paragraphs of a record, with its units; raises CtxError if a column is missing, or of another type."""
    text = _column(row, columns.text, "text_column", location)
    if text is not None and not isinstance(text, str):
        raise CtxError(
            f"Column {columns.text!r} contains a {type(text).__name__}, not text.",
            location=location,
            hint="set text_column to a column of strings.",
        )
    if columns.units is None:
        return split_paragraphs(text)
    units = _column(row, columns.units, "units_column", location) or []
    if not isinstance(units, list) or not all(isinstance(unit, str) for unit in units):
        raise CtxError(
            f"Column {columns.units!r} does not contain a list of phrases.",
            location=location,
            hint='write it as ["New York", "of the same"], with the spelling of the text.',
        )
    return TextWithUnits(split_paragraphs(text), units)


def _column(row: dict[str, Any], name: str, option: str, location: str) -> Any:
    if name not in row:
        raise CtxError(
            f"No column {name!r}; the columns are {', '.join(map(repr, row))}.",
            location=location,
            hint=f"set {option} to a column of the data.",
        )
    return row[name]


def _parquet_documents(path: Path, columns: TextColumns) -> Iterator[list[str]]:
    import pyarrow
    import pyarrow.parquet

    check_file(path)
    try:
        # Parquet is read from its end, so gzip is decompressed first
        source = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path
        file = pyarrow.parquet.ParquetFile(source)
        column_names = file.schema_arrow.names
        selected = [name for name in columns if name is not None]
        if not set(selected) <= set(column_names):
            record_to_document(dict.fromkeys(column_names), columns, str(path))  # raises
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=selected):
            for row in batch.to_pylist():
                yield record_to_document(row, columns, f"{path}, row {number}")
                number += 1
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        raise CtxError(
            f"The Parquet file is damaged: {error}.", location=str(path), hint="download or write it again."
        ) from error
