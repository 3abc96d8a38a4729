"""Embed the words of the sentences of a file in context.

    hf-ctxmodels embed words --model runs/elmo --layers mix --input sentences.txt --output vectors.safetensors
    hf-ctxmodels embed words --model runs/glove runs/bert --input news.parquet --text_column title --output titles.npz

A .txt file has one sentence per line, blank lines are skipped; each record of a .jsonl or .parquet file has one in a
column. The vectors of several models are concatenated. Memory does not depend on the number of sentences, and an
interrupted command continues when it is run again. The output is

- .safetensors: `vectors` (words, width), `starts` (sentences + 1), the index of each sentence's first word, and
  `words` as UTF-8 bytes, a line break after each word;
- .npz: the same arrays, `words` as strings;
- .parquet: a row for each word, with `sentence`, `word` and `vector`.
"""

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_ctxmodels.analysis.sentences import check_sentence_file
from hf_ctxmodels.architectures.word_alignment import Sentence, WordPooling, split_words
from hf_ctxmodels.architectures.word_encoder import create_tensors
from hf_ctxmodels.cli.embed_sentences import iterate_sentences
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, print_status, progress_bar
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import check_output_file, replacing, write_tensors, write_text_file
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.downstream.networks.features import LayerEncoder, Layers, encode_words, open_encoders

_PART_SENTENCES = 4096


@dataclass
class EmbeddingArguments:
    """Models, input and output."""

    model: list[str] = flag(REQUIRED, "Directories or Hub ids of models, with their tokenizers.")
    input: str = flag(REQUIRED, "File of sentences: .txt, .jsonl or .parquet.")
    output: str = flag(REQUIRED, "File for the vectors: .safetensors, .npz or .parquet.")
    overwrite: bool = flag(False, "Replace --output if it exists.")
    text_column: str = flag("text", "Column of the sentences in a .jsonl or .parquet file.")
    split_at_spaces: bool = flag(False, "Words are separated by spaces, as in tokenized corpora.")
    layers: str = flag(
        "last", "last, the number of a layer, mix (weights of a fine-tuned model, else the average) or all."
    )
    pooling: WordPooling = flag("mean", "Tokens that represent a word: the mean of all, the first or the last one.")
    vector_dtype: Literal["float32", "float16"] = flag("float32", "Data type of the vectors.")
    batch_tokens: int = flag(4096, "Tokens per batch, with padding.")

    def __post_init__(self) -> None:
        check_range(self, "batch_tokens", at_least=1)
        if Path(self.output).suffix not in _WRITERS:
            raise CtxError(
                "The format of the output is its suffix.",
                location=f"--output {self.output}",
                hint=f"use one of {', '.join(_WRITERS)}.",
            )
        check_sentence_file(self.input, f"--input {self.input}")
        if not re.fullmatch(r"last|mix|all|-?\d+", self.layers):
            raise CtxError(
                f"Invalid value {self.layers!r}.", location="--layers", hint="use last, mix, all or a number."
            )

    def sentences(self) -> Iterator[Sentence]:
        """The sentences of the input."""
        for text in iterate_sentences(self.input, self.text_column):
            yield text.split() if self.split_at_spaces else text


@dataclass
class EmbeddedPart:
    """Consecutive sentences of the input, as written to a file.

    Attributes:
        words: The words.
        lengths: (sentences,) number of words of each sentence.
        vectors: (words, width) or (words, layers, width).
    """

    words: list[str]
    lengths: Tensor
    vectors: Tensor

    @classmethod
    def load(cls, file: Path) -> "EmbeddedPart":
        """Read a file that `save` has written."""
        tensors = load_file(file)
        return cls(decode_lines(tensors["words"]), tensors["lengths"], tensors["vectors"])

    def save(self, file: Path) -> None:
        """Write a file atomically."""
        with replacing(file) as temporary:
            write_tensors(
                temporary, {"words": encode_lines(self.words), "lengths": self.lengths, "vectors": self.vectors}
            )


def encode_lines(words: list[str]) -> Tensor:
    """The words as UTF-8 bytes, a line break after each word."""
    text = "".join(f"{word}\n" for word in words)
    return torch.from_numpy(np.frombuffer(bytearray(text.encode()), dtype=np.uint8))


def decode_lines(characters: Tensor) -> list[str]:
    """The words in the bytes of `encode_lines`."""
    return characters.numpy().tobytes().decode().split("\n")[:-1]


def main() -> None:
    """Embed the sentences part by part, then write the output."""
    arguments, placement = parse_arguments(
        EmbeddingArguments, DeviceArguments, description=__doc__, essential=("model", "input", "output")
    )
    output = Path(arguments.output)
    check_output_file(output, flag="--output", overwrite=arguments.overwrite, inputs=(arguments.input,))
    layers: Layers = arguments.layers if arguments.layers in ("last", "mix", "all") else int(arguments.layers)
    options = {"pooling": arguments.pooling, "batch_tokens": arguments.batch_tokens, "device": placement.device}
    encoders = open_encoders(arguments.model, layers, **options)
    for encoder in encoders:
        placement.place_for_inference(encoder.encoder.model)
    folder = output.with_name(f".{output.name}.parts")
    files = embed_parts(arguments, placement.dtype, encoders, folder)
    layout = OutputLayout.of(files)
    with replacing(output) as temporary:
        _WRITERS[output.suffix](temporary, files, layout)
    shutil.rmtree(folder)
    print(f"{format_count(layout.shape[0], 'word')} with vectors of width {layout.shape[-1]} in {output}")


def embed_parts(
    arguments: EmbeddingArguments, dtype: str | None, encoders: list[LayerEncoder], folder: Path
) -> list[Path]:
    """Write the parts of the input to a folder, except those that an interrupted run with the same models and flags has
    written; returns their files. Raises CtxError for an input without words."""
    count, has_words, digest = 0, False, hashlib.sha256()
    for sentence in arguments.sentences():
        count, has_words = count + 1, has_words or bool(split_words(sentence))
        digest.update(json.dumps(sentence).encode())
    if not has_words:
        raise CtxError("The input has no words.", location=arguments.input, hint="use a file with sentences.")
    digest.update(json.dumps(run_identity(arguments, dtype, encoders)).encode())
    identity = digest.hexdigest()
    identity_file = folder / "identity"
    if folder.exists() and not (identity_file.exists() and identity_file.read_text() == identity):
        shutil.rmtree(folder)
    write_text_file(identity_file, identity)
    files = [folder / f"part-{number:06}.safetensors" for number in range(-(-count // _PART_SENTENCES))]
    missing = [number for number, file in enumerate(files) if not file.exists()]
    if len(missing) < len(files):
        print_status(f"{len(files) - len(missing)} of {len(files)} parts are complete")
    first = missing[0] if missing else len(files)
    sentences = islice(arguments.sentences(), first * _PART_SENTENCES, None)
    embedded = encode_words(encoders, sentences)
    progress = iter(
        progress_bar(embedded, "embedding", unit="sentences", total=max(0, count - first * _PART_SENTENCES))
    )
    vector_dtype = getattr(torch, arguments.vector_dtype)
    for file in files[first:]:
        part_sentences = list(islice(progress, _PART_SENTENCES))
        EmbeddedPart(
            [word for sentence in part_sentences for word in sentence.words],
            torch.tensor([len(sentence.words) for sentence in part_sentences]),
            torch.cat([sentence.vectors for sentence in part_sentences]).to(vector_dtype),
        ).save(file)
    next(progress, None)  # closes the progress bar
    return files


def run_identity(arguments: EmbeddingArguments, dtype: str | None, encoders: list[LayerEncoder]) -> list[Any]:
    """What determines the vectors of a run in addition to the sentences: flags, models and their layer mixes."""
    names = ("layers", "pooling", "vector_dtype")
    mixes = [None if encoder.mix is None else weights_digest(encoder.mix.state_dict()) for encoder in encoders]
    models = [encoder.encoder.digest() for encoder in encoders]
    return [dtype, [getattr(arguments, name) for name in names], models, mixes]


@dataclass
class OutputLayout:
    """Sizes of the arrays of the output.

    Attributes:
        shape: Shape of the vectors of all words.
        dtype: Data type of the vectors.
        starts: (sentences + 1,) index of each sentence's first word.
        num_bytes: Number of bytes of `encode_lines` of all words.
        longest_word: Number of characters of the longest word.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    starts: Tensor
    num_bytes: int
    longest_word: int

    @classmethod
    def of(cls, files: list[Path]) -> "OutputLayout":
        """Read the sizes of all parts."""
        lengths, num_bytes, longest_word = [torch.tensor([0])], 0, 1
        for part in map(EmbeddedPart.load, files):
            lengths.append(part.lengths)
            num_bytes += len(encode_lines(part.words))
            longest_word = max([longest_word, *map(len, part.words)])
        starts = torch.cat(lengths).cumsum(0)
        return cls((int(starts[-1]), *part.vectors.shape[1:]), part.vectors.dtype, starts, num_bytes, longest_word)


def write_safetensors(file: Path, part_files: list[Path], layout: OutputLayout) -> None:
    """Write `vectors`, `starts` and `words` as tensors."""
    vectors, starts, words = create_tensors(
        file,
        {
            "vectors": (layout.dtype, layout.shape),
            "starts": (torch.int64, tuple(layout.starts.shape)),
            "words": (torch.uint8, (layout.num_bytes,)),
        },
    )
    starts.copy_(layout.starts)
    row = byte = 0
    for part in map(EmbeddedPart.load, part_files):
        characters = encode_lines(part.words)
        vectors[row : row + len(part.words)] = part.vectors
        words[byte : byte + len(characters)] = characters
        row, byte = row + len(part.words), byte + len(characters)


def write_npz(file: Path, part_files: list[Path], layout: OutputLayout) -> None:
    """Write `vectors`, `starts` and `words` as uncompressed arrays, part by part."""
    dtype = np.dtype(f"<U{layout.longest_word}")
    with zipfile.ZipFile(file, "w") as archive:

        def write(name: str, dtype: np.dtype, shape: tuple[int, ...], arrays: Iterator[np.ndarray]) -> None:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_2_0(member, header)
                for array in arrays:
                    member.write(array.tobytes())

        first = EmbeddedPart.load(part_files[0]).vectors.numpy()
        write(
            "vectors",
            first.dtype,
            layout.shape,
            (EmbeddedPart.load(part_file).vectors.numpy() for part_file in part_files),
        )
        write("starts", np.dtype(np.int64), tuple(layout.starts.shape), iter([layout.starts.numpy()]))
        write(
            "words",
            dtype,
            layout.shape[:1],
            (np.array(EmbeddedPart.load(part_file).words, dtype) for part_file in part_files),
        )


def write_parquet(file: Path, part_files: list[Path], layout: OutputLayout) -> None:
    """Write a row for each word, and a row group for each part."""
    value_type = {torch.float32: pa.float32(), torch.float16: pa.float16()}[layout.dtype]
    vector_type: Any = value_type
    for size in reversed(layout.shape[1:]):
        vector_type = pa.list_(vector_type, size)
    schema = pa.schema([("sentence", pa.int64()), ("word", pa.string()), ("vector", vector_type)])
    with pq.ParquetWriter(file, schema) as writer:
        first = 0
        for part in map(EmbeddedPart.load, part_files):
            sentences = torch.arange(first, first + len(part.lengths)).repeat_interleave(part.lengths)
            vectors: Any = pa.array(part.vectors.numpy().reshape(-1), value_type)
            for size in reversed(layout.shape[1:]):
                vectors = pa.FixedSizeListArray.from_arrays(vectors, size)
            writer.write_table(
                pa.table([pa.array(sentences.numpy()), pa.array(part.words, pa.string()), vectors], schema)
            )
            first += len(part.lengths)


_WRITERS: dict[str, Callable[[Path, list[Path], OutputLayout], None]] = {
    ".safetensors": write_safetensors,
    ".npz": write_npz,
    ".parquet": write_parquet,
}
