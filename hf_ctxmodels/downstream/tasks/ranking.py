"""Relevance ranking: a query and its candidates -> the candidates in order of relevance (WikiQA, QNLI in MT-DNN)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForMultipleChoice, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import Row, read_table
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import Encoded, Feature, Logits, Task, get_texts


@dataclass(frozen=True)
class RankingExample:
    """A query, its candidates, and whether each candidate is relevant."""

    query: str
    candidates: tuple[str, ...]
    relevant: tuple[bool, ...]
    location: str


Examples = Sequence[RankingExample]


class PaddedChoiceCollator(DataCollatorForMultipleChoice):
    """Batches of features with different numbers of choices, padded with copies of the first choice."""

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """The batch of `DataCollatorForMultipleChoice`, and `choice_mask` (batch, choices), 0 at padding choices."""
        num_choices = torch.tensor([len(feature["input_ids"]) for feature in features])
        max_choices = int(num_choices.max())
        padded = [
            {
                name: value if name == "labels" else [*value, *[value[0]] * (max_choices - len(value))]
                for name, value in feature.items()
            }
            for feature in features
        ]
        choice_mask = (torch.arange(max_choices) < num_choices[:, None]).long()
        return {**super().__call__(padded), "choice_mask": choice_mask}


class Ranking(Task[RankingExample]):
    """Relevance ranking of the candidates of a query: the head scores each pair (query, candidate).

    The loss is the negative log probability of a relevant candidate in the softmax over this candidate and the
    irrelevant candidates of the query (Liu et al. 2019, arXiv 1901.11504, equations 5, 8 and 9, the released code).

    Files are tables with one row for each candidate: query, candidate (`--text_columns query,candidate`) and label, 1
    if it is relevant, else 0. The rows of a query must be consecutive, with a relevant and an irrelevant candidate; a
    query with several relevant candidates gives one feature for each of them.
    """

    name = "ranking"
    auto_class = "AutoModelForMultipleChoice"
    collator_class = PaddedChoiceCollator
    required_inputs = ("choice_mask",)

    def read_file(self, file: str) -> list[RankingExample]:
        """Read the examples of a file."""
        label_column = self.arguments.label_column or "label"
        examples = []
        for query, candidates, rows in self._groups(file, label_column):
            labels = [str(row.values[label_column]).strip() for row in rows]
            for row, label in zip(rows, labels, strict=True):
                if label not in ("0", "1"):
                    raise CtxError(
                        f"The label {row.values[label_column]!r} is neither 1, for a relevant candidate, nor 0.",
                        location=row.location,
                        hint="correct the label, or pass another --label_column.",
                    )
            if len(set(labels)) < 2:
                raise CtxError(
                    f"{'All' if labels[0] == '1' else 'None'} of the {len(rows)} candidates of a query are relevant: "
                    f"{query[:60]!r}.",
                    location=rows[0].location,
                    hint="remove the query: ranking needs a relevant and an irrelevant candidate.",
                )
            relevant = tuple(label == "1" for label in labels)
            examples.append(RankingExample(query, candidates, relevant, rows[0].location))
        return examples

    def read_unlabeled(self, file: str) -> list[RankingExample]:
        """A table with queries and candidates; the first candidate of a query is marked as the relevant one."""
        return [
            RankingExample(query, candidates, (True, *[False] * (len(rows) - 1)), rows[0].location)
            for query, candidates, rows in self._groups(file)
        ]

    def _groups(self, file: str, *label_columns: str) -> list[tuple[str, tuple[str, ...], list[Row]]]:
        """Query, candidates and rows of each query; raises CtxError if the rows are not consecutive."""
        columns = self._columns("text_columns", "query,candidate", 2)
        groups: dict[str, list[Row]] = {}
        previous = None
        for row in read_table(file, [*columns, *label_columns], label_names=False):
            query = get_texts(row, columns)[0]
            if query != previous and query in groups:
                raise CtxError(
                    f"The rows of a query are not consecutive: {query[:60]!r}.",
                    location=f"{row.location}, first at {groups[query][0].location}",
                    hint="sort the rows by query.",
                )
            groups.setdefault(query, []).append(row)
            previous = query
        return [(query, tuple(row.values[columns[1]] for row in rows), rows) for query, rows in groups.items()]

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Features are (choices, length) lists: a relevant candidate (`labels` is 0), then the irrelevant candidates.
        Origins are (example index, indices of the choices among its candidates)."""
        pairs = [(example.query, candidate) for example in examples for candidate in example.candidates]
        encoding = tokenizer(*map(list, zip(*pairs)), truncation="longest_first", max_length=self.arguments.max_length)
        features: list[Feature] = []
        origins = []
        offset = 0
        for example_index, example in enumerate(examples):
            irrelevant = [index for index, is_relevant in enumerate(example.relevant) if not is_relevant]
            for relevant in (index for index, is_relevant in enumerate(example.relevant) if is_relevant):
                choices = [relevant, *irrelevant]
                columns = {name: [encoding[name][offset + index] for index in choices] for name in encoding}
                features.append({**columns, "labels": 0})
                origins.append((example_index, choices))
            offset += len(example.candidates)
        return Encoded(features, origins)

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[list[float]]:
        """The scores of each example's candidates."""
        scores = [[0.0] * len(example.candidates) for example in examples]
        for (example_index, choices), output in zip(encoded.origins, outputs, strict=True):
            for index, score in zip(choices, np.asarray(output["logits"]).tolist()):  # further scores are padding
                scores[example_index][index] = score
        return scores

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Query, candidates, their scores, and the indices of the candidates from the best one on."""
        return [
            {
                "query": example.query,
                "candidates": list(example.candidates),
                "scores": scores,
                "ranking": sorted(range(len(scores)), key=lambda index: -scores[index]),
            }
            for example, scores in zip(examples, self.decode(examples, encoded, outputs), strict=True)
        ]

    def score(self, examples: Examples, predictions: Sequence[Sequence[float]]) -> dict[str, float]:
        """Mean reciprocal rank of the first relevant candidate, and the share of queries with rank 1."""
        return metrics.ranking_scores(predictions, [example.relevant for example in examples])

    def baseline(self, train: Examples, validation: Examples) -> list[list[float]]:
        """Share of relevant training candidates at each position."""
        max_candidates = max(len(example.candidates) for example in [*train, *validation])
        num_relevant, num_candidates = np.zeros(max_candidates), np.zeros(max_candidates)
        for example in train:
            num_relevant[: len(example.relevant)] += example.relevant
            num_candidates[: len(example.relevant)] += 1
        shares = (num_relevant / np.maximum(num_candidates, 1)).tolist()
        return [shares[: len(example.candidates)] for example in validation]

    def record(self, example: RankingExample, prediction: list[float]) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return {**vars(example), "scores": prediction}
