"""Prediction of words from their context windows (Mikolov et al. 2013a, 2013b): the objectives of word2vec."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least, collator_options
from hf_ctxmodels.objectives.components.features import check_token_ids, feature_keys
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import DOCUMENTS_PER_BATCH, tokenized_batches
from hf_ctxmodels.objectives.static import window_sampling as window_draws
from hf_ctxmodels.objectives.static.word_frequencies import (
    HuffmanTree,
    NoiseDistribution,
    subsampling_probabilities,
    word_counts,
)

_COMPILED = "hf_ctxmodels.objectives.static.window_kernels"
Output = Literal["negative-sampling", "hierarchical-softmax"]


@dataclass
class DataCollatorForWindowPrediction(PaddingCollator):
    """Subsamples frequent words, and draws a window size for every kept word and negatives.

    Windows are taken over the kept words, as in the released code, so subsampling widens them. All draws for example i
    in epoch e depend on (seed, e, i) only. Short examples are concatenated to rows as long as the longest example, with
    padding between them.

    Each feature holds:
        input_ids: (words,) without special tokens.
        example_index, epoch: Integers that seed the draws.

    Returns, with a width that is a multiple of `block`:
        input_ids, attention_mask: (rows, width).
        labels: (rows, width) the same words, -100 at padding.
        windows: (rows, width) context words on either side, 1 to `window`.
        negatives: (rows, width / block, shared_negatives), 0 at padding; or for hierarchical softmax
        paths, codes: (rows, width / block, block, depth), see `HuffmanTree`.

    Args:
        tokenizer: With `counts` (see `CtxWordTokenizer`) and a padding token.
        output, window, subsampling, noise_power, block, shared_negatives: See `WindowPredictionOptions`.
        seed: Seed of all draws.

    Raises:
        CtxError: The tokenizer has no word counts.

    Example:
        >>> collate = DataCollatorForWindowPrediction(tokenizer, seed=1)
        >>> batch = collate([{"input_ids": tokenizer("a cat sat").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels', 'negatives', 'windows']
    """

    output: Output = "negative-sampling"
    window: int = 5
    subsampling: float = 1e-3
    noise_power: float = 0.75
    block: int = 1
    shared_negatives: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts = word_counts(self.tokenizer)
        self.kept = subsampling_probabilities(self.counts, self.subsampling)
        self.tree = HuffmanTree(self.counts) if self.output == "hierarchical-softmax" else None

    @cached_property
    def draws(self) -> ModuleType:
        """The module of random draws: compiled if numba is installed, else with numpy."""
        return import_module(_COMPILED if find_spec("numba") else window_draws.__name__)

    @cached_property
    def noise(self) -> NoiseDistribution:
        """The distribution of the negatives."""
        return NoiseDistribution(self.counts, self.noise_power)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"], dtype=np.int64) for feature in features]
        ids, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
        if not lengths.all():
            raise CtxError("A row holds no word.", hint="leave out rows without words.")
        check_token_ids(ids, len(self.kept))
        keys = feature_keys(features, self.seed, len(_Draw))
        ids, lengths = self.draws.keep(ids, lengths, keys[_Draw.DROPPED], self.kept, self.counts)
        first, shape = self._layout(lengths)
        padding = self.tokenizer.pad_token_id
        columns = self.draws.spread(ids, lengths, first, keys[_Draw.WINDOW], self.window, shape[0] * shape[1], padding)
        names = ("input_ids", "attention_mask", "labels", "windows")
        batch = {name: column.reshape(shape) for name, column in zip(names, columns, strict=True)}
        targets = self._paths(batch) if self.tree else self._negatives(lengths, first, keys[_Draw.NEGATIVES], shape)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in (batch | targets).items()}

    def _negatives(
        self, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, shape: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        blocks, each = shape[1] // self.block, self.shared_negatives
        own, begin = -(-lengths // self.block), first // self.block
        drawn = self.draws.negatives(own, begin, keys, self.noise.table, each, shape[0] * blocks)
        return {"negatives": drawn.reshape(shape[0], blocks, each)}

    def _paths(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert self.tree is not None
        ids, mask = batch["input_ids"], batch["attention_mask"]
        paths = np.where(mask[..., None], self.tree.paths[ids], -1)
        depth = int((paths >= 0).any((0, 1)).sum())
        shape = (len(ids), ids.shape[1] // self.block, self.block, depth)
        tables = {"paths": paths, "codes": self.tree.codes[ids]}
        return {name: table[..., :depth].reshape(shape) for name, table in tables.items()}

    def _layout(self, lengths: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """(examples,) start of each example in the flattened batch, and the batch's shape.

        An example begins at a block boundary, at least `window` positions after the one before.
        """
        width = -(-int(lengths.max()) // self.block) * self.block
        first, row, start = [], 0, 0
        for length in lengths.tolist():
            if start + length > width:
                row, start = row + 1, 0
            first.append(row * width + start)
            start += -(-(length + self.window) // self.block) * self.block
        return np.array(first), (row + 1, width)


class _Draw(IntEnum):
    """The random draws for an example."""

    DROPPED = 0
    WINDOW = 1
    NEGATIVES = 2


@dataclass(frozen=True)
class WindowPredictionOptions:
    """Options of `SkipGram` and `ContinuousBagOfWords`; the defaults are those of the released code."""

    output: Output = flag("negative-sampling", "Loss: negative-sampling or hierarchical-softmax.")
    window: int = flag(5, "Largest window on either side; each word's is drawn uniformly from 1 to this.")
    negative: int = flag(5, "Negatives per prediction.")
    subsampling: float = flag(1e-3, "Subsampling threshold: relative frequency above which words are dropped; 0: none.")
    noise_power: float = flag(0.75, "Negatives are drawn in proportion to this power of the counts.")
    block: int = flag(1, "Adjacent words that share their negatives; on a GPU, or without numba, 16 is faster.")
    shared_negatives: int = flag(5, "Negatives drawn for each block; with a block of 16, use 16.")

    def __post_init__(self) -> None:
        sizes = ("window", "negative", "block", "shared_negatives")
        check_at_least(1, **{name: getattr(self, name) for name in sizes})
        check_at_least(0, subsampling=self.subsampling)


class WindowPrediction(Objective):
    """Rows of consecutive known words of one document; unknown words are left out, as in the released code.

    Sentence boundaries are ignored: the text is cut every `max_length` words (1000 in the released code).

    | document | row | targets |
    |---|---|---|
    | running text | up to `max_length` known words | the words kept by subsampling |
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = WindowPredictionOptions
    collate: DataCollatorForWindowPrediction
    architecture: ClassVar[str]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        options = collator_options(DataCollatorForWindowPrediction, self.options)
        self.collate = DataCollatorForWindowPrediction(tokenizer, seed=seed, **options)
        self.baseline = replace(self.baseline, scores=self._frequency_scores)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The model's architecture, loss, largest window and number of negatives."""
        shared = {name: getattr(self.options, name) for name in ("output", "window", "negative")}
        return {"architecture": self.architecture, **shared}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids. A single remaining word, which has no context, is left out."""
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, False):
            for document in batch:
                words = document.ids[document.ids != self.tokenizer.unk_token_id]
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                self.statistics["unknown_tokens"] += len(document.ids) - len(words)
                for start in range(0, len(words) - 1, self.max_length):
                    yield {"input_ids": words[start : start + self.max_length]}

    def _frequency_scores(self, counts: np.ndarray) -> np.ndarray:
        """See `BaselinePolicy.scores`: the logits of least loss that do not depend on the input."""
        seen = counts * self.collate.kept
        if self.collate.tree is not None:
            return self.collate.tree.scores(seen)
        noise = np.maximum(self.options.negative * self.collate.noise.probabilities, 1e-12)
        return np.log((seen + 1e-3) / seen.sum()) - np.log(noise)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        words = batch["labels"] != IGNORE_INDEX
        return {
            "words": int(words.sum()),
            "windows": int((batch["windows"] * words).sum()),
            "negatives": batch["negatives"].numel() if "negatives" in batch else 0,
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        words = max(1, counts["words"])
        return {"mean_window": counts["windows"] / words, "negatives_per_word": counts["negatives"] / words}


class SkipGram(WindowPrediction):
    """Skip-gram: each context word predicts the centre word of its window by itself.

    References: Mikolov et al. 2013a, section 3.2; 2013b, section 2, for negatives, hierarchical softmax and
    subsampling.
    Related: `ContinuousBagOfWords` averages the context, which is faster and worse for rare words; `Cooccurrence` fits
    counts.

    Example:
        >>> SkipGram(tokenizer, max_length=1000, seed=0, window=5, negative=5)
    """

    architecture = "skip-gram"


class ContinuousBagOfWords(WindowPrediction):
    """Continuous bag of words: the mean of the context words predicts the centre word of the window.

    References: Mikolov et al. 2013a, section 3.1.
    Related: `SkipGram` predicts from each context word by itself.

    Example:
        >>> ContinuousBagOfWords(tokenizer, max_length=1000, seed=0, output="hierarchical-softmax")
    """

    architecture = "cbow"
