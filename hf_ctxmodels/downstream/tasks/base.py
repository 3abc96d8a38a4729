"""The base class of fine-tuning tasks: files -> examples -> features -> predictions -> metrics."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.word_alignment import split_words
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag, non_default_fields
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.data.examples import LOOP_COLUMNS
from hf_ctxmodels.data.files import same_file
from hf_ctxmodels.data.hub_datasets import with_default_split
from hf_ctxmodels.data.padding import RowPadder
from hf_ctxmodels.data.table_files import Row, are_column_numbers, has_columns, has_labels, parse_strings, read_texts

Feature = dict[str, Any]
Collator = Callable[[list[Feature]], dict[str, Any]]
Logits = dict[str, np.ndarray]
"""Outputs of the model for one feature by name: (labels,), (length, labels), (length,) or (choices,)."""
COLUMN_FLAGS = ("text_columns", "label_column", "choice_columns")
"""Fields of `TaskArguments` with names or numbers of columns."""


@dataclass
class TaskArguments:
    """Columns and lengths."""

    text_columns: str | None = flag(
        None, "Columns of the text, separated by commas: one for single texts, two for pairs; names or numbers from 1."
    )
    label_column: str | None = flag(
        None,
        "Column of the label, tags, number, choice, relevance or target text; for several labels of a text, also "
        "columns of 0 and 1, separated by commas.",
    )
    choice_columns: str | None = flag(None, "Columns of the choices, separated by commas, or one column of lists.")
    max_length: int = flag(
        128,
        "Longest input in tokens; longer texts are truncated or split into windows, longer sentences to parse are an "
        "error.",
    )
    doc_stride: int | None = flag(
        None, "Tokens shared by consecutive windows of a long context; by default a third of --max_length."
    )
    max_answer_length: int = flag(30, "Longest predicted answer in tokens.")
    head_column: int | None = flag(
        None, "Column of the syntactic heads: reduce the arguments of predicates to their head words."
    )
    both_orders: bool = flag(False, "Encode each pair in both orders and sum the states (GPT).")
    max_target_length: int = flag(64, "Longest target in tokens; longer targets are an error.")
    cut_sources: bool = flag(False, "Truncate sources to --max_length; by default longer sources are an error.")
    target_language: str | None = flag(
        None, "Language to generate, for multilingual models: a token, such as `<de>`, or a name in lang2id."
    )
    span_beam_search: bool = flag(
        False,
        "Use the head of XLNet and XLM that predicts the end of an answer given its start, and separately whether "
        "there is an answer.",
    )
    null_threshold: float = flag(
        0.0, "Predict no answer if its score exceeds the score of the best span by more than this."
    )
    label_smoothing: float | None = flag(None, "Label smoothing in training; by default the value of the family.")
    num_beams: int = flag(1, "Width of the beam search for predictions; 1 is greedy.")
    metrics: str = flag("rouge,bleu,exact_match", "Metrics of the predictions, the main metric first.")
    plain_targets: bool = flag(False, "Train on the unchanged targets, where the family masks them or adds noise.")
    target_options: list[str] = flag((), "Options of the masks or noise on targets, as key=value.")
    label_delimiter: str | None = flag(
        None, "Delimiter of the labels in a text of several labels; by default a comma. Lists need none."
    )

    def __post_init__(self) -> None:
        check_range(self, "max_answer_length", "max_target_length", "num_beams", at_least=1)

    def saved_columns(self) -> dict[str, str]:
        """The names of columns by flag, without numbers, which select other columns in a file with another layout, and
        `label_delimiter`; they are saved with a fine-tuned model."""
        values = {name: getattr(self, name) for name in COLUMN_FLAGS}
        columns = {name: value for name, value in values.items() if value and not are_column_numbers(value.split(","))}
        return columns | ({"label_delimiter": self.label_delimiter} if self.label_delimiter else {})


def default_max_length(config: PreTrainedConfig) -> int:
    """`TaskArguments.max_length`, or the longest input of the model if it is shorter."""
    return min(max_input_length(config) or TaskArguments.max_length, TaskArguments.max_length)


@dataclass(frozen=True)
class Encoded:
    """Model inputs of a list of examples.

    Attributes:
        features: Arguments of the head's forward; without `origins`, one feature for each example.
        origins: The example that each feature belongs to, in a form that the task's `decode` reads.
    """

    features: list[Feature]
    origins: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FeatureCollator:
    """Wraps a collator of transformers, and removes the columns that the training loop adds to the examples."""

    collate: Collator

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the head's forward."""
        features = [
            {name: value for name, value in feature.items() if name not in LOOP_COLUMNS} for feature in features
        ]
        return dict(self.collate(features))


@dataclass(frozen=True)
class WordCollator:
    """Pads texts and additional columns with a value, or an array, for each token or word.

    Args:
        word_columns: Name of a column -> value at padding.
        position_columns: Names of columns whose values are positions of tokens, or negative for none; they are shifted
            by padding on the left.
    """

    tokenizer: PreTrainedTokenizerBase
    word_columns: Mapping[str, int]
    position_columns: tuple[str, ...] = ()

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the head's forward."""
        inputs = [
            {name: value for name, value in feature.items() if name not in (*LOOP_COLUMNS, *self.word_columns)}
            for feature in features
        ]
        batch = dict(self.tokenizer.pad(inputs, return_tensors="pt"))
        padder = RowPadder([len(feature["input_ids"]) for feature in features], self.tokenizer.padding_side)
        for name, padding in self.word_columns.items():
            batch[name] = padder.pad([np.asarray(feature[name]) for feature in features], padding)
        if self.tokenizer.padding_side == "left":
            num_padding = (batch["attention_mask"] == 0).sum(1)
            for name in batch.keys() & self.position_columns:
                positions = batch[name]
                shift = num_padding.view(-1, *[1] * (positions.dim() - 1))
                batch[name] = torch.where(positions < 0, positions, positions + shift)
        return batch


Example = TypeVar("Example")
Label = TypeVar("Label")


def check_unused_arguments(arguments: TaskArguments, names: Collection[str], message: str) -> None:
    """Raise CtxError with `message` if an argument that is not among `names` differs from its default."""
    if unused := sorted(non_default_fields(arguments) - set(names)):
        raise CtxError(message, location=f"--{unused[0]}", hint="remove it from the command line or the recipe.")


class Task(ABC, Generic[Example]):
    """A fine-tuning task, for any model family.

    Methods are called in this order: `read` both files, `configure` the config, `encode`, train and predict, `decode`,
    `score`.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    """Name of the Auto class of the task's heads."""
    targets: tuple[str, ...] = ("labels",)
    """Entries of a feature that are targets of the loss."""
    output_names: tuple[str, ...] = ("logits",)
    """Fields of the head's output that `decode` reads."""
    split_words: ClassVar[bool] = False
    """Whether the tokenizer's inputs are lists of words."""
    has_token_outputs: bool = False
    """Whether there is an output for each token; `decode` receives them without padding."""
    position_outputs: tuple[str, ...] = ()
    """Outputs that are positions of tokens; `decode` receives them as positions in the unpadded feature."""
    evaluation_arguments: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of the head's forward in evaluation."""
    is_percentage: ClassVar[bool] = False
    """Whether the main metric is in percent."""
    is_generative: ClassVar[bool] = False
    """Whether `decode` reads the output of `generate`, instead of fields of the head's output."""
    has_unlabeled_loss: ClassVar[bool] = False
    """Whether a head of the task may learn from unlabeled examples."""
    required_inputs: ClassVar[tuple[str, ...]] = ()
    """Arguments that the head's forward must have; not all heads of the Auto class have them."""
    collator_class: ClassVar[Callable[..., Any]] = DataCollatorWithPadding
    """The class of the task's collator, which is created from a tokenizer."""
    argument_names: ClassVar[tuple[str, ...]] = ("text_columns", "label_column", "max_length")
    """The fields of `TaskArguments` that this task uses."""
    baseline_name: str = ""
    """Name of the baseline selected by `baseline`, if the task has several."""
    labels: Sequence[str] = ()
    """Names of the labels, by id, of a task with a closed set of labels; after `configure`."""
    replaced_labels: Sequence[str] = ()
    """Labels of the fine-tuned model that the task starts from, if they are not the task's labels."""

    def __init__(self, arguments: TaskArguments) -> None:
        self.arguments = arguments

    def for_file(self, file: str, columns: Mapping[str, str]) -> Self:
        """A copy of this task that reads `columns` (`TaskArguments.saved_columns`) of a file, unless the flag is set or
        the file lacks one of them."""
        task = copy(self)
        used_columns: dict[str, Any] = {
            flag_name: names
            for flag_name, names in columns.items()
            if getattr(self.arguments, flag_name) is None
            and (flag_name not in COLUMN_FLAGS or has_columns(file, [name.strip() for name in names.split(",")]))
        }
        task.arguments = replace(self.arguments, **used_columns)
        return task

    def check_unused_arguments(self) -> None:
        """Raise CtxError for an argument that this task does not use."""
        check_unused_arguments(self.arguments, self.argument_names, f"The task {self.name} does not use it.")

    @abstractmethod
    def read_file(self, file: str) -> list[Example]:
        """The examples of a file; raises CtxError if it cannot be read."""

    def read_demo(self, split: str) -> list[Example]:
        """The examples of the "train" or "validation" split of the demo data; raises CtxError if there are none."""
        raise CtxError("This task has no demo data.", location=self.name, hint="use a file, see --train_file.")

    def read(self, file: str, split: str) -> list[Example]:
        """The labeled examples of a file, of a dataset, by default of this split, or of a split of `demo`; raises
        CtxError if they cannot be read."""
        examples = self.read_demo(split) if file == "demo" else self.read_file(with_default_split(file, split))
        labeled = [example for example in examples if self.is_labeled(example)]
        print_status(
            f"{file}: {len(examples) - len(labeled):,} of {len(examples):,} examples have no label (-1); they are "
            "skipped",
            PartialState().is_main_process and len(labeled) < len(examples),
        )
        return labeled

    def read_splits(self, train_files: Sequence[str], validation_file: str) -> tuple[list[Example], list[Example]]:
        """Training examples of all files, and validation examples, with a warning if they are in the same file; raises
        CtxError as `read`."""
        validation_file = with_default_split(validation_file, "validation")
        train_files = [with_default_split(file, "train") for file in train_files]
        for train_file in train_files:
            if "demo" not in (train_file, validation_file) and same_file(train_file, validation_file):
                print_status(
                    f"warning: {train_file} is the training file and the validation file; the metrics are too high",
                    PartialState().is_main_process,
                )
        training = [example for file in train_files for example in self.read(file, "train")]
        return training, self.read(validation_file, "validation")

    def read_unlabeled(self, file: str) -> list[Example]:
        """Examples of a file without labels, each with a placeholder label; called after `configure` or `load_labels`.
        Raises CtxError if the file cannot be read, or the task has no unlabeled examples."""
        raise CtxError(f"The task {self.name} has no unlabeled examples.", location=file, hint="use another task.")

    def has_labels(self, file: str) -> bool:
        """Whether the examples of a file have labels, so that their predictions can be scored."""
        return has_labels(file, self.arguments.label_column or "label")

    def is_labeled(self, example: Example) -> bool:
        """Whether an example of `read_file` has a label."""
        return True

    def load_labels(self, config: PreTrainedConfig) -> None:
        """Set the task's labels to the labels of a fine-tuned model's configuration, instead of `configure`."""

    def config_fields(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Task-specific fields of a new model's configuration that depend on the tokenizer."""
        return {}

    def set_token_fields(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the config's ids of tokens that the task needs; called before `configure`."""

    def configure(self, config: PreTrainedConfig, train: Sequence[Example], validation: Sequence[Example]) -> None:
        """Set the config's labels (`id2label`, `label2id`, `problem_type`) from the training examples, if any."""

    @abstractmethod
    def encode(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenize the examples; raises CtxError for a label that the training examples lack."""

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """The collator of padded batches."""
        return FeatureCollator(self.collator_class(tokenizer))

    def training_collator(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int, verbose: bool = True
    ) -> Collator:
        """The collator of training batches, if it differs from `collator`; called between `configure` and `encode`.
        `seed`, epoch and example determine random targets."""
        return self.collator(tokenizer)

    def label_smoothing(self, config: PreTrainedConfig) -> float:
        """The label smoothing in training."""
        return 0.0

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

    def learned_baseline(self, train: Sequence[Example], validation: Sequence[Example]) -> list[Any] | None:
        """Predictions for the validation examples by a small model of the training examples; None without one."""
        return None

    def constant_prediction(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any | None:
        """The prediction that (nearly) all examples have, although their labels differ; else None."""
        return repeated_prediction(predictions, [getattr(example, "label", None) for example in examples])

    def upper_bounds(self, examples: Sequence[Example]) -> dict[str, float]:
        """Upper bound of each metric, if no prediction can be fully correct; otherwise empty."""
        return {}

    def record(self, example: Any, prediction: Any) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return {"location": example.location, "label": example.label, "prediction": prediction}

    def results(self, examples: Sequence[Example], encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """JSON objects with the inputs and the predictions for unlabeled examples."""
        raise NotImplementedError

    def _columns(self, flag: str, default: str, *numbers: int) -> list[str]:
        """The columns that a flag names; raises CtxError if their number is not among `numbers`, which may be empty."""
        columns = [column.strip() for column in (getattr(self.arguments, flag) or default).split(",")]
        if not all(columns) or len(set(columns)) < len(columns) or (numbers and len(columns) not in numbers):
            expected = f"{' or '.join(map(str, numbers))} columns" if numbers else "a list of columns"
            raise CtxError(
                f"Expected {expected}, got {len(columns)}: {', '.join(columns)!r}.",
                location=f"--{flag}",
                hint="use unique names separated by commas, for example a,b.",
            )
        return columns


class LabeledTask(Task[Example]):
    """A task with a closed set of labels, which are saved in the model's config."""

    labels: list[str]

    def load_labels(self, config: PreTrainedConfig) -> None:
        """Set `labels` to the names in the configuration."""
        self.labels = [str(config.id2label[index]) for index in range(config.num_labels)]

    def _set_labels(self, config: PreTrainedConfig, labels: Sequence[str], validation: Iterable[str]) -> None:
        """Set new labels, unless a fine-tuned model has the same labels, in any order; labels that occur only in the
        `validation` examples count, too."""
        id2label = config.id2label or {}
        previous_labels = [id2label[i] for i in range(len(id2label))]
        is_named = any(name != f"LABEL_{i}" for i, name in id2label.items())
        if is_named and {*labels, *validation} == set(previous_labels):
            self.labels = previous_labels
        else:
            self.labels, self.replaced_labels = list(labels), previous_labels if is_named else ()
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {label: i for i, label in enumerate(self.labels)}

    def _label_id(self, label: str, location: str) -> int:
        if label not in self.labels:
            raise CtxError(
                f"The label {label!r} does not occur in the training file, whose labels are: "
                f"{', '.join(map(repr, self.labels))}.",
                location=location,
                hint="correct the label, or add training examples with it.",
            )
        return self.labels.index(label)


def get_texts(
    row: Row, columns: Sequence[str], hint: str = "correct the line, or pass other --text_columns."
) -> tuple[str, ...]:
    """The texts of a row; raises CtxError if a value is not a string, or all are blank."""
    for column in columns:
        if not isinstance(row.values[column], str):
            raise CtxError(
                f"Expected a text in column {column!r}, got {row.values[column]!r}.",
                location=row.location,
                hint=hint,
            )
    if not any(row.values[column].strip() for column in columns):
        raise CtxError(
            f"No text in column(s) {', '.join(columns)}.", location=row.location, hint="remove the line, or fill it in."
        )
    return tuple(row.values[column] for column in columns)


def parse_label(value: Any, location: str, hint: str = "correct the line, or pass another --label_column.") -> str:
    """The label in a cell of a table; raises CtxError for an empty cell, null, NaN, a list or an object."""
    if value is None or value != value or isinstance(value, (list, dict)) or str(value).strip() == "":
        raise CtxError(f"{value!r} is not a label; expected a name or a number.", location=location, hint=hint)
    # pandas stores the integers of a column with missing values as floating-point numbers
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def read_words(file: str, column: str, hint: str) -> list[tuple[list[str], str]]:
    """The words of each row of a file with their location: a list of words, or a text, which is split into words and
    punctuation marks; raises CtxError with this hint for other values."""
    sentences = []
    for row in read_texts(file, column):
        value = row.values[column]
        words = split_words(value) if isinstance(value, str) else parse_strings(value)
        if not words:
            raise CtxError(f"Expected a text or a list of words in {column!r}.", location=row.location, hint=hint)
        sentences.append((words, row.location))
    return sentences


def repeated_prediction(predictions: Sequence[Any], labels: Iterable[Any], share: float = 1.0) -> Any | None:
    """The most frequent of five or more predictions if it has at least this share of them, and no label has; else
    None."""
    label_counts = Counter(labels)
    if len(predictions) < 5 or max(label_counts.values()) >= share * label_counts.total():
        return None
    prediction, count = Counter(predictions).most_common(1)[0]
    return prediction if count >= share * len(predictions) else None


def most_frequent(labels: Iterable[Label]) -> Label:
    """The most frequent label."""
    return Counter(labels).most_common(1)[0][0]
