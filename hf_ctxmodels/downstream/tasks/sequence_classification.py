"""Sequence classification and regression: a text or a pair of texts -> a label or a number."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import DataCollatorForMultipleChoice, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import Row, read_table
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import (
    Collator,
    Encoded,
    FeatureCollator,
    LabelledTask,
    Logits,
    Task,
    get_texts,
    most_frequent,
    sorted_labels,
)
from hf_ctxmodels.downstream.tasks.demo_data import demo_rows


@dataclass(frozen=True)
class SequenceExample:
    """One text or two, and the label: a name or a number."""

    texts: tuple[str, ...]
    label: Any
    where: str


class _SequenceTask(Task[SequenceExample]):
    """Texts or pairs with a label of any kind."""

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    reads: ClassVar[tuple[str, ...]] = (*Task.reads, "both_orders")

    @abstractmethod
    def _parse_label(self, value: Any, where: str) -> Any:
        """The label of a row; raises CtxError."""

    def _examples(self, rows: Sequence[Row]) -> list[SequenceExample]:
        text_columns, label_column = self._text_columns(), self.arguments.label_column or "label"
        return [
            SequenceExample(
                get_texts(row, text_columns), self._parse_label(row.values[label_column], row.where), row.where
            )
            for row in rows
        ]

    def _text_columns(self) -> list[str]:
        columns = self._columns(self.arguments.text_columns, "text")
        if len(columns) > 2:
            raise CtxError(
                f"{len(columns)} text columns.", location="--text_columns", hint="give one, or two for a pair."
            )
        if self.arguments.both_orders and len(columns) != 2:
            raise CtxError(
                "Single texts have one order.",
                location="--both_orders",
                hint="give two --text_columns, or leave it out.",
            )
        return columns

    def read_file(self, file: str) -> list[SequenceExample]:
        """See `Task.read_file`."""
        return self._examples(read_table(file, [*self._text_columns(), self.arguments.label_column or "label"]))

    def read_demo(self, split: str) -> list[SequenceExample]:
        """See `Task.read_demo`."""
        return self._examples(demo_rows(split))

    def _encode(
        self, examples: Sequence[SequenceExample], targets: list[Any], tokenizer: PreTrainedTokenizerBase
    ) -> Encoded:
        """Features of texts or pairs (the longer one of a pair is truncated first); origins are example indices.

        With `both_orders` the tokens of a feature are two lists, of the pair and of the pair exchanged.
        """
        columns = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
        encoding = self._tokens(columns, tokenizer)
        if self.arguments.both_orders:
            exchanged = self._tokens(columns[::-1], tokenizer)
            encoding = {name: list(zip(encoding[name], exchanged[name], strict=True)) for name in encoding}
        features = [
            {name: encoding[name][i] for name in encoding} | {"labels": target} for i, target in enumerate(targets)
        ]
        return Encoded(features, list(range(len(examples))))

    def _tokens(self, columns: list[list[str]], tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
        return tokenizer(*columns, truncation="longest_first", max_length=self.arguments.max_length)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """See `Task.collator`."""
        if not self.arguments.both_orders:
            return super().collator(tokenizer)
        return FeatureCollator(DataCollatorForMultipleChoice(tokenizer))  # likewise several rows in a feature


class SequenceClassification(_SequenceTask, LabelledTask[SequenceExample]):
    """A text or a pair -> one of several labels (CoLA, SST-2, RTE, SNLI, ...)."""

    name: ClassVar[str] = "sequence-classification"

    def _parse_label(self, value: Any, where: str) -> str:
        if value is None or isinstance(value, (list, dict)) or str(value).strip() == "":
            raise CtxError(
                f"{value!r} is not a label; expected a name or a number.",
                location=where,
                hint="correct the line, or choose another column with --label_column.",
            )
        return str(value)

    def read_unlabelled(self, file: str) -> list[SequenceExample]:
        """See `Task.read_unlabelled`: a table with the columns of texts."""
        columns = self._text_columns()
        return [
            SequenceExample(get_texts(row, columns), self.labels[0], row.where) for row in read_table(file, columns)
        ]

    def configure(
        self, config: PreTrainedConfig, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]
    ) -> None:
        """See `Task.configure`."""
        labels = sorted_labels({example.label for example in train})
        if len(labels) < 2:
            raise CtxError(
                f"All training examples have the label {labels[0]!r}; a classifier needs two labels or more.",
                location="--train_file",
                hint="add examples of another label, or choose another column with --label_column.",
            )
        self._set_labels(config, labels)
        config.problem_type = "single_label_classification"

    def encode(self, examples: Sequence[SequenceExample], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """See `Task.encode`; origins are example indices."""
        targets = [self._label_id(example.label, example.where) for example in examples]
        return self._encode(examples, targets, tokenizer)

    def decode(self, examples: Sequence[SequenceExample], encoded: Encoded, outputs: Sequence[Logits]) -> list[str]:
        """See `Task.decode`."""
        return [self.labels[int(output["logits"].argmax())] for output in outputs]

    def score(self, examples: Sequence[SequenceExample], predictions: Sequence[str]) -> dict[str, float]:
        """Accuracy, F1 (of the second one of two labels; and the mean over labels) and Matthews correlation."""
        sides: dict[str, Any] = {
            "predictions": [self.labels.index(prediction) for prediction in predictions],
            "references": [self.labels.index(example.label) for example in examples],
        }
        scores = metrics.accuracy(**sides)
        if len(self.labels) == 2:
            scores |= metrics.f1(**sides)
        scores["f1_macro"] = metrics.f1(**sides, average="macro")["f1"]
        return scores | metrics.matthews_correlation(**sides)

    def baseline(self, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]) -> list[str]:
        """The most frequent label of the training file."""
        return [most_frequent(example.label for example in train)] * len(validation)


class Regression(_SequenceTask):
    """A text or a pair -> a number (STS-B, SICK relatedness), trained with the mean squared error."""

    name: ClassVar[str] = "regression"

    def _parse_label(self, value: Any, where: str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not np.isfinite(number):
            raise CtxError(
                f"{value!r} is not a finite number.",
                location=where,
                hint="correct the line, choose another --label_column, or use --task sequence-classification.",
            )
        return number

    def configure(
        self, config: PreTrainedConfig, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]
    ) -> None:
        """See `Task.configure`."""
        config.num_labels = 1
        config.problem_type = "regression"

    def encode(self, examples: Sequence[SequenceExample], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """See `Task.encode`; origins are example indices."""
        return self._encode(examples, [example.label for example in examples], tokenizer)

    def decode(self, examples: Sequence[SequenceExample], encoded: Encoded, outputs: Sequence[Logits]) -> list[float]:
        """See `Task.decode`."""
        return [float(output["logits"].item()) for output in outputs]

    def score(self, examples: Sequence[SequenceExample], predictions: Sequence[float]) -> dict[str, float]:
        """Pearson and Spearman correlation (0 for constant predictions), mean squared error."""
        sides = {"predictions": predictions, "references": [example.label for example in examples]}
        scores = metrics.pearsonr(**sides) | metrics.spearmanr(**sides)
        return {name: float(np.nan_to_num(value)) for name, value in scores.items()} | metrics.mse(**sides)

    def baseline(self, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]) -> list[float]:
        """The mean of the training targets."""
        return [float(np.mean([example.label for example in train]))] * len(validation)
