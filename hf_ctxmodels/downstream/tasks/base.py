"""The base class of fine-tuning tasks: files -> examples -> features -> predictions -> metrics."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag, non_default_fields, reject_flag_conflicts
from hf_ctxmodels.data.table_files import Row

Feature = dict[str, Any]
Collator = Callable[[list[Feature]], dict[str, Any]]
Logits = dict[str, np.ndarray]
"""Outputs of the model for one feature by name: (labels,), (length, labels), (length,) or (choices,)."""


@dataclass
class TaskArguments:
    """The columns of a task and the length of its inputs."""

    text_columns: str | None = field(
        default=None,
        metadata={
            "help": "Column(s) of the text, separated by commas: one for single texts, two for pairs. Numbers "
            "(1 = first) for a file without a header line. Default: text, or the task's usual columns (seq2seq: "
            "source; ranking: query,candidate)."
        },
    )
    label_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the label, tag, target number or correct choice; ranking: 1 for a relevant candidate, "
            "else 0; seq2seq: of the text to be written. Default: label, or target."
        },
    )
    choice_columns: str | None = field(
        default=None,
        metadata={
            "help": "multiple-choice only: the columns of the choices, separated by commas, or one column of lists. "
            "Default: choices."
        },
    )
    max_length: int = field(
        default=128,
        metadata={
            "help": "Longest input in tokens; longer texts are truncated or split into windows. For seq2seq they are "
            "an error, see --cut_sources."
        },
    )
    doc_stride: int | None = field(
        default=None,
        metadata={
            "help": "question-answering only: tokens shared by consecutive windows of a long context. "
            "Default: a third of --max_length."
        },
    )
    max_answer_length: int = field(
        default=30, metadata={"help": "question-answering only: longest predicted answer, in tokens."}
    )
    both_orders: bool = flag(
        False,
        "Pairs only: the model reads each pair in both orders and sums their states, for similarity (Radford et al. "
        "2018, section 3.3); for heads that take them, GPT's.",
    )
    max_target_length: int = flag(
        64, "seq2seq only: longest target in tokens; longer ones are an error. Predictions end there."
    )
    cut_sources: bool = flag(False, "seq2seq only: cut sources over --max_length at their end, in place of an error.")
    target_language: str | None = flag(
        None,
        "seq2seq only: the language that is written, where the model writes several: its mark, such as `<de>`, or its "
        "name in lang2id of the configuration; --language is then that of the sources.",
    )
    label_smoothing: float | None = flag(
        None,
        "seq2seq only: share of the target probability that is spread over all tokens in training. Default: as the "
        "family was fine-tuned, see its card; else 0.",
    )
    num_beams: int = flag(1, "seq2seq only: width of the beam search by which predictions are written; 1 is greedy.")
    metrics: str = flag(
        "rouge,bleu,exact_match", "seq2seq only: what predictions are scored by, the main metric first."
    )
    plain_targets: bool = flag(
        False,
        "seq2seq only: train on the targets as they are, each token from those before it, also where the family's "
        "paper masks them or adds noise.",
    )
    target_options: list[str] = flag(
        (), "seq2seq only: options of such masks or noise, as key=value; an unknown key lists them."
    )


@dataclass(frozen=True)
class Encoded:
    """Model inputs of a list of examples.

    Attributes:
        features: Arguments of the head's forward.
        origins: The task's reference to the example of each feature.
    """

    features: list[Feature]
    origins: list[Any]


class FeatureCollator:
    """Wraps a collator of transformers, and removes the columns that the training loop adds to the examples."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the head's forward."""
        loop_columns = ("epoch", "example_index")
        features = [
            {name: value for name, value in feature.items() if name not in loop_columns} for feature in features
        ]
        return dict(self._collate(features))


Example = TypeVar("Example")
Label = TypeVar("Label")


def refuse_unread_flags(arguments: TaskArguments, read: Collection[str], what: str) -> None:
    """Raise CtxError, which says `what`, for a flag that was given and is not among those that are read."""
    unread = sorted(non_default_fields(arguments) - set(read))
    reject_flag_conflicts([(True, f"--{name}", what) for name in unread], "leave it out, also where a recipe has it.")


class Task(ABC, Generic[Example]):
    """A fine-tuning task, for any model family.

    Methods are called in this order: `read` both files, `configure` the config, `encode`, train and predict, `decode`,
    `score`.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    """Name of the Auto class of the task's heads."""
    targets: ClassVar[tuple[str, ...]] = ("labels",)
    """Entries of a feature that are targets of the loss."""
    output_names: ClassVar[tuple[str, ...]] = ("logits",)
    """Fields of the head's output that `decode` reads."""
    split_words: ClassVar[bool] = False
    """Whether the tokenizer's inputs are lists of words."""
    has_token_outputs: ClassVar[bool] = False
    """Whether there is an output for each token; `decode` receives them without padding."""
    is_percentage: ClassVar[bool] = False
    """Whether the main metric is in percent."""
    is_generative: ClassVar[bool] = False
    """Whether `decode` reads the output of `generate`, instead of fields of the head's output."""
    required_inputs: ClassVar[tuple[str, ...]] = ()
    """Arguments that the head's forward must have; not all heads of the Auto class have them."""
    reads: ClassVar[tuple[str, ...]] = ("text_columns", "label_column", "max_length")
    """The fields of `TaskArguments` that this task reads."""
    baseline_name: str = ""
    """Name of the baseline that `baseline` chose, if the task has several."""

    def __init__(self, arguments: TaskArguments) -> None:
        self.arguments = arguments

    def refuse_unread_flags(self) -> None:
        """Raise CtxError for a flag that was given and is another task's."""
        refuse_unread_flags(self.arguments, self.reads, f"The task {self.name} does not read it.")

    @abstractmethod
    def read_file(self, file: str) -> list[Example]:
        """The examples of a file; raises CtxError if it cannot be read."""

    def read_demo(self, split: str) -> list[Example]:
        """The examples of the "train" or "validation" split of the demo data; raises CtxError if there are none."""
        raise CtxError("This task has no demo data.", location=self.name, hint="give a file, see --train_file.")

    def read(self, file: str, split: str) -> list[Example]:
        """The examples of a file, or of a split of `demo`; raises CtxError if they cannot be read."""
        return self.read_demo(split) if file == "demo" else self.read_file(file)

    def read_unlabelled(self, file: str) -> list[Example]:
        """Examples of a file without labels, each with a placeholder label; called after `configure`.

        Raises:
            CtxError: The task has no unlabelled examples, or the file cannot be read.
        """
        raise CtxError(f"The task {self.name} has no unlabelled examples.", hint="leave out --unlabelled_file.")

    def config_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Task-specific fields of a new model's configuration that depend on the tokenizer."""
        return {}

    @abstractmethod
    def configure(self, config: PreTrainedConfig, train: Sequence[Example], validation: Sequence[Example]) -> None:
        """Set the config's labels (`id2label`, `label2id`, `problem_type`) from the training examples."""

    @abstractmethod
    def encode(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenise; raises CtxError for a label that the training examples lack."""

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """The collator of padded batches."""
        return FeatureCollator(DataCollatorWithPadding(tokenizer))

    def generate(self, model: PreTrainedModel, batch: dict[str, Any]) -> list[Logits]:
        """The generated output for each feature of a batch; only if `is_generative`."""
        raise NotImplementedError

    @abstractmethod
    def decode(self, examples: Sequence[Example], encoded: Encoded, outputs: Sequence[Logits]) -> list[Any]:
        """Predictions for the examples, from the outputs for the features."""

    @abstractmethod
    def score(self, examples: Sequence[Example], predictions: Sequence[Any]) -> dict[str, float]:
        """The task's metrics, the main one first."""

    @abstractmethod
    def baseline(self, train: Sequence[Example], validation: Sequence[Example]) -> list[Any]:
        """Predictions for the validation examples from the training labels alone, which a model should surpass."""

    def ceiling(self, examples: Sequence[Example]) -> dict[str, float]:
        """Upper bound of each metric, if no prediction can be fully correct; otherwise empty."""
        return {}

    def record(self, example: Any, prediction: Any) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return {"where": example.where, "label": example.label, "prediction": prediction}

    def _columns(self, names: str | None, default: str) -> list[str]:
        columns = [column.strip() for column in (names or default).split(",")]
        if not all(columns) or len(set(columns)) < len(columns):
            raise CtxError(
                f"{names!r} is not a list of columns.", hint="give unique names separated by commas, for example a,b."
            )
        return columns


class LabelledTask(Task[Example]):
    """A task with a closed set of labels, which the model's config saves."""

    labels: list[str]

    def _set_labels(self, config: PreTrainedConfig, labels: Sequence[str]) -> None:
        """Set new labels, unless the labels of a fine-tuned model contain all of them."""
        id2label = config.id2label or {}
        is_default = all(name == f"LABEL_{i}" for i, name in id2label.items())
        if set(labels) <= set(id2label.values()) and not is_default:
            self.labels = [id2label[i] for i in range(len(id2label))]
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
                hint="correct the label, or add training examples with it.",
            )
        return self.labels.index(label)


def sorted_labels(labels: set[str]) -> list[str]:
    """Labels in the order of their ids: integers by value, other labels by name."""
    try:
        return sorted(labels, key=int)
    except ValueError:
        return sorted(labels)


def get_texts(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """The texts of a row; raises CtxError if a value is not a string, or all are blank."""
    for column in columns:
        if not isinstance(row.values[column], str):
            raise CtxError(
                f"Expected a text in column {column!r}, got {row.values[column]!r}.",
                location=row.where,
                hint="correct the line, or give other --text_columns.",
            )
    if not any(row.values[column].strip() for column in columns):
        raise CtxError(
            f"No text in column(s) {', '.join(columns)}.", location=row.where, hint="remove the line, or fill it in."
        )
    return tuple(row.values[column] for column in columns)


def most_frequent(labels: Iterable[Label]) -> Label:
    """The most frequent label."""
    return Counter(labels).most_common(1)[0][0]
