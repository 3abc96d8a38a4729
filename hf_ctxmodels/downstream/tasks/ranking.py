"""Relevance ranking: a query and its candidates -> the candidates in order of relevance (WikiQA, QNLI in MT-DNN)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import DataCollatorForMultipleChoice, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import Row, read_table
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import Collator, Encoded, Feature, FeatureCollator, Logits, Task, get_texts


@dataclass(frozen=True)
class RankingExample:
    """A query, its candidates, and which of them are relevant."""

    query: str
    candidates: tuple[str, ...]
    relevant: tuple[bool, ...]
    where: str


class Ranking(Task[RankingExample]):
    """The head scores each pair (query, candidate); the loss is the negative log probability of a relevant candidate
    in the softmax over it and the query's candidates that are not relevant (Liu et al. 2019, arXiv 1901.11504,
    equations 5 and 6, with a score that is not squashed, as in their code).

    Files are tables with a row for each candidate: query, candidate (`--text_columns query,candidate`) and label, 1 if
    it is relevant and else 0. The rows of a query stand together, in any number. A query with several relevant
    candidates is an example with each of them; one without a relevant candidate, or with no other, is an error.

    Predictions are scores. The baseline scores a candidate by how often the one at its place is relevant in training.
    """

    name: ClassVar[str] = "ranking"
    auto_class: ClassVar[str] = "AutoModelForMultipleChoice"
    required_inputs: ClassVar[tuple[str, ...]] = ("choice_mask",)

    def read_file(self, file: str) -> list[RankingExample]:
        """See `Task.read_file`."""
        columns = self._columns(self.arguments.text_columns, "query,candidate")
        label = self.arguments.label_column or "label"
        if len(columns) != 2:
            raise CtxError(
                f"{len(columns)} text columns.",
                location="--text_columns",
                hint="give two: that of the query and that of the candidate.",
            )
        groups: dict[str, list[Row]] = {}
        previous = None
        for row in read_table(file, [*columns, label]):
            query = get_texts(row, columns)[0]
            if query != previous and query in groups:
                raise CtxError(
                    f"The query stands in two places: {query[:60]!r}.",
                    location=f"{row.where}, first at {groups[query][0].where}",
                    hint="sort the rows, so that those of a query stand together.",
                )
            groups.setdefault(query, []).append(row)
            previous = query
        return [_ranked(query, rows, columns[1], label) for query, rows in groups.items()]

    def configure(
        self, config: PreTrainedConfig, train: Sequence[RankingExample], validation: Sequence[RankingExample]
    ) -> None:
        """The head scores any number of candidates, so there is nothing to set."""

    def encode(self, examples: Sequence[RankingExample], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Features are (choices, length) lists, a relevant candidate first, `labels` 0; an example has one for each.

        Origins are (example index, indices of the choices among its candidates).
        """
        pairs = [(example.query, candidate) for example in examples for candidate in example.candidates]
        encoding = tokenizer(*map(list, zip(*pairs)), truncation="longest_first", max_length=self.arguments.max_length)
        features: list[Feature] = []
        origins = []
        first = 0
        for number, example in enumerate(examples):
            others = [place for place, relevant in enumerate(example.relevant) if not relevant]
            for place in (place for place, relevant in enumerate(example.relevant) if relevant):
                chosen = [place, *others]
                rows = {name: [encoding[name][first + each] for each in chosen] for name in encoding}
                features.append({**rows, "labels": 0})
                origins.append((number, chosen))
            first += len(example.candidates)
        return Encoded(features, origins)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """See `Task.collator`; `choice_mask` (batch, choices) is 0 behind a row's last candidate."""
        return FeatureCollator(PaddedChoiceCollator(tokenizer))

    def decode(
        self, examples: Sequence[RankingExample], encoded: Encoded, outputs: Sequence[Logits]
    ) -> list[list[float]]:
        """The scores of each example's candidates."""
        scores = [[0.0] * len(example.candidates) for example in examples]
        for (number, chosen), output in zip(encoded.origins, outputs, strict=True):
            for place, score in zip(chosen, np.asarray(output["logits"]).tolist()):  # the others are padding
                scores[number][place] = score
        return scores

    def score(self, examples: Sequence[RankingExample], predictions: Sequence[Sequence[float]]) -> dict[str, float]:
        """Mean reciprocal rank of the first relevant candidate, and the share of queries that have it at rank 1."""
        return metrics.ranking(predictions=predictions, references=[example.relevant for example in examples])

    def baseline(self, train: Sequence[RankingExample], validation: Sequence[RankingExample]) -> list[list[float]]:
        """Scores by place, see the class."""
        widest = max(len(example.candidates) for example in [*train, *validation])
        relevant, number = np.zeros(widest), np.zeros(widest)
        for example in train:
            relevant[: len(example.relevant)] += example.relevant
            number[: len(example.relevant)] += 1
        shares = (relevant / np.maximum(number, 1)).tolist()
        return [shares[: len(example.candidates)] for example in validation]

    def record(self, example: RankingExample, prediction: list[float]) -> dict[str, Any]:
        """See `Task.record`."""
        return {
            "where": example.where,
            "query": example.query,
            "candidates": list(example.candidates),
            "relevant": list(example.relevant),
            "scores": prediction,
        }


class PaddedChoiceCollator:
    """Batches of rows with different numbers of choices: short ones repeat their first choice, which is not read.

    Args:
        tokenizer: It pads the choices' tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._collate = DataCollatorForMultipleChoice(tokenizer)

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """`DataCollatorForMultipleChoice`'s batch, and `choice_mask` (batch, choices), 0 at the repeated ones."""
        sizes = torch.tensor([len(feature["input_ids"]) for feature in features])
        widest = int(sizes.max())
        filled = [
            {
                name: value if name == "labels" else [*value, *[value[0]] * (widest - len(value))]
                for name, value in feature.items()
            }
            for feature in features
        ]
        return {**self._collate(filled), "choice_mask": (torch.arange(widest) < sizes[:, None]).long()}


def _ranked(query: str, rows: list[Row], candidate: str, label: str) -> RankingExample:
    """A query of its rows; raises CtxError for a wrong label, or labels that rank nothing."""
    labels = []
    for row in rows:
        value = str(row.values[label]).strip()
        if value not in ("0", "1"):
            raise CtxError(
                f"The label {row.values[label]!r} is neither 1, for a relevant candidate, nor 0.",
                location=row.where,
                hint="correct it, or choose another column with --label_column.",
            )
        labels.append(value == "1")
    if not any(labels) or all(labels):
        raise CtxError(
            f"Of the {len(rows)} candidates of a query {'all are' if any(labels) else 'none is'} relevant: "
            f"{query[:60]!r}.",
            location=rows[0].where,
            hint="leave the query out: a ranking needs a relevant candidate and another one.",
        )
    return RankingExample(query, tuple(row.values[candidate] for row in rows), tuple(labels), rows[0].where)
