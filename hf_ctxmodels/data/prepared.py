"""Prepared examples: files of the Arrow IPC stream format, which all processes map into memory, and their index.

A directory of prepared examples:

| file | content |
|---|---|
| `prepared.json` | what the examples were made from, and a record of each part; written when all parts are complete |
| `train/part-00000.arrow`, `validation/part-00000.arrow` | examples of a part of the text, in a single record batch |
| `parts/part-00000.json` | the record of a complete part: number of examples, sizes and digests of its files |
| `tokenizer/` | the tokenizer |

`datasets.load_from_disk` opens the directory as well. A row is read from views of the mapped arrays instead of through
`datasets`, which reads a few million tokens a second.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import matches_type, read_json
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.examples import Column, ExampleSet
from hf_ctxmodels.data.files import DATA_SUFFIXES, compression_suffix, file_info, file_suffix, is_pattern
from hf_ctxmodels.data.folders import LocalFolder

FORMAT = 1
_HINT = "run `hf-ctxmodels data prepare` with the same flags again, which prepares missing parts."
INDEX_FILE, IDENTITY_FILE = "prepared.json", "parts/identity.json"
TOKENIZER_FOLDER = "tokenizer"
TRAIN, VALIDATION = SPLITS = ("train", "validation")
_MAPPED_FILES = 4096  # a process may map 65,530 files on Linux by default
_SMALL_VOCABULARY = 1 << 16
_LARGER_COLUMNS = ("word_ids",)  # other columns named `..._ids` contain token ids


@dataclass(frozen=True)
class PreparedFile:
    """Number of examples, size in bytes and SHA-256 of a file."""

    examples: int
    size: int
    sha256: str

    def describe_damage(self, actual_size: int | None) -> str | None:
        """Why a file of this size is incomplete; None if it is complete."""
        if actual_size == self.size:
            return None
        return "is missing" if actual_size is None else f"has {actual_size:,} bytes instead of {self.size:,}"


@dataclass(frozen=True)
class PartRecord:
    """A complete part of the text.

    Attributes:
        identity: Digest of what the examples were made from, and of the number of the part.
        source: Number of the dataset, with sampling by dataset; else 0.
        files: Split -> file, without splits that have no example.
        columns: Column -> Arrow type.
        statistics: Split -> counts of the objective.
    """

    identity: str
    source: int
    files: dict[str, PreparedFile]
    columns: dict[str, str]
    statistics: dict[str, dict[str, int]]

    def named_files(self, number: int) -> list[tuple[str, PreparedFile]]:
        """The name and the record of each file of this part."""
        return [(part_name(split, number), file) for split, file in self.files.items()]

    @classmethod
    def parse(cls, value: Any, location: str) -> Self:
        """The record from parsed JSON; raises CtxError if it is damaged."""
        try:
            files = {split: PreparedFile(**fields) for split, fields in value.pop("files").items()}
            return cls(files=files, **value)
        except (AttributeError, KeyError, TypeError) as error:
            raise CtxError(f"The record of a part is damaged: {error}.", location=location, hint=_HINT) from error


@dataclass(frozen=True)
class PreparedCorpus:
    """A complete directory of prepared examples.

    Attributes:
        identity: What the examples were made from, as JSON values.
        parts: Record of each part.
        family: Model family for which they were prepared.
    """

    directory: Path
    identity: Mapping[str, Any]
    parts: Sequence[PartRecord]
    family: str | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Open a directory; raises CtxError if it is not complete, or a file is missing or has another size."""
        corpus = cls.read_index(Path(directory))
        corpus.check_files()
        return corpus

    @classmethod
    def read_index(cls, directory: Path) -> Self:
        """Open a directory without checking its files; raises CtxError if it has no index."""
        file = directory / INDEX_FILE
        if not file.is_file():
            raise incomplete_error(str(directory))
        index = read_json(file)
        if not matches_type(index, dict[str, Any]) or not {"format", "identity", "parts"} <= index.keys():
            raise CtxError("The index is damaged.", location=str(file), hint=_HINT)
        if index["format"] != FORMAT:
            raise CtxError(
                f"The examples have format {index['format']}; this version reads format {FORMAT}.",
                location=str(file),
                hint="prepare them again in another directory.",
            )
        records = [PartRecord.parse(record, str(file)) for record in index["parts"]]
        return cls(directory, index["identity"], records, index.get("family"))

    @property
    def digest(self) -> str:
        """Identifies the examples."""
        return identity_digest(self.identity)

    @property
    def files(self) -> dict[str, PreparedFile]:
        """File, relative to the directory -> its record."""
        return {name: file for number, record in enumerate(self.parts) for name, file in record.named_files(number)}

    def damaged_files(self) -> dict[str, str]:
        """File -> "is missing" or another description of the damage."""
        sizes = LocalFolder(self.directory).sizes()
        damages = {name: file.describe_damage(sizes.get(name)) for name, file in self.files.items()}
        return {name: damage for name, damage in damages.items() if damage is not None}

    def check_files(self) -> None:
        """Raise CtxError if a file is missing or has another size."""
        if damaged := self.damaged_files():
            raise damaged_files_error(damaged, str(self.directory), _HINT)

    def examples(self, split: str) -> list[ExampleSet]:
        """The examples of a split: a set for each source that has any."""
        sets = []
        for source in sorted({record.source for record in self.parts}):
            selected = [
                (number, record)
                for number, record in enumerate(self.parts)
                if record.source == source and split in record.files
            ]
            statistics = Counter[str]()
            for _, record in selected:
                statistics.update(record.statistics[split])
            files = [self.directory / part_name(split, number) for number, _ in selected]
            blocks = [ArrowBlock(str(file), file.stat().st_mtime_ns) for file in files]
            if blocks:
                sets.append(ExampleSet(blocks, [record.files[split].examples for _, record in selected], statistics))
        return sets


def is_prepared(source: str) -> bool:
    """Whether a dataset is a directory of prepared examples, or its URL, complete or not. Raises CtxError if a URL
    cannot be opened."""
    path = local_path(source)
    if not is_url(path):
        return any((Path(path) / name).is_file() for name in (INDEX_FILE, IDENTITY_FILE))
    is_file = compression_suffix(path) or file_suffix(path.partition("=")[0]) in DATA_SUFFIXES
    if is_file or is_pattern(path) or path.startswith(("http://", "https://")):
        return False
    return any(file_info(f"{path.rstrip('/')}/{name}") is not None for name in (INDEX_FILE, IDENTITY_FILE))


def identity_digest(identity: Mapping[str, Any]) -> str:
    """Digest of JSON values."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def part_name(split: str, number: int) -> str:
    """The file of a part's examples, relative to the directory."""
    return f"{split}/part-{number:05d}.arrow"


def record_name(number: int) -> str:
    """The file of a part's record, relative to the directory."""
    return f"parts/part-{number:05d}.json"


def damaged_files_error(damaged: Mapping[str, str], location: str, hint: str) -> CtxError:
    """The error for damaged files."""
    lines = [f"{name} {damage}" for name, damage in damaged.items()]
    return CtxError(f"{'; '.join(lines[:3])}.", location=location, hint=hint)


def incomplete_error(location: str) -> CtxError:
    """The error for a directory without index."""
    return CtxError("The directory has no complete set of prepared examples.", location=location, hint=_HINT)


def write_examples(file: Path, columns: Mapping[str, Column], vocab_size: int) -> dict[str, str]:
    """Write columns as a record batch; token ids are unsigned 16-bit integers if the vocabulary allows. Returns the
    Arrow type of each column."""
    arrays = {}
    for name, column in columns.items():
        values = column.values
        if name.endswith("_ids") and name not in _LARGER_COLUMNS and values.dtype == np.int32:
            if len(values) and not 0 <= values.min() <= values.max() < vocab_size:
                raise ValueError(f"Column {name} has values outside [0, {vocab_size}).")
            values = values.astype(np.uint16) if vocab_size <= _SMALL_VOCABULARY else values
        array = pa.array(values)
        if column.offsets is not None:
            array = pa.LargeListArray.from_arrays(pa.array(column.offsets.astype(np.int64)), array)
        arrays[name] = array
    batch = pa.RecordBatch.from_pydict(arrays)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return {field.name: str(field.type) for field in batch.schema}


@dataclass(frozen=True)
class ArrowBlock:
    """Examples in a file, mapped into memory when they are read; a file that was replaced has another `mtime_ns`."""

    file: str
    mtime_ns: int

    @property
    def columns(self) -> dict[str, Column]:
        """Name -> values; raises CtxError if the file is damaged."""
        return _map_columns(self.file, self.mtime_ns)


@lru_cache(maxsize=_MAPPED_FILES)
def _map_columns(file: str, mtime_ns: int) -> dict[str, Column]:
    try:
        batch = pa.ipc.open_stream(pa.memory_map(file)).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise CtxError(f"The file of prepared examples is damaged: {error}.", location=file, hint=_HINT) from error
    columns = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        has_lists = pa.types.is_large_list(array.type)
        values = array.values if has_lists else array
        offsets = array.offsets.to_numpy(zero_copy_only=True) if has_lists else None
        columns[name] = Column(values.to_numpy(zero_copy_only=True), offsets)
    return columns


def write_index(corpus: PreparedCorpus, folder: LocalFolder) -> None:
    """Write the index as the last file, after the files with which `datasets.load_from_disk` opens the directory."""
    from datasets import DatasetInfo, Features

    directory = corpus.directory
    splits = [split for split in SPLITS if any(split in record.files for record in corpus.parts)]
    for split in splits:
        names = [part_name(split, number) for number, record in enumerate(corpus.parts) if split in record.files]
        folder.download(names[:1])
        schema = pa.ipc.open_stream(pa.memory_map(str(directory / names[0]))).schema
        DatasetInfo(features=Features.from_arrow_schema(schema)).write_to_directory(str(directory / split))
        state: dict[str, Any] = {
            "_data_files": [{"filename": Path(name).name} for name in names],
            "_fingerprint": identity_digest({**corpus.identity, "split": split})[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        write_json(directory / split / "state.json", state)
        folder.upload([f"{split}/dataset_info.json", f"{split}/state.json"])
    write_json(directory / "dataset_dict.json", {"splits": splits})
    records = [asdict(record) for record in corpus.parts]
    index = {"format": FORMAT, "family": corpus.family, "identity": dict(corpus.identity), "parts": records}
    write_json(directory / INDEX_FILE, index)
    folder.upload(["dataset_dict.json", INDEX_FILE])


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text_file(file, json.dumps(value, indent=1) + "\n")
