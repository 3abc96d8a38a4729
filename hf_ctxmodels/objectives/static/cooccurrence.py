"""Co-occurrence counts of words (Pennington et al. 2014): the objective of GloVe."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import DOCUMENTS_PER_BATCH, tokenized_batches
from hf_ctxmodels.objectives.static.cooccurrence_counter import CooccurrenceCounter


@dataclass
class DataCollatorForCooccurrence(PaddingCollator):
    """Pads rows of cells of the co-occurrence matrix.

    Each feature holds input_ids, context_ids (cells,) and cooccurrences (cells,) float.

    Returns: input_ids, attention_mask (batch, width) int64; labels (batch, width), the contexts, -100 at padding;
    cooccurrences (batch, width) float32, 1 at padding.

    Example:
        >>> collate = DataCollatorForCooccurrence(tokenizer)
        >>> ids, sums = np.array([2, 3]), np.array([1.5, 1.5])
        >>> row = {"input_ids": ids, "context_ids": ids[::-1], "cooccurrences": sums}
        >>> collate([row])["labels"]
        tensor([[3, 2]])
    """

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        padder = RowPadder([len(feature["input_ids"]) for feature in features], "right")
        values = np.ones(padder.filled.shape, dtype=np.float32)
        values[padder.filled] = np.concatenate([np.asarray(feature["cooccurrences"]) for feature in features])
        columns = {name: [np.asarray(feature[name]) for feature in features] for name in ("input_ids", "context_ids")}
        return {
            "input_ids": padder.pad(columns["input_ids"], self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": padder.pad(columns["context_ids"], IGNORE_INDEX),
            "cooccurrences": torch.from_numpy(values),
        }


@dataclass(frozen=True)
class CooccurrenceOptions:
    """Options of `Cooccurrence`; the defaults are those of the paper's section 4.2."""

    window: int = flag(10, "Largest distance in words.")
    symmetric: bool = flag(True, "Contexts on both sides; else on the left only.")
    distance_weighting: bool = flag(True, "Count 1 / distance for two words; else 1.")
    memory_cells: int = flag(50_000_000, "Cells to hold in memory, 12 bytes each; more are written to files.")

    def __post_init__(self) -> None:
        check_at_least(1, window=self.window, memory_cells=self.memory_cells)


class Cooccurrence(Objective):
    """GloVe's objective: fit the logarithms of co-occurrence counts.

    The whole text is counted once; a row is `max_length` cells of the co-occurrence matrix, in random order. There is
    no evaluation: counts grow with the size of the text, so the counts of held-out text are no targets.

    | document | row | targets |
    |---|---|---|
    | running text | words and their contexts, one pair per cell | the co-occurrence count of each pair |

    References: Pennington et al. 2014, sections 3 and 4.2.
    Related: `SkipGram` predicts the words of a window without counting first.

    Example:
        >>> Cooccurrence(tokenizer, max_length=1024, seed=0, window=10)
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = CooccurrenceOptions
    has_heldout_loss: ClassVar[bool] = False
    collate: DataCollatorForCooccurrence

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.collate = DataCollatorForCooccurrence(tokenizer)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, context_ids and cooccurrences."""
        own = self.options
        counter = CooccurrenceCounter(
            len(self.tokenizer),
            window=own.window,
            symmetric=own.symmetric,
            weighted=own.distance_weighting,
            memory_cells=own.memory_cells,
        )
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, False):
            counter.add(self._known_words(document.ids) for document in batch)
            self.statistics.update(documents=len(batch), tokens=sum(len(document.ids) for document in batch))
        rng = generator(self.seed, pass_index, 0, Stream.ORDER)
        rest: list[np.ndarray] = []
        for block in counter.cells(rng):
            self.statistics["cells"] += len(block[0])
            columns = [np.concatenate(pair) for pair in zip(rest, block, strict=True)] if rest else list(block)
            full = len(columns[0]) // self.max_length * self.max_length
            for start in range(0, full, self.max_length):
                yield _row([column[start : start + self.max_length] for column in columns])
            rest = [column[full:] for column in columns]
        if rest and len(rest[0]):
            yield _row(rest)

    def _known_words(self, ids: np.ndarray) -> np.ndarray:
        return ids[ids != self.tokenizer.unk_token_id]

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        cells = batch["labels"] != IGNORE_INDEX
        return {"cells": int(cells.sum()), "single_cells": int((cells & (batch["cooccurrences"] <= 1)).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {"single_cell_share": counts["single_cells"] / max(1, counts["cells"])}


def _row(columns: list[np.ndarray]) -> Example:
    return dict(zip(("input_ids", "context_ids", "cooccurrences"), columns, strict=True))
