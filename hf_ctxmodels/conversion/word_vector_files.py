"""Files of word vectors: the text and binary form of word2vec, and the text form of GloVe.

Text: lines of a word and its numbers; word2vec has a first line with the numbers of words and dimensions. Binary: that
line, then each word, a space, and its numbers as little-endian float32. Files ending in `.gz` are compressed.
"""

import gzip
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import check_file, read_lines

_LONGEST_WORD = 10_000  # bytes
_ROWS = 1 << 16  # read at a time
_LONGEST_COUNT, _WIDEST = 15, 100_000  # digits of a number of words; dimensions


def read_word2vec_text(path: str | Path) -> WordVectors:
    """Read the text format of word2vec; raises CtxError if the file is in another format or damaged."""
    lines = read_lines(Path(path))
    count, width = _header(next(lines, ""), path)
    words, matrix = _parse_lines(lines, path, width, first_line=2)
    if len(words) != count:
        raise CtxError(
            f"The first line gives {count} words, but there are {len(words)}.",
            location=str(path),
            hint="copy the file again from its source, or correct the first line.",
        )
    return _without_repetitions(words, matrix, path)


def read_glove(path: str | Path) -> WordVectors:
    """Read the text format of GloVe. Words may contain spaces; the width is that of the first line.

    Raises:
        CtxError: As `read_word2vec_text`; or the first line is that of word2vec.
    """
    first = next(read_lines(Path(path)), "")
    width = len(first.split()) - 1
    if width < 2:
        raise CtxError(
            f"The first line is not a word and its vector: {first.strip()[:80]!r}.",
            location=f"{path}, line 1",
            hint="a first line of two numbers is word2vec's: read it as word2vec-text.",
        )
    return _without_repetitions(*_parse_lines(read_lines(Path(path)), path, width, first_line=1), path)


def read_word2vec_binary(path: str | Path) -> WordVectors:
    """Read the binary format of word2vec; raises CtxError if the file is in another format or damaged."""
    check_file(Path(path))
    try:
        with _open(path, "rb") as file:
            count, width = _header(file.readline(1000).decode("utf-8", "replace"), path)
            words, matrix = _read_vectors(file, path, count, width)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CtxError(f"Not a whole gzip file: {error}.", location=str(path), hint="fetch it again.") from error
    _require_finite(words, matrix, path)
    return _without_repetitions(words, matrix, path)


def _read_vectors(file: IO[bytes], path: str | Path, count: int, width: int) -> tuple[list[str], np.ndarray]:
    """Memory is reserved for what is there, not for what the first line says."""
    if Path(path).suffix != ".gz" and count * (4 * width + 2) > Path(path).stat().st_size:
        raise _cut_short(path, 0, count)
    words: list[str] = []
    blocks: list[np.ndarray] = []
    while len(words) < count:
        block = np.empty((min(_ROWS, count - len(words)), width), dtype=np.float32)
        for row in block:
            words.append(_read_word(file, path, len(words)))
            numbers = file.read(4 * width)
            if len(numbers) < 4 * width:
                raise _cut_short(path, len(words) - 1, count)
            row[:] = np.frombuffer(numbers, dtype="<f4")
        blocks.append(block)
    return words, np.concatenate(blocks)


def write_word2vec_text(vectors: WordVectors, path: str | Path) -> None:
    """Write the text format of word2vec; the numbers are exact."""
    with _open(path, "wb") as file:
        file.write(f"{len(vectors.words)} {vectors.matrix.shape[1]}\n".encode())
        _write_lines(vectors, file)


def write_glove(vectors: WordVectors, path: str | Path) -> None:
    """Write the text format of GloVe; the numbers are exact."""
    with _open(path, "wb") as file:
        _write_lines(vectors, file)


def write_word2vec_binary(vectors: WordVectors, path: str | Path) -> None:
    """Write the binary format of word2vec."""
    _require_plain_words(vectors)
    with _open(path, "wb") as file:
        file.write(f"{len(vectors.words)} {vectors.matrix.shape[1]}\n".encode())
        for word, row in zip(vectors.words, vectors.matrix.astype("<f4")):
            file.write(word.encode() + b" " + row.tobytes() + b"\n")


READERS: dict[str, Callable[[str | Path], WordVectors]] = {
    "word2vec-text": read_word2vec_text,
    "word2vec-binary": read_word2vec_binary,
    "glove": read_glove,
}
WRITERS: dict[str, Callable[[WordVectors, str | Path], None]] = {
    "word2vec-text": write_word2vec_text,
    "word2vec-binary": write_word2vec_binary,
    "glove": write_glove,
}


def _open(path: str | Path, mode: str) -> IO[Any]:
    opened: Any = gzip.open if Path(path).suffix == ".gz" else open
    return opened(path, mode)


def _header(line: str, path: str | Path) -> tuple[int, int]:
    """Number of words and of dimensions."""
    parts = line.split()
    plain = [part for part in parts if part.isascii() and part.isdigit() and len(part) <= _LONGEST_COUNT and int(part)]
    if len(parts) != 2 or len(plain) != 2 or int(plain[1]) > _WIDEST:
        raise CtxError(
            f"The first line is not the number of words and of dimensions, at most {_WIDEST:,}: {line.strip()[:80]!r}.",
            location=f"{path}, line 1",
            hint="a file without such a line is GloVe's: read it as glove.",
        )
    return int(parts[0]), int(parts[1])


def _parse_lines(lines: Iterator[str], path: str | Path, width: int, first_line: int) -> tuple[list[str], np.ndarray]:
    words: list[str] = []
    rows: list[np.ndarray] = []
    for number, line in enumerate(lines, start=first_line):
        parts = line.rstrip().rsplit(" ", width)
        if len(parts) != width + 1 or not parts[0]:
            raise CtxError(
                f"Expected a word and {width} numbers, got {line.strip()[:80]!r}.",
                location=f"{path}, line {number}",
                hint="download the file again: it is damaged, truncated, or in another format.",
            )
        try:
            rows.append(np.array(parts[1:], dtype=np.float32))
        except ValueError as error:
            raise CtxError(
                f"Not a number among the {width} of {parts[0]!r}: {error}.",
                location=f"{path}, line {number}",
                hint="download the file again.",
            ) from error
        words.append(parts[0])
    matrix = np.stack(rows) if rows else np.empty((0, width), dtype=np.float32)
    _require_finite(words, matrix, path)
    return words, matrix


def _read_word(file: IO[bytes], path: str | Path, number: int) -> str:
    word = bytearray()
    while (byte := file.read(1)) != b" ":
        if not byte or len(word) > _LONGEST_WORD:
            raise _cut_short(path, number, None)
        if byte != b"\n" or word:  # in some files, a line feed follows each vector
            word += byte
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CtxError(
            f"Word {number} (counted from 0) is not UTF-8: {bytes(word[:40])!r}.",
            location=str(path),
            hint="download the file again; it is damaged, or its first line gives another width.",
        ) from error


def _cut_short(path: str | Path, number: int, count: int | None) -> CtxError:
    of = "" if count is None else f" of {count}"
    return CtxError(
        f"The file ends or is damaged at word {number}{of} (counted from 0).",
        location=str(path),
        hint="download it again, and check that it is in the binary format.",
    )


def _require_finite(words: list[str], matrix: np.ndarray, path: str | Path) -> None:
    bad = np.flatnonzero(~np.isfinite(matrix).all(1))
    if len(bad):
        raise CtxError(
            f"The vector of {words[bad[0]]!r} has NaN or infinity ({len(bad)} such words).",
            location=str(path),
            hint="download the file again, and check its format.",
        )


def _without_repetitions(words: list[str], matrix: np.ndarray, path: str | Path) -> WordVectors:
    """The words without repetitions, which some published files have."""
    if not words:
        raise CtxError("The file has no words.", location=str(path), hint="check the path.")
    first = {word: place for place, word in reversed(list(enumerate(words)))}
    if len(first) < len(words):
        warnings.warn(f"{path}: {len(words) - len(first)} repeated words left out.", stacklevel=3)
        kept = sorted(first.values())
        words, matrix = [words[place] for place in kept], matrix[kept]
    return WordVectors(words, matrix)


def _require_plain_words(vectors: WordVectors) -> None:
    for word in vectors.words:
        if not word or any(sign.isspace() for sign in word):
            raise CtxError(
                f"The word {word!r} is empty or has white space, which separates words from numbers in these formats.",
                hint="rename it (for example, join phrases by _), or remove it.",
            )


def _write_lines(vectors: WordVectors, file: IO[bytes]) -> None:
    _require_plain_words(vectors)
    for word, row in zip(vectors.words, vectors.matrix.astype(np.float32)):
        numbers = " ".join(np.format_float_positional(value, trim="-") for value in row)
        file.write(f"{word} {numbers}\n".encode())
