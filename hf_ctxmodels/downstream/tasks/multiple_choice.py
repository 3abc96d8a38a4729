"""Multiple choice: a context and continuations or answers -> the index of the correct one (SWAG, RACE, COPA)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax
from transformers import DataCollatorForMultipleChoice, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import parse_number, read_table, require_labels
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import Encoded, Logits, Task, get_texts, most_frequent


@dataclass(frozen=True)
class MultipleChoiceExample:
    """A context, the choices, their common beginning (or ""), and the index of the correct choice."""

    context: str
    beginning: str
    choices: tuple[str, ...]
    label: int
    location: str


Examples = Sequence[MultipleChoiceExample]


class MultipleChoice(Task[MultipleChoiceExample]):
    """Choices of an answer or continuation; the head scores each pair (context, beginning + choice).

    `text_columns` are the context and, if the choices continue a sentence, its beginning (SWAG: `sent1,sent2`). The
    label is the index of the correct choice, from 0.
    """

    name = "multiple-choice"
    auto_class = "AutoModelForMultipleChoice"
    collator_class = DataCollatorForMultipleChoice
    argument_names = (*Task.argument_names, "choice_columns")

    def read_file(self, file: str) -> list[MultipleChoiceExample]:
        """Read the examples of a file."""
        return self._read(file, [self.arguments.label_column or "label"])

    def read_unlabeled(self, file: str) -> list[MultipleChoiceExample]:
        """A table with the text and choice columns."""
        return self._read(file, [])

    def _read(self, file: str, label_columns: list[str]) -> list[MultipleChoiceExample]:
        """The examples of a table; the label is 0 without a label column."""
        text_columns = self._columns("text_columns", "text", 1, 2)
        choice_columns = self._columns("choice_columns", "choices")
        examples: list[MultipleChoiceExample] = []
        rows = read_table(file, [*text_columns, *choice_columns, *label_columns], label_names=False)
        for column in label_columns:
            require_labels(rows, column)
        for row in rows:
            texts = get_texts(row, text_columns)
            values = [row.values[column] for column in choice_columns]
            choices = tuple(values[0]) if len(values) == 1 and isinstance(values[0], list) else tuple(values)
            expected = len(examples[0].choices) if examples else max(len(choices), 2)
            if len(choices) != expected or not all(isinstance(choice, str) for choice in choices):
                raise CtxError(
                    f"Expected {expected} strings as choices, as in the first line; got {choices!r}.",
                    location=row.location,
                    hint="pass --choice_columns a,b,..., or one .jsonl column of lists.",
                )
            value = row.values[label_columns[0]] if label_columns else 0
            label = parse_number(value)
            if label is None or label not in range(len(choices)):
                raise CtxError(
                    f"The label {value!r} is not an index of the {len(choices)} choices.",
                    location=row.location,
                    hint=f"use an integer from 0 to {len(choices) - 1}, or pass another --label_column.",
                )
            beginning = texts[1] if len(texts) == 2 else ""
            examples.append(MultipleChoiceExample(texts[0], beginning, choices, int(label), row.location))
        return examples

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Features are (choices, length) lists."""
        contexts = [example.context for example in examples for _ in example.choices]
        answers = [f"{example.beginning} {choice}".strip() for example in examples for choice in example.choices]
        encoding = tokenizer(contexts, answers, truncation="longest_first", max_length=self.arguments.max_length)
        features, start = [], 0
        for example in examples:
            stop = start + len(example.choices)
            features.append({name: encoding[name][start:stop] for name in encoding} | {"labels": example.label})
            start = stop
        return Encoded(features)

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[int]:
        """The index of the highest score."""
        return [int(np.asarray(output["logits"]).argmax()) for output in outputs]

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Context, index and text of the best choice, and the probabilities of the choices."""
        return [
            {
                "text": example.context,
                "choice": index,
                "choice_text": example.choices[index],
                "probabilities": softmax(output["logits"]).tolist(),
            }
            for example, index, output in zip(examples, self.decode(examples, encoded, outputs), outputs, strict=True)
        ]

    def score(self, examples: Examples, predictions: Sequence[int]) -> dict[str, float]:
        """Accuracy: share of the examples whose correct choice has the highest score."""
        return {"accuracy": metrics.accuracy(predictions, [example.label for example in examples])}

    def baseline(self, train: Examples, validation: Examples) -> list[int]:
        """The most frequent index of the training file."""
        return [most_frequent(example.label for example in train)] * len(validation)
