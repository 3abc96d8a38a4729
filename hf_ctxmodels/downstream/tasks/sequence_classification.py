"""Sequence classification and regression: a text or a pair of texts -> a label, a set of labels or a number."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from scipy.special import expit, softmax
from transformers import DataCollatorForMultipleChoice, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_file
from hf_ctxmodels.data.record_files import class_names
from hf_ctxmodels.data.table_files import (
    Row,
    has_labels,
    parse_number,
    parse_strings,
    read_table,
    read_texts,
    require_labels,
)
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import (
    Collator,
    Encoded,
    Feature,
    FeatureCollator,
    LabeledTask,
    Logits,
    Task,
    TaskArguments,
    get_texts,
    most_frequent,
    parse_label,
)
from hf_ctxmodels.downstream.tasks.tfidf import tfidf_predictions


@dataclass(frozen=True)
class SequenceExample:
    """One text or a pair of texts, and the label: a name, a tuple of names, or a number."""

    texts: tuple[str, ...]
    label: Any
    location: str


Examples = Sequence[SequenceExample]
_BINARY_VALUES = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def _inputs(example: SequenceExample) -> dict[str, Any]:
    """The text or the two texts of an example, for `Task.results`."""
    return {"text": example.texts[0]} if len(example.texts) == 1 else {"texts": list(example.texts)}


def _ordered_labels(labels: Iterable[str], class_names: Sequence[str]) -> list[str]:
    """Labels in the order of a dataset's classes, otherwise integers by value and other labels by name."""
    ordered = sorted(set(labels))
    if set(ordered) <= set(class_names):
        return [*class_names]
    with suppress(ValueError):
        return sorted(ordered, key=int)
    return ordered


@dataclass(frozen=True)
class PairOrdersCollator:
    """Collates features with both orders of a pair, which have the form of multiple-choice features.

    Args:
        collate: Collator of multiple-choice features, which converts labels to integers.
    """

    collate: Collator

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """A padded batch of arguments of the head's forward, whose labels may be numbers or lists."""
        return self.collate(features) | {"labels": torch.tensor([feature["labels"] for feature in features])}


class _SequenceTask(Task[SequenceExample]):
    """Single texts or pairs of texts with a label."""

    auto_class = "AutoModelForSequenceClassification"
    argument_names = (*Task.argument_names, "both_orders")

    def __init__(self, arguments: TaskArguments) -> None:
        super().__init__(arguments)
        self.both_orders = arguments.both_orders

    @abstractmethod
    def _parse_label(self, values: Sequence[Any], location: str) -> Any:
        """The label in the label columns of a row; raises CtxError for an invalid value."""

    def _text_columns(self) -> list[str]:
        return self._columns("text_columns", "text", 1, 2)

    def _label_columns(self) -> list[str]:
        return [self.arguments.label_column or "label"]

    def read_file(self, file: str) -> list[SequenceExample]:
        """Read the examples of a file."""
        label_columns = self._label_columns()
        columns = [*self._text_columns(), *label_columns]
        return self._examples(read_table(file, columns, label_names=len(label_columns) == 1))

    def read_unlabeled(self, file: str) -> list[SequenceExample]:
        """A table with the text columns, or a `.txt` file with one text per line."""
        columns = self._text_columns()
        rows = read_table(file, columns) if self.arguments.text_columns else read_texts(file, *columns)
        return [SequenceExample(get_texts(row, columns), self._placeholder_label(), row.location) for row in rows]

    @abstractmethod
    def _placeholder_label(self) -> Any:
        """A valid label, for unlabeled examples."""

    def read_demo(self, split: str) -> list[SequenceExample]:
        """160 training or 40 validation sentences of Pang & Lee's film reviews, half "pos", half "neg", from gensim's
        files."""
        lines = demo_file("pang_lee_polarity.cor").read_text(encoding="windows-1252").splitlines()
        rows = []
        for number, line in enumerate(lines, 1):
            label, _, text = line.partition(" ")
            # the file is sorted by label, so every fifth sentence is a balanced sample
            if (number % 5 == 0) == (split == "validation"):
                values = {"text": text.strip(), "label": label.removeprefix("__label__")}
                rows.append(Row(values, f"demo:{number}"))
        return self._examples(rows)

    def _examples(self, rows: Sequence[Row]) -> list[SequenceExample]:
        columns, label_columns = self._text_columns(), self._label_columns()
        require_labels(rows, label_columns[0])
        examples = []
        for row in rows:
            label = self._parse_label([row.values[column] for column in label_columns], row.location)
            examples.append(SequenceExample(get_texts(row, columns), label, row.location))
        return examples

    def load_labels(self, config: PreTrainedConfig) -> None:
        """Set the labels, and whether the model reads pairs in both orders."""
        super().load_labels(config)
        self.both_orders = self.arguments.both_orders or getattr(config, "both_orders", False)

    def _set_pair_fields(self, config: PreTrainedConfig, train: Examples) -> None:
        """Let recurrent encoders with this option encode the two texts of a pair separately, and save `both_orders`."""
        if hasattr(config, "both_orders"):
            config.both_orders = self.both_orders
        if len(train[0].texts) == 2 and hasattr(config, "text_pairs"):
            config.text_pairs = True

    def _encode(self, examples: Examples, targets: list[Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Features of texts or pairs (the longer text of a pair is truncated first). With `both_orders` the tokens of a
        feature are two lists: the pair, and the pair in reverse order."""
        columns = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
        if self.both_orders and len(columns) != 2:
            raise CtxError(
                "Only pairs of texts have two orders.",
                location=f"--text_columns {self.arguments.text_columns or 'text'}",
                hint="pass two columns, or remove --both_orders.",
            )
        options = {"truncation": "longest_first", "max_length": self.arguments.max_length}
        encoding = tokenizer(*columns, **options)
        if self.both_orders:
            reversed_encoding = tokenizer(*columns[::-1], **options)
            encoding = {name: list(zip(encoding[name], reversed_encoding[name], strict=True)) for name in encoding}
        features = [
            {name: encoding[name][index] for name in encoding} | {"labels": target}
            for index, target in enumerate(targets)
        ]
        return Encoded(features)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """A collator of padded batches."""
        if not self.both_orders:
            return super().collator(tokenizer)
        return PairOrdersCollator(FeatureCollator(DataCollatorForMultipleChoice(tokenizer)))

    def learned_baseline(self, train: Examples, validation: Examples) -> list[Any] | None:
        """`tfidf_predictions`."""
        return tfidf_predictions(train, validation, regression=isinstance(self, Regression))


class SequenceClassification(_SequenceTask, LabeledTask[SequenceExample]):
    """A text or a pair -> one of several labels (CoLA, SST-2, RTE, SNLI, ...)."""

    name = "sequence-classification"
    has_unlabeled_loss = True
    class_names: Sequence[str] = ()
    """Names of the classes in the order of their numbers, of the first dataset that has them."""

    def read_file(self, file: str) -> list[SequenceExample]:
        """Read the examples of a file."""
        self.class_names = self.class_names or class_names(file, self.arguments.label_column or "label")
        return super().read_file(file)

    def is_labeled(self, example: SequenceExample) -> bool:
        """Whether the label is not -1, which is no class of a dataset (as in SNLI, for pairs without agreement)."""
        return example.label != "-1" or not self.class_names or "-1" in (*self.class_names, *self.labels)

    def _parse_label(self, values: Sequence[Any], location: str) -> str:
        (value,) = values
        if isinstance(value, list):
            raise CtxError(
                f"Expected one label, got the list {value!r}.",
                location=location,
                hint="use the task multi-label-classification, or pass another --label_column.",
            )
        return parse_label(value, location)

    def _examples(self, rows: Sequence[Row]) -> list[SequenceExample]:
        """The examples, whose labels are stripped of whitespace, with a warning if there was any."""
        examples = super()._examples(rows)
        if padded := [example for example in examples if example.label != example.label.strip()]:
            print_status(
                f"warning: {len(padded):,} labels have whitespace around them, such as {padded[0].label!r} in "
                f"{padded[0].location}; it is ignored",
                PartialState().is_main_process,
            )
        return [replace(example, label=example.label.strip()) for example in examples]

    def _placeholder_label(self) -> str:
        return self.labels[0]

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set the labels from the training examples, and the fields for two texts. Labels are in the order of a
        dataset's classes, otherwise integers by value and other labels by name."""
        self._set_pair_fields(config, train)
        if len({example.label for example in train}) < 2:
            raise CtxError(
                f"All training examples have the label {train[0].label!r}; a classifier needs two labels or more.",
                location="--train_file",
                hint="add examples of another label, or pass another --label_column.",
            )
        labels = _ordered_labels((example.label for example in train), self.class_names)
        self._set_labels(config, labels, (example.label for example in validation))
        config.problem_type = "single_label_classification"

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenize the examples."""
        targets = [self._label_id(example.label, example.location) for example in examples]
        return self._encode(examples, targets, tokenizer)

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[str]:
        """The most probable label of each example."""
        return [self.labels[int(output["logits"].argmax())] for output in outputs]

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Texts, the most probable label, and the probabilities of all labels."""
        results = []
        for example, label, output in zip(examples, self.decode(examples, encoded, outputs), outputs, strict=True):
            by_label = dict(zip(self.labels, softmax(output["logits"]).tolist()))
            results.append({**_inputs(example), "label": label, "probabilities": by_label})
        return results

    def score(self, examples: Examples, predictions: Sequence[str]) -> dict[str, float]:
        """Accuracy, F1 of the second of two labels, macro F1 and Matthews correlation."""
        predicted_ids = [self.labels.index(prediction) for prediction in predictions]
        label_ids = [self._label_id(example.label, example.location) for example in examples]
        return metrics.classification_scores(predicted_ids, label_ids, len(self.labels))

    def baseline(self, train: Examples, validation: Examples) -> list[str]:
        """The most frequent label of the training file."""
        return [most_frequent(example.label for example in train)] * len(validation)


class MultiLabelClassification(_SequenceTask, LabeledTask[SequenceExample]):
    """A text or a pair -> any number of labels (GoEmotions, toxic comments), trained with binary cross-entropy.

    The labels of a row are a list of names or numbers, a text with delimiters, or several columns of 0 and 1, whose
    names are the labels.
    """

    name = "multi-label-classification"
    argument_names = (*_SequenceTask.argument_names, "label_delimiter")
    has_unlabeled_loss = True
    class_names: Sequence[str] = ()
    """Names of the classes in the order of their numbers or columns, of the first file that has them."""

    def _label_columns(self) -> list[str]:
        return self._columns("label_column", "label")

    def read_file(self, file: str) -> list[SequenceExample]:
        """Read the examples of a file."""
        columns = self._label_columns()
        self.class_names = self.class_names or (columns if len(columns) > 1 else class_names(file, columns[0]))
        return super().read_file(file)

    def has_labels(self, file: str) -> bool:
        """Whether a column of labels has a value other than an empty text, an empty list, or -1."""
        return any(has_labels(file, column) for column in self._label_columns())

    def _examples(self, rows: Sequence[Row]) -> list[SequenceExample]:
        """The examples; raises CtxError if some labels are lists and some are texts."""
        column = self._label_columns()[0]
        for row in rows:
            if isinstance(row.values[column], list) != isinstance(rows[0].values[column], list):
                raise CtxError(
                    f"Column {column!r} mixes lists and other values: {rows[0].values[column]!r} in "
                    f"{rows[0].location}, and {row.values[column]!r}.",
                    location=row.location,
                    hint="write the labels of all rows as lists.",
                )
        return super()._examples(rows)

    def _parse_label(self, values: Sequence[Any], location: str) -> tuple[str, ...]:
        """The labels without repetitions, in the order of the row."""
        if len(values) > 1:
            columns = self._label_columns()
            return tuple(column for column, value in zip(columns, values) if _parse_binary(value, column, location))
        (value,) = values
        delimiter = self.arguments.label_delimiter or ","
        labels = value.split(delimiter) if isinstance(value, str) else parse_strings(value)
        is_list_as_text = isinstance(value, str) and value.strip().startswith("[") and value.strip().endswith("]")
        if is_list_as_text or (not labels and value != []):
            raise CtxError(
                f"Expected the labels of a text, got {value!r}.",
                location=location,
                hint=f"write a list of names or numbers (JSON lines, Parquet), or names separated by {delimiter!r} "
                "(CSV, see --label_delimiter); without labels an empty list or cell.",
            )
        return tuple(dict.fromkeys(label.strip() for label in labels if label.strip()))

    def _placeholder_label(self) -> tuple[str, ...]:
        return ()

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set the labels from the training examples, and the fields for two texts. Labels are in the order of a
        dataset's classes or of the columns, otherwise integers by value and other labels by name."""
        self._set_pair_fields(config, train)
        label_sets = {"--train_file": train, "--validation_file": validation}
        train_labels, validation_labels = (
            {label for example in examples for label in example.label} for examples in label_sets.values()
        )
        for flag, labels in zip(label_sets, (train_labels, validation_labels)):
            if not labels:
                raise CtxError(
                    f"None of {len(label_sets[flag]):,} examples has a label.",
                    location=flag,
                    hint="use a file with labels, or pass another --label_column.",
                )
        if all(len(example.label) == 1 for example in train):
            print_status(
                "warning: all training examples have exactly one label; the task sequence-classification predicts "
                "exactly one",
                PartialState().is_main_process,
            )
        self._set_labels(config, _ordered_labels(train_labels, self.class_names), validation_labels)
        config.problem_type = "multi_label_classification"

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenize the examples; targets are 1.0 for the labels of an example, and 0.0 for all other labels."""
        targets = self._assignments([example.label for example in examples], examples)
        return self._encode(examples, targets.astype(float).tolist(), tokenizer)

    def _assignments(self, label_sets: Sequence[Sequence[str]], examples: Examples) -> np.ndarray:
        """(examples, labels) bool; raises CtxError for a label that the model lacks."""
        assignments = np.zeros((len(label_sets), len(self.labels)), bool)
        for row, (labels, example) in enumerate(zip(label_sets, examples, strict=True)):
            assignments[row, [self._label_id(label, example.location) for label in labels]] = True
        return assignments

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[tuple[str, ...]]:
        """The labels of each example whose probability is above 0.5."""
        return [
            tuple(label for label, logit in zip(self.labels, output["logits"], strict=True) if logit > 0)
            for output in outputs
        ]

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Texts, the labels whose probability is above 0.5, and the probabilities of all labels."""
        results = []
        for example, labels, output in zip(examples, self.decode(examples, encoded, outputs), outputs, strict=True):
            by_label = dict(zip(self.labels, expit(output["logits"]).tolist()))
            results.append({**_inputs(example), "labels": [*labels], "probabilities": by_label})
        return results

    def score(self, examples: Examples, predictions: Sequence[Sequence[str]]) -> dict[str, float]:
        """Micro and macro F1, and the share of examples whose labels are all correct."""
        references = self._assignments([example.label for example in examples], examples)
        return metrics.multi_label_scores(self._assignments(predictions, examples), references)

    def constant_prediction(self, examples: Examples, predictions: Sequence[tuple[str, ...]]) -> str | None:
        """The labels that (nearly) all examples have, although their labels differ; else None."""
        labels = super().constant_prediction(examples, predictions)
        return labels if labels is None else ", ".join(labels) or "no label"

    def baseline(self, train: Examples, validation: Examples) -> list[tuple[str, ...]]:
        """The most frequent labels of the training file, as many as have the highest micro F1 there."""
        counts = Counter(label for example in train for label in example.label).most_common()
        correct = accumulate(count for _, count in counts)
        total = sum(count for _, count in counts)
        scores = [2 * count / (size * len(train) + total) for size, count in enumerate(correct, 1)]
        labels = tuple(label for label, _ in counts[: 1 + int(np.argmax(scores))])
        return [labels] * len(validation)


def _parse_binary(value: Any, column: str, location: str) -> bool:
    """Whether a column of 0 and 1 assigns its label; raises CtxError for other values."""
    text = str(value).strip().lower()
    if text not in _BINARY_VALUES:
        raise CtxError(
            f"{value!r} in column {column!r} is not 0 or 1.",
            location=location,
            hint="correct the row, or pass other columns of 0 and 1 as --label_column.",
        )
    return _BINARY_VALUES[text]


class Regression(_SequenceTask):
    """A text or a pair -> a number (STS-B, SICK relatedness), trained with the mean squared error."""

    name = "regression"

    def _parse_label(self, values: Sequence[Any], location: str) -> float:
        (value,) = values
        number = parse_number(value)
        if number is None:
            raise CtxError(
                f"{value!r} is not a finite number.",
                location=location,
                hint="correct the line, pass another --label_column, or use the task sequence-classification.",
            )
        return number

    def _placeholder_label(self) -> float:
        return 0.0

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set a single label without a name, and the fields for two texts."""
        self._set_pair_fields(config, train)
        config.num_labels = 1
        config.problem_type = "regression"

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenize the examples."""
        return self._encode(examples, [example.label for example in examples], tokenizer)

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[float]:
        """The number that the model returns for each example."""
        return [float(output["logits"].item()) for output in outputs]

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Texts and the predicted number."""
        values = self.decode(examples, encoded, outputs)
        return [{**_inputs(example), "value": value} for example, value in zip(examples, values, strict=True)]

    def score(self, examples: Examples, predictions: Sequence[float]) -> dict[str, float]:
        """Pearson and Spearman correlation (0 for constant predictions), mean squared error."""
        return metrics.regression_scores(predictions, [example.label for example in examples])

    def constant_prediction(self, examples: Examples, predictions: Sequence[float]) -> float | None:
        """The mean of the predictions if their standard deviation is below 1% of the labels' standard deviation."""
        deviation, expected = np.std(predictions), np.std([example.label for example in examples])
        return float(np.mean(predictions)) if deviation < expected / 100 else None

    def baseline(self, train: Examples, validation: Examples) -> list[float]:
        """The mean of the training targets."""
        return [float(np.mean([example.label for example in train]))] * len(validation)
