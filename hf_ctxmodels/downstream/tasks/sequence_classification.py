"""Sequence classification and regression: a text or a pair of texts -> a label or a number."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from accelerate import PartialState
from scipy.special import softmax
from transformers import DataCollatorForMultipleChoice, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.demo_corpus import demo_file
from hf_ctxmodels.data.record_files import class_names
from hf_ctxmodels.data.table_files import Row, parse_number, read_table, read_texts, require_labels
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import (
    Collator,
    Encoded,
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
    """One text or a pair of texts, and the label: a name or a number."""

    texts: tuple[str, ...]
    label: Any
    location: str


Examples = Sequence[SequenceExample]


def _inputs(example: SequenceExample) -> dict[str, Any]:
    """The text or the two texts of an example, for `Task.results`."""
    return {"text": example.texts[0]} if len(example.texts) == 1 else {"texts": list(example.texts)}


class _SequenceTask(Task[SequenceExample]):
    """Single texts or pairs of texts with a label."""

    auto_class = "AutoModelForSequenceClassification"
    argument_names = (*Task.argument_names, "both_orders")

    def __init__(self, arguments: TaskArguments) -> None:
        super().__init__(arguments)
        self.both_orders = arguments.both_orders

    @abstractmethod
    def _parse_label(self, value: Any, location: str) -> Any:
        """The label in a row of the file; raises CtxError for an invalid value."""

    def _text_columns(self) -> list[str]:
        return self._columns("text_columns", "text", 1, 2)

    def read_file(self, file: str) -> list[SequenceExample]:
        """Read the examples of a file."""
        return self._examples(read_table(file, [*self._text_columns(), self.arguments.label_column or "label"]))

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
        columns, label = self._text_columns(), self.arguments.label_column or "label"
        require_labels(rows, label)
        return [
            SequenceExample(get_texts(row, columns), self._parse_label(row.values[label], row.location), row.location)
            for row in rows
        ]

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
        # a feature with both orders has the form of a multiple-choice feature
        return FeatureCollator(DataCollatorForMultipleChoice(tokenizer))

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

    def _parse_label(self, value: Any, location: str) -> str:
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
        labels = sorted({example.label for example in train})
        with suppress(ValueError):
            labels = sorted(labels, key=int)
        if len(labels) < 2:
            raise CtxError(
                f"All training examples have the label {labels[0]!r}; a classifier needs two labels or more.",
                location="--train_file",
                hint="add examples of another label, or pass another --label_column.",
            )
        labels = [*self.class_names] if set(labels) <= set(self.class_names) else labels
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


class Regression(_SequenceTask):
    """A text or a pair -> a number (STS-B, SICK relatedness), trained with the mean squared error."""

    name = "regression"

    def _parse_label(self, value: Any, location: str) -> float:
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
