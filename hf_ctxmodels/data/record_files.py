"""Records with named columns: JSON lines, Parquet files, and datasets of the Hub or of directories."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_suffix, local_files
from hf_ctxmodels.data.hub_datasets import DatasetSource, is_dataset
from hf_ctxmodels.data.text_files import open_parquet, parquet_errors, read_json_lines

if TYPE_CHECKING:
    import datasets
    import pyarrow

RECORD_SUFFIXES = (".jsonl", ".parquet")
_BATCH_SIZE = 1024

Record = dict[str, Any]
"""Column -> value. A column of an object has another entry for each of its keys, such as `translation.de`, also if the
values are objects."""


def has_records(source: str | Path) -> bool:
    """Whether a source has named columns with values of any type, unlike text tables and CoNLL columns."""
    return file_suffix(source) in RECORD_SUFFIXES or is_dataset(str(source))


def read_records(
    source: str | Path, label_names: bool = True, columns: Sequence[str] = ()
) -> Iterator[tuple[Record, object]]:
    """The records of a `.parquet` file, of a dataset `NAME[:config=NAME,split=NAME]`, or of JSON lines in another file,
    and their locations (`file:line`, or the source and the number of the row, from 0).

    Args:
        label_names: Whether class numbers of `datasets.ClassLabel` are replaced by the names of the classes; -1, as in
            test sets without labels, remains.
        columns: Columns to read from Parquet files and datasets, which may have large ones such as images; all columns
            if it is empty, or a column is missing.

    Raises:
        CtxError: The source is missing or damaged.
    """
    if file_suffix(source) == ".parquet":
        records: Iterator[tuple[Record, object]] = _parquet_records(str(source), label_names, columns)
    elif is_dataset(str(source)):
        records = _dataset_records(DatasetSource.parse(str(source)), label_names, columns)
    else:
        records = read_json_lines(source)
    for record, location in records:
        yield _nested_columns(record) | record, location


def _nested_columns(record: Record, prefix: str = "") -> Record:
    """The values within objects, by the path of their keys."""
    nested = {}
    for column, value in record.items():
        if prefix:
            nested[prefix + column] = value
        if isinstance(value, dict):
            nested |= _nested_columns(value, f"{prefix}{column}.")
    return nested


def class_names(source: str | Path, column: str) -> list[str]:
    """The names of the classes of a column, in the order of their numbers, if a Parquet file or a dataset has them
    (`datasets.ClassLabel`); else empty. Raises CtxError if the source is missing or damaged."""
    import datasets

    if file_suffix(source) == ".parquet":
        with parquet_errors(str(source)):
            features = _parquet_features(open_parquet(str(source)).schema_arrow)
    elif is_dataset(str(source)):
        features = _open_dataset(DatasetSource.parse(str(source))).features or datasets.Features()
    else:
        return []
    return _class_names(features.get(column) or features.flatten().get(column))


def _dataset_records(
    source: DatasetSource, label_names: bool, columns: Sequence[str]
) -> Iterator[tuple[Record, object]]:
    tables = [file for file in local_files(source.name) if file_suffix(file) in (".csv", ".tsv")]
    if tables:  # `datasets` interprets quotes in .tsv files
        raise CtxError("The directory has tables in text files.", location=source.name, hint=f"pass {tables[0]}.")
    dataset = _open_dataset(source)
    features = dataset.features or {}
    if selected := _select_columns(features, columns):
        dataset = dataset.select_columns(selected)
    rename = _label_decoder(features) if label_names else dict
    batches = dataset.iter(_BATCH_SIZE)  # faster than rows
    rows = (dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True))
    for number, row in enumerate(rows):
        yield rename(row), f"{source}, row {number}"


def _open_dataset(source: DatasetSource) -> "datasets.Dataset | datasets.IterableDataset":
    """The rows of a dataset, which is loaded once as long as the files of a local directory do not change: `datasets`
    asks the Hub, or lists and hashes the files, each time that it loads a dataset."""
    files = [(os.path.abspath(file), os.stat(file)) for file in local_files(source.name)]
    return _load_once(source, tuple((file, status.st_size, status.st_mtime_ns) for file, status in files))


@lru_cache(maxsize=4)  # rows are in memory-mapped files
def _load_once(
    source: DatasetSource, files: tuple[tuple[str, int, int], ...]
) -> "datasets.Dataset | datasets.IterableDataset":
    return source.load()


def _select_columns(
    features: "Mapping[str, datasets.features.features.FeatureType]", columns: Sequence[str]
) -> list[str] | None:
    """The columns that contain all `columns`; None, which selects all, if a column is missing, or `columns` is
    empty."""
    import datasets

    paths = {*features, *datasets.Features(features).flatten()}
    if not columns or not paths.issuperset(columns):
        return None
    return [name for name in features if any(f"{column}.".startswith(f"{name}.") for column in columns)]


def _parquet_features(schema: "pyarrow.Schema") -> "datasets.Features":
    """The features of the columns, null for a type that `datasets` does not have, such as maps."""
    import datasets
    import pyarrow

    try:
        return datasets.Features.from_arrow_schema(schema)
    except (ValueError, NotImplementedError):
        features = datasets.Features()
    for field in schema:
        features[field.name] = datasets.Value("null")
        with suppress(ValueError, NotImplementedError):
            features |= datasets.Features.from_arrow_schema(pyarrow.schema([field]))
    return features


def _parquet_records(path: str, label_names: bool, columns: Sequence[str]) -> Iterator[tuple[Record, object]]:
    with parquet_errors(path):
        file = open_parquet(path)
        features = _parquet_features(file.schema_arrow)
        rename = _label_decoder(features) if label_names else dict
        batches = file.iter_batches(_BATCH_SIZE, columns=_select_columns(features, columns))
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield rename(row), f"{path}, row {number}"


def _label_decoder(features: "Mapping[str, datasets.features.features.FeatureType]") -> Callable[[Record], Record]:
    """A function that replaces the class numbers of a record by names."""

    def decode(record: Record) -> Record:
        return {column: _name_classes(value, features[column]) for column, value in record.items()}

    return decode


def _class_names(feature: Any) -> list[str]:
    """The names of the classes of a column of classes or lists of classes; else empty."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return getattr(feature, "names", None) or []


def _name_classes(value: Any, feature: Any) -> Any:
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _name_classes(item, feature.get(key)) for key, item in value.items()}
    names = _class_names(feature)
    if not names:
        return value
    if isinstance(value, list):
        return [_name_classes(item, feature.feature) for item in value]
    return names[value] if isinstance(value, int) and value >= 0 else value
