"""What every fine-tuning task is: files -> examples -> features for an Auto class -> predictions -> metrics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_kind
from hf_ctxmodels.data.tasks.readers import Row, read_table

Feature = dict[str, Any]
Collator = Callable[[list[Feature]], dict[str, Any]]
Logits = dict[str, np.ndarray]
"""The outputs for one feature by name: (labels,), (length, labels), (length,) or (choices,)."""


@dataclass
class TaskArguments:
    """Which columns a task reads and how long its inputs are."""

    text_columns: str | None = field(
        default=None,
        metadata={
            "help": "Column(s) of the text, separated by commas: one for single texts, two for pairs. Numbers "
            "(1 = first) say that the file has no header line. Default: text, or the task's usual columns."
        },
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column of the label, tag, target number or right choice. Default: label."}
    )
    choice_columns: str | None = field(
        default=None,
        metadata={
            "help": "multiple-choice only: the columns of the choices, separated by commas, or one column that holds a "
            "list. Default: choices."
        },
    )
    max_length: int = field(
        default=128, metadata={"help": "Longest input in tokens; longer texts are cut or windowed."}
    )
    doc_stride: int | None = field(
        default=None,
        metadata={
            "help": "question-answering only: tokens that neighbouring windows of a long context share. "
            "Default: a third of --max_length."
        },
    )
    max_answer_length: int = field(
        default=30, metadata={"help": "question-answering only: longest answer that is predicted, in tokens."}
    )


@dataclass(frozen=True)
class Encoded:
    """Model inputs of a list of examples, and what leads from each feature back to its example.

    `features[i]` holds exactly what the head's forward names; `origins[i]` is for the task that made it.
    """

    features: list[Feature]
    origins: list[Any]


class FeatureCollator:
    """A collator of transformers, shielded from the notes that the training loop leaves in the examples."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of what the head names."""
        notes = ("epoch", "example_index")
        return dict(self._collate([{k: v for k, v in feature.items() if k not in notes} for feature in features]))


Example = TypeVar("Example")


class Task(ABC, Generic[Example]):
    """One kind of fine-tuning. A subclass says how to read, encode, decode and score; it knows no model family.

    The order of use: `read` both files, `configure` the model's config, `encode`, train and predict, `decode`, `score`.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    """Name of the transformers Auto class whose heads the task trains."""
    targets: ClassVar[tuple[str, ...]] = ("labels",)
    """The entries of a feature that the head's loss compares with."""
    output_names: ClassVar[tuple[str, ...]] = ("logits",)
    """The fields of the head's output that `decode` needs."""
    split_words: ClassVar[bool] = False
    """Whether the tokenizer is given lists of words instead of texts."""
    per_token: ClassVar[bool] = False
    """Whether those outputs have one row for each token (padding is then cut off before `decode`)."""

    def __init__(self, arguments: TaskArguments) -> None:
        self.arguments = arguments

    @abstractmethod
    def read(self, file: str, split: str) -> list[Example]:
        """The examples of a file, or of the "train" or "validation" part (`split`) of `demo`; raises CtxError."""

    def read_unlabelled(self, file: str) -> list[Example]:
        """Examples of a file without labels, with one of the task's that means nothing; after `configure`.

        Raises:
            CtxError: the task has no such examples, or the file cannot be read.
        """
        raise CtxError(f"The task {self.name} learns from labels alone.", hint="leave out --unlabelled_file.")

    @abstractmethod
    def configure(self, config: PreTrainedConfig, train: Sequence[Example], validation: Sequence[Example]) -> None:
        """Set the config's labels (`id2label`, `label2id`, `problem_type`) from the training examples."""

    @abstractmethod
    def encode(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenise; raises CtxError for a label that `configure` has not seen."""

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """What makes a padded batch of features."""
        return FeatureCollator(DataCollatorWithPadding(tokenizer))

    @abstractmethod
    def decode(self, examples: Sequence[Example], encoded: Encoded, outputs: Sequence[Logits]) -> list[Any]:
        """One prediction per example from one `Logits` per feature."""

    @abstractmethod
    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """The task's metrics, the most telling one first."""

    @abstractmethod
    def baseline(self, train: Sequence[Example], validation: Sequence[Example]) -> list[Any]:
        """Predictions for the validation examples that look at the training labels only: what a model must beat."""

    @abstractmethod
    def record(self, example: Example, prediction: Any) -> dict[str, Any]:
        """A line of the predictions file, as JSON holds it."""

    def _columns(self, given: str | None, default: str) -> list[str]:
        columns = [column.strip() for column in (given or default).split(",")]
        if not all(columns) or len(set(columns)) < len(columns):
            raise CtxError(f"{given!r} does not list columns.", hint="give distinct names with commas between: a,b.")
        return columns


class LabelledTask(Task[Example]):
    """A task whose targets are names from a closed set, saved in the model's config."""

    labels: list[str]

    def _set_labels(self, config: PreTrainedConfig, labels: Sequence[str]) -> None:
        """Take over the labels of a model that was fine-tuned on them (or more) already, else write new ones."""
        known = config.id2label or {}
        if set(labels) <= set(known.values()) and not all(name == f"LABEL_{i}" for i, name in known.items()):
            self.labels = [known[i] for i in range(len(known))]
        else:
            self.labels = list(labels)
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {label: i for i, label in enumerate(self.labels)}

    def _label_id(self, label: str, where: str) -> int:
        if label not in self.labels:
            raise CtxError(
                f"The label {label!r} does not occur in the training file, whose labels are: "
                f"{', '.join(map(repr, self.labels))}.",
                location=where,
                hint="mend the label, or train on examples of it too.",
            )
        return self.labels.index(label)


def sorted_labels(labels: set[str]) -> list[str]:
    """Whole numbers by value, else by name: the order in which labels get their ids."""
    try:
        return sorted(labels, key=int)
    except ValueError:
        return sorted(labels)


def text_of(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """The texts of a row; raises CtxError unless each is a text and one of them is not blank."""
    for column in columns:
        if not isinstance(row.values[column], str):
            raise CtxError(
                f"Expected a text in column {column!r}, got {row.values[column]!r}.",
                location=row.where,
                hint="mend the line, or choose other columns with --text_columns.",
            )
    if not any(row.values[column].strip() for column in columns):
        raise CtxError(
            f"No text in column(s) {', '.join(columns)}.", location=row.where, hint="remove the line, or fill it in."
        )
    return tuple(row.values[column] for column in columns)


def read_rows(file: str, columns: Sequence[str]) -> list[Row]:
    """`read_table`, with a hint for files that only other tasks read."""
    kind = file_kind(Path(file))
    if kind in (".json", ".conll", ".conllu"):
        raise CtxError(
            f"This task reads tables (.csv, .tsv, .txt, .jsonl), not {kind} files.",
            location=str(file),
            hint="choose another --task, or convert the file.",
        )
    return read_table(file, columns)
