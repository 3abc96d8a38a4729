r"""Convert a file of word vectors to a model, or a model to a file.

hf-ctxmodels convert word-vectors --input_format word2vec-binary --input FILE.bin --family word2vec \
    --output runs/vectors
hf-ctxmodels convert word-vectors --output_format glove --input runs/vectors --output vectors.txt

Text: lines of a word and its numbers; in word2vec, the first line has the number of words and dimensions. Binary: the
same first line, followed by each word, a space, and its numbers as little-endian float32. Files ending in `.gz` or
`.zst` are compressed.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from transformers import AutoModel

from hf_ctxmodels.conversion.released_files import Conversion
from hf_ctxmodels.conversion.word_vectors import WordVectors, gensim_models
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.output_files import check_output_file, replacing, replacing_files, write_compressed
from hf_ctxmodels.core.paths import local_path
from hf_ctxmodels.data.files import compression_suffix, file_errors, file_info, open_file
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer

_FASTTEXT_MAGIC = (793712314).to_bytes(4, "little")
_MAX_WORD_LENGTH = 10_000  # bytes
_MAX_COUNT_DIGITS, _MAX_DIMENSIONS = 15, 100_000


def read_word2vec_text(path: str | Path) -> WordVectors:
    """Read word2vec's text format; raises CtxError for damaged files and other formats."""
    lines = read_lines(path)
    count, width = _parse_header(next(lines, ""), path)
    words, matrix = _parse_lines(lines, path, width, first_line=2)
    if len(words) != count:
        raise CtxError(
            f"The first line specifies {count} words, but there are {len(words)}.",
            location=str(path),
            hint="copy the file again from its source, or correct the first line.",
        )
    return _deduplicate(words, matrix, path)


def read_glove(path: str | Path) -> WordVectors:
    """Read GloVe's text format, where words may contain spaces; raises CtxError for damaged files and other formats."""
    first = next(read_lines(path), "")
    width = len(first.rstrip().split(" ")) - 1  # other white space, such as U+00A0, belongs to a word
    if width < 2:
        raise CtxError(
            f"The first line is not a word and its vector: {first.strip()[:80]!r}.",
            location=f"{path}, line 1",
            hint="use the format word2vec-text if the first line is two numbers.",
        )
    return _deduplicate(*_parse_lines(read_lines(path), path, width, first_line=1), path)


def read_word2vec_binary(path: str | Path) -> WordVectors:
    """Read word2vec's binary format; raises CtxError for damaged files and other formats."""
    path = local_path(path)
    words: list[str] = []
    rows: list[np.ndarray] = []
    with file_errors(path), open_file(path) as file:
        header = file.readline(1000)
        if header.startswith(_FASTTEXT_MAGIC):
            raise CtxError(
                "The file is a model of fastText, not a file of word vectors.",
                location=str(path),
                hint="use its .vec file, with the format word2vec-text.",
            )
        hint = "use the format word2vec-text or glove for a text file."
        count, width = _parse_header(header.decode("utf-8", "replace"), path, hint)
        info = None if compression_suffix(path) else file_info(path)
        if info is not None and info.size is not None and count * (4 * width + 2) > info.size:
            raise _truncated_error(path, 0, count)
        while len(words) < count:
            words.append(_read_word(file, path, len(words)))
            numbers = file.read(4 * width)
            if len(numbers) < 4 * width:
                raise _truncated_error(path, len(words) - 1, count)
            rows.append(np.frombuffer(numbers, dtype="<f4"))
        if file.read(2).strip():
            raise CtxError(
                f"The first line specifies {count} words, but the file continues after them.",
                location=str(path),
                hint="copy the file again from its source, or correct the first line.",
            )
    matrix = np.stack(rows).astype(np.float32, copy=False)
    _check_finite(words, matrix, path)
    return _deduplicate(words, matrix, path)


def write(vectors: WordVectors, path: str | Path, *, header: bool, binary: bool = False) -> None:
    """Write a text file with exact numbers, or a binary file of little-endian float32, with or without a first line of
    the numbers of words and dimensions; raises CtxError if a word is empty or has white space."""
    for word in vectors.words:
        if not word or any(character.isspace() for character in word):
            raise CtxError(
                f"The word {word!r} is empty or has white space, which these formats cannot represent.",
                hint="rename it (for example, join phrases with _) or remove it.",
            )
    with replacing(path) as temporary, write_compressed(temporary, compression_suffix(path)) as file:
        if header:
            file.write(f"{len(vectors.words)} {vectors.matrix.shape[1]}\n".encode())
        for word, row in zip(vectors.words, vectors.matrix.astype("<f4")):
            text = "" if binary else " ".join(np.format_float_positional(value, trim="-") for value in row)
            file.write(word.encode() + b" " + (row.tobytes() if binary else text.encode()) + b"\n")


def write_gensim(vectors: WordVectors, path: str | Path) -> None:
    """Write a file of gensim atomically, after its large arrays, which are files with longer names."""
    path = Path(path)
    with replacing_files(path.parent, main_file=path.name) as folder:
        vectors.to_gensim().save(str(folder / path.name))


READERS: dict[str, Callable[[str | Path], WordVectors]] = {
    "word2vec-text": read_word2vec_text,
    "word2vec-binary": read_word2vec_binary,
    "glove": read_glove,
}
WRITERS: dict[str, Callable[[WordVectors, str | Path], None]] = {
    "word2vec-text": partial(write, header=True),
    "word2vec-binary": partial(write, header=True, binary=True),
    "glove": partial(write, header=False),
}


def _parse_header(
    line: str, path: str | Path, hint: str = "use the format glove if the file has no such line."
) -> tuple[int, int]:
    """Number of words and of dimensions."""
    numbers = line.split()
    valid = [
        number
        for number in numbers
        if number.isascii() and number.isdigit() and len(number) <= _MAX_COUNT_DIGITS and int(number)
    ]
    if len(numbers) != 2 or len(valid) != 2 or int(valid[1]) > _MAX_DIMENSIONS:
        raise CtxError(
            "The first line is not the number of words and of dimensions, "
            f"at most {_MAX_DIMENSIONS:,}: {line.strip()[:80]!r}.",
            location=f"{path}, line 1",
            hint=hint,
        )
    return int(numbers[0]), int(numbers[1])


def _parse_lines(lines: Iterator[str], path: str | Path, width: int, first_line: int) -> tuple[list[str], np.ndarray]:
    words: list[str] = []
    rows: list[np.ndarray] = []
    for number, line in enumerate(lines, start=first_line):
        word, *numbers = line.rstrip().rsplit(" ", width)
        if len(numbers) != width or not word:
            raise CtxError(
                f"Expected a word and {width} numbers, got {line.strip()[:80]!r}.",
                location=f"{path}, line {number}",
                hint="download the file again, and check its format.",
            )
        try:
            rows.append(np.array(numbers, dtype=np.float32))
        except ValueError as error:
            raise CtxError(
                f"Not a number in the vector of {word!r}: {error}.",
                location=f"{path}, line {number}",
                hint="download the file again.",
            ) from error
        words.append(word)
    matrix = np.stack(rows) if rows else np.empty((0, width), dtype=np.float32)
    _check_finite(words, matrix, path)
    return words, matrix


def _read_word(file: BinaryIO, path: str | Path, number: int) -> str:
    word = bytearray()
    while (byte := file.read(1)) != b" ":
        if not byte or len(word) > _MAX_WORD_LENGTH:
            raise _truncated_error(path, number, None)
        if byte != b"\n" or word:  # some files have a line feed after each vector
            word += byte
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CtxError(
            f"Word {number} (from 0) is not UTF-8: {bytes(word[:40])!r}.", location=str(path), hint="download it again."
        ) from error


def _truncated_error(path: str | Path, number: int, count: int | None) -> CtxError:
    total = "" if count is None else f" of {count}"
    return CtxError(
        f"The file ends or is damaged at word {number}{total} (counted from 0).",
        location=str(path),
        hint="download it again, and check that it is in the binary format.",
    )


def _check_finite(words: list[str], matrix: np.ndarray, path: str | Path) -> None:
    invalid = np.flatnonzero(~np.isfinite(matrix).all(1))
    if len(invalid):
        raise CtxError(
            f"The vector of {words[invalid[0]]!r} has NaN or infinity ({len(invalid)} such words).",
            location=str(path),
            hint="download the file again, and check its format.",
        )


def _deduplicate(words: list[str], matrix: np.ndarray, path: str | Path) -> WordVectors:
    """Remove repeated words, which some published files have."""
    if not words:
        raise CtxError("The file has no words.", location=str(path), hint="check the path.")
    first_rows = {word: row for row, word in reversed(list(enumerate(words)))}
    if len(first_rows) < len(words):
        warnings.warn(f"{path}: {len(words) - len(first_rows)} repeated words are ignored.", stacklevel=3)
        rows = sorted(first_rows.values())
        words, matrix = [words[row] for row in rows], matrix[rows]
    return WordVectors(words, matrix)


GENSIM = "gensim"


@dataclass(kw_only=True)
class WordVectorConversion(Conversion):
    """Arguments of the conversion."""

    input: str = flag(REQUIRED, "File of word vectors; with --output_format, a model's directory or Hub id.")
    output: str = flag(REQUIRED, "Directory for the model; with --output_format, a file.")
    input_format: str | None = flag(None, "Convert a file of this format to a model.", choices=[*READERS, GENSIM])
    output_format: str | None = flag(None, "Convert a model to a file of this format.", choices=[*WRITERS, GENSIM])
    family: str | None = flag(None, "Family of the model, with --input_format.", conflicts=("output_format",))
    lower_case: bool = flag(
        False, "Lower-case text before words are looked up, with --input_format.", conflicts=("output_format",)
    )
    allow_pickle: bool = flag(
        False,
        "Load a gensim file; pickles can execute code, so it must come from a trusted source.",
        conflicts=("output_format",),
    )

    def run(self) -> None:
        """Convert, and print a summary."""
        if (self.input_format is None) == (self.output_format is None):
            raise CtxError("The format is missing or ambiguous.", hint="pass either --input_format or --output_format.")
        if self.input_format is not None:
            if self.family is None:
                raise CtxError("The family of the model is missing.", location="--family", hint="pass --family.")
            self.check_output()
            if self.input_format != GENSIM:
                vectors = READERS[self.input_format](self.input)
            elif self.allow_pickle:
                models = gensim_models()
                hint = "use a file saved by gensim, with its .npy files, or another --input_format."
                with wrap_errors("The file cannot be read as word vectors of gensim", location=self.input, hint=hint):
                    loaded = models.KeyedVectors.load(self.input)
                    vectors = WordVectors.from_gensim(getattr(loaded, "wv", loaded))
            else:
                raise CtxError(
                    "A file saved by gensim is a pickle, which can execute code.",
                    location=self.input,
                    hint="pass --allow_pickle if you trust its source, or save it with gensim's save_word2vec_format.",
                )
            vectors.lower_case = self.lower_case
            self.save(*vectors.to_model(self.family))
        else:
            check_output_file(self.output, flag="--output", overwrite=self.overwrite)
            model = load_model(self.input, AutoModel.__name__, load_config(self.input))
            vectors = WordVectors.from_model(model, load_tokenizer(self.input))
            if self.output_format == GENSIM:
                write_gensim(vectors, self.output)
            elif self.output_format is not None:
                WRITERS[self.output_format](vectors, self.output)
        shape = f"{len(vectors.words)} words of {vectors.matrix.shape[1]} dimensions"
        print(f"{shape}: {self.input} -> {self.output}")
