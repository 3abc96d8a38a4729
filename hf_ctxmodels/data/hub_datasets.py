"""Datasets of the Hub, and directories that `datasets` loads, with a configuration and a split."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import join_choice
from hf_ctxmodels.core.loading import is_repo_id, read_json, require_existing_path
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.files import compression_suffix, file_name, file_suffix, split_dataset_options

if TYPE_CHECKING:
    import datasets


_SPLIT_FILE = "dataset_dict.json"  # which `DatasetDict.save_to_disk` writes, but not `Dataset.save_to_disk`


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the Hub, or a directory, as `NAME[:config=NAME,split=NAME]`.

    Attributes:
        name: Hub id, or path or URL of a directory.
        config: Name of a configuration, such as `mrpc` of `nyu-mll/glue`; None for the only or default one.
        split: Split, such as `validation`, or a part of one as in `datasets.load_dataset`, such as `train[:1000]`.
    """

    name: str
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, source: str) -> "DatasetSource":
        """The parts of `NAME[:config=NAME,split=NAME]`; the split is by default the one of `with_default_split`."""
        name, options = split_dataset_options(source)
        is_expanded = name.startswith(("~", "file://"))  # "./name" is a path, but "name" a Hub id
        return cls(local_path(name) if is_expanded else name, **{"split": _default_split(name, "train")} | options)

    def __str__(self) -> str:
        options = {"config": self.config} if self.config else {}
        return join_choice(self.name, options | {"split": self.split})

    def load(self, streaming: bool = False) -> "datasets.Dataset | datasets.IterableDataset":
        """The rows, of `datasets.load_dataset`, or of `datasets.load_from_disk` for a directory that `save_to_disk`
        wrote; raises CtxError if there is no such dataset, configuration or split."""
        import datasets

        require_existing_path(self.name, "dataset")
        directories = _saved_splits(Path(self.name))
        if directories and self.config is not None:
            raise CtxError(
                "A directory written by `save_to_disk` has no configurations.",
                location=str(self),
                hint="omit config=.",
            )
        if directories and self.split not in directories:
            raise CtxError(
                f"{self.name} has no split {self.split!r}.",
                location=str(self),
                hint=f"use one of: {', '.join(directories)}.",
            )
        try:
            if directories:
                return _load_from_disk(directories[self.split], str(self))
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=streaming)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise CtxError(
                f"The dataset cannot be opened: {error}{cause}",
                location=str(self),
                hint="use the path of a file, `demo`, or the Hub id of an accessible dataset, followed by "
                ":config=NAME,split=NAME if it has several.",
            ) from error


def is_dataset(source: str) -> bool:
    """Whether a source is a dataset of the Hub or a local directory, not a file or `demo`: it has options
    (`:split=test`), is a directory, or has the form of a Hub id and no file has this name."""
    name, options = split_dataset_options(source)
    if options or os.path.isdir(local_path(name)):
        return True
    suffix = compression_suffix(name) or file_suffix(name)
    is_file_name = suffix and not re.match(r"\.\d", suffix)  # "name-v1.0" may be a Hub id
    is_file = name == "demo" or is_file_name or is_url(name) or os.path.exists(name)
    return not is_file and is_repo_id(name)


def source_name(source: str) -> str:
    """The Hub id of a dataset without its options, or the name of a file or directory."""
    name, _ = split_dataset_options(source)
    return name if is_dataset(source) and not os.path.isdir(local_path(name)) else file_name(name.rstrip("/"))


def with_default_split(source: str, split: str) -> str:
    """The source with this split if it is a dataset without one, otherwise unchanged. A directory that
    `Dataset.save_to_disk` wrote has one split: the name that the dataset had, or `train`."""
    name, options = split_dataset_options(source)
    if "split" in options or not is_dataset(source):
        return source
    return join_choice(name, options | {"split": _default_split(name, split)})


def _default_split(name: str, split: str) -> str:
    """The only split of a directory that `Dataset.save_to_disk` wrote, otherwise this split."""
    directory = Path(local_path(name))
    return split if (directory / _SPLIT_FILE).is_file() else next(iter(_saved_splits(directory)), split)


def _load_from_disk(directory: Path, location: str) -> "datasets.Dataset | datasets.IterableDataset":
    """The rows that `save_to_disk` wrote, with all columns, as Python values, whatever format they were saved with;
    raises CtxError if there are none."""
    import datasets

    try:
        return datasets.load_from_disk(directory).with_format(None)  # type: ignore[return-value]
    except IndexError as error:  # it concatenates no files
        raise CtxError(
            "The dataset cannot be opened: it has no rows.",
            location=location,
            hint="use a split with at least one row.",
        ) from error


def _saved_splits(directory: Path) -> dict[str, Path]:
    """Split -> its directory, if `save_to_disk` of datasets wrote the directory; else no splits."""
    split_file, state_file = directory / _SPLIT_FILE, directory / "state.json"
    if split_file.is_file():
        content = read_json(split_file)
        splits = content.get("splits") if isinstance(content, dict) else None
        return {split: directory / split for split in splits or ()}
    if state_file.is_file() and (directory / "dataset_info.json").is_file():
        return {read_json(state_file).get("_split") or "train": directory}
    return {}
