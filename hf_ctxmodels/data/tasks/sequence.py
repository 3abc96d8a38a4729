"""Sequence classification and regression: a text or a pair of texts -> a label or a number."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.tasks import metrics
from hf_ctxmodels.data.tasks.base import Encoded, LabelledTask, Logits, Task, read_rows, sorted_labels, text_of
from hf_ctxmodels.data.tasks.demo import demo_rows


@dataclass(frozen=True)
class SequenceExample:
    """One text, or two, and what is to be predicted of it: a label's name or a number."""

    texts: tuple[str, ...]
    target: Any
    where: str


def _read(task: Task, file: str, split: str) -> list[SequenceExample]:
    """Examples with the label as it stands in the file."""
    text_columns = task._columns(task.arguments.text_columns, "text")
    label_column = task.arguments.label_column or "label"
    if len(text_columns) > 2:
        raise CtxError(
            f"{len(text_columns)} text columns.", location="--text_columns", hint="give one, or two for a pair."
        )
    rows = demo_rows(split) if file == "demo" else read_rows(file, [*text_columns, label_column])
    return [SequenceExample(text_of(row, text_columns), row.values[label_column], row.where) for row in rows]


def _encode(
    examples: Sequence[SequenceExample], targets: list[Any], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Encoded:
    """Features of single texts or pairs (the longer one of a pair is cut first); origins are example indices."""
    columns = [list(column) for column in zip(*(example.texts for example in examples), strict=True)]
    encoding = tokenizer(*columns, truncation="longest_first", max_length=max_length)
    features = [{name: encoding[name][i] for name in encoding} | {"labels": targets[i]} for i in range(len(examples))]
    return Encoded(features, list(range(len(examples))))


def _record(example: SequenceExample, prediction: Any) -> dict[str, Any]:
    return {"where": example.where, "label": example.target, "prediction": prediction}


class SequenceClassification(LabelledTask[SequenceExample]):
    """A text or a pair -> one of several labels (CoLA, SST-2, RTE, SNLI, ...)."""

    name: ClassVar[str] = "sequence-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    def read(self, file: str, split: str) -> list[SequenceExample]:
        """See `Task.read`."""
        examples = _read(self, file, split)
        for example in examples:
            if example.target is None or isinstance(example.target, (list, dict)) or str(example.target).strip() == "":
                raise CtxError(
                    f"{example.target!r} is not a label; expected a name or a number.",
                    location=example.where,
                    hint="mend the line, or choose another column with --label_column.",
                )
        return [SequenceExample(example.texts, str(example.target), example.where) for example in examples]

    def read_unlabelled(self, file: str) -> list[SequenceExample]:
        """See `Task.read_unlabelled`: a table with the text's columns."""
        columns = self._columns(self.arguments.text_columns, "text")
        rows = read_rows(file, columns)
        return [SequenceExample(text_of(row, columns), self.labels[0], row.where) for row in rows]

    def configure(
        self, config: PreTrainedConfig, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]
    ) -> None:
        """See `Task.configure`."""
        labels = sorted_labels({example.target for example in train})
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
        targets = [self._label_id(example.target, example.where) for example in examples]
        return _encode(examples, targets, tokenizer, self.arguments.max_length)

    def decode(self, examples: Sequence[SequenceExample], encoded: Encoded, outputs: Sequence[Logits]) -> list[str]:
        """See `Task.decode`."""
        return [self.labels[int(output["logits"].argmax())] for output in outputs]

    def score(self, examples: Sequence[SequenceExample], predictions: Sequence[str]) -> dict[str, float]:
        """Accuracy, F1 (of the second label when there are two; and the mean over labels) and Matthews correlation."""
        sides: dict[str, Any] = {
            "predictions": [self.labels.index(prediction) for prediction in predictions],
            "references": [self.labels.index(example.target) for example in examples],
        }
        scores = metrics.accuracy(**sides)
        if len(self.labels) == 2:
            scores |= metrics.f1(**sides)
        scores["f1_macro"] = metrics.f1(**sides, average="macro")["f1"]
        return scores | metrics.matthews_correlation(**sides)

    def baseline(self, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]) -> list[str]:
        """The most frequent label of the training file."""
        majority = Counter(example.target for example in train).most_common(1)[0][0]
        return [majority] * len(validation)

    def record(self, example: SequenceExample, prediction: str) -> dict[str, Any]:
        """See `Task.record`."""
        return _record(example, prediction)


class Regression(Task[SequenceExample]):
    """A text or a pair -> a number (STS-B, SICK relatedness), trained with the mean squared error."""

    name: ClassVar[str] = "regression"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    def read(self, file: str, split: str) -> list[SequenceExample]:
        """See `Task.read`."""
        examples = []
        for example in _read(self, file, split):
            try:
                target = float(example.target)
            except (TypeError, ValueError):
                target = float("nan")
            if not np.isfinite(target):
                raise CtxError(
                    f"{example.target!r} is not a finite number.",
                    location=example.where,
                    hint="mend the line, choose another --label_column, or use --task sequence-classification.",
                )
            examples.append(SequenceExample(example.texts, target, example.where))
        return examples

    def configure(
        self, config: PreTrainedConfig, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]
    ) -> None:
        """See `Task.configure`."""
        config.num_labels = 1
        config.problem_type = "regression"

    def encode(self, examples: Sequence[SequenceExample], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """See `Task.encode`; origins are example indices."""
        return _encode(examples, [example.target for example in examples], tokenizer, self.arguments.max_length)

    def decode(self, examples: Sequence[SequenceExample], encoded: Encoded, outputs: Sequence[Logits]) -> list[float]:
        """See `Task.decode`."""
        return [float(output["logits"].item()) for output in outputs]

    def score(self, examples: Sequence[SequenceExample], predictions: Sequence[float]) -> dict[str, float]:
        """Pearson and Spearman correlation (0 for constant predictions: they explain nothing), mean squared error."""
        sides = {"predictions": predictions, "references": [example.target for example in examples]}
        scores = metrics.pearsonr(**sides) | metrics.spearmanr(**sides)
        return {name: float(np.nan_to_num(value)) for name, value in scores.items()} | metrics.mse(**sides)

    def baseline(self, train: Sequence[SequenceExample], validation: Sequence[SequenceExample]) -> list[float]:
        """The mean of the training targets."""
        mean = float(np.mean([example.target for example in train]))
        return [mean] * len(validation)

    def record(self, example: SequenceExample, prediction: float) -> dict[str, Any]:
        """See `Task.record`."""
        return _record(example, prediction)
