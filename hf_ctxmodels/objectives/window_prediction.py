"""Prediction of words from their context windows (Mikolov et al. 2013a, 2013b): the objectives of word2vec."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator
from hf_ctxmodels.objectives import window_sampling
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.features import check_token_ids, feature_keys
from hf_ctxmodels.objectives.window_sampling import (
    HuffmanTree,
    NoiseDistribution,
    subsampling_probabilities,
    word_counts,
)

_COMPILED = "hf_ctxmodels.objectives.window_kernels"
Output = Literal["negative-sampling", "hierarchical-softmax", "softmax"]


@dataclass
class DataCollatorForWindowPrediction(PaddingCollator):
    """Subsamples frequent words, and samples a window size for every remaining word and negatives.

    Windows are over the remaining words, as in the released code, so subsampling widens them. Short examples are
    concatenated to rows as long as the longest example, with padding between them.

    Each feature holds:
        input_ids: (words,) without special tokens.

    Returns, with a width that is a multiple of `block`:
        input_ids, attention_mask: (rows, width).
        labels: (rows, width) the same words, -100 at padding.
        windows: (rows, width) context words on either side, 1 to `window`.
        negatives: (rows, width / block, shared_negatives), 0 at padding; or for hierarchical softmax
        paths, codes: (rows, width / block, block, depth), see `HuffmanTree`; the full softmax needs neither.

    The tokenizer has `counts` (see `CtxWordTokenizer`); see `subsampling_probabilities` and `NoiseDistribution`.
    """

    output: Output = flag(
        "negative-sampling", "Loss: negative-sampling, hierarchical-softmax, or softmax over the whole vocabulary."
    )
    window: int = flag(5, "Maximum window on either side; each word's is uniform from 1 to this.")
    subsampling: float = flag(1e-3, "Subsampling threshold: relative frequency above which words are dropped; 0: none.")
    noise_power: float = flag(0.75, "Negatives are sampled in proportion to this power of the counts.")
    block: int = flag(1, "Adjacent words that share their negatives; on a GPU, or without numba, 16 is faster.")
    shared_negatives: int = flag(5, "Negatives sampled for each block; with a block of 16, use 16.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(get_args(Output), output=self.output)
        check_range(self, "window", "block", "shared_negatives", at_least=1)
        check_range(self, "subsampling", at_least=0)
        self.word_counts = word_counts(self.tokenizer)
        self.subsampling_probabilities = subsampling_probabilities(self.word_counts, self.subsampling)
        self.tree = HuffmanTree(self.word_counts) if self.output == "hierarchical-softmax" else None

    @cached_property
    def sampler(self) -> ModuleType:
        """The module of the sampling functions: compiled if numba is installed, else numpy."""
        return import_module(_COMPILED if find_spec("numba") else window_sampling.__name__)

    @cached_property
    def noise(self) -> NoiseDistribution:
        """The distribution of the negatives."""
        return NoiseDistribution(self.word_counts, self.noise_power)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Sample windows and negatives, and pad; see the class for their columns and the returned ones."""
        examples = [np.asarray(feature["input_ids"], dtype=np.int64) for feature in features]
        ids, lengths = np.concatenate(examples), np.array([len(example) for example in examples])
        if not lengths.all():
            raise CtxError("An example has no word.", hint="remove examples without words.")
        check_token_ids(ids, len(self.word_counts))
        subsampling_keys, window_keys, negative_keys = feature_keys(features, self.seed, uses=3)
        ids, lengths = self.sampler.subsample(
            ids, lengths, subsampling_keys, self.subsampling_probabilities, self.word_counts
        )
        first, (rows, width) = self._layout(lengths)
        columns = self.sampler.place_words(
            ids, lengths, first, window_keys, self.window, rows * width, self.tokenizer.pad_token_id
        )
        names = ("input_ids", "attention_mask", "labels", "windows")
        batch = {name: column.reshape(rows, width) for name, column in zip(names, columns, strict=True)}
        blocks = width // self.block
        if self.tree is not None:
            paths = np.where(batch["attention_mask"][..., None], self.tree.paths[batch["input_ids"]], -1)
            depth = int((paths >= 0).any((0, 1)).sum())
            for name, table in (("paths", paths), ("codes", self.tree.codes[batch["input_ids"]])):
                batch[name] = table[..., :depth].reshape(rows, blocks, self.block, depth)
        elif self.output == "negative-sampling":
            block_lengths, first_blocks = -(-lengths // self.block), first // self.block
            negatives = self.sampler.sample_negatives(
                block_lengths, first_blocks, negative_keys, self.noise.table, self.shared_negatives, rows * blocks
            )
            batch["negatives"] = negatives.reshape(rows, blocks, self.shared_negatives)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}

    def _layout(self, lengths: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """(examples,) start of each example in the flattened batch, and the batch's shape.

        An example begins at a block boundary, at least `window` positions after the previous one.
        """
        width = -(-int(lengths.max()) // self.block) * self.block
        first, row, start = [], 0, 0
        for length in lengths.tolist():
            if start + length > width:
                row, start = row + 1, 0
            first.append(row * width + start)
            start += -(-(length + self.window) // self.block) * self.block
        return np.array(first), (row + 1, width)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Words, context words and negatives."""
        words = batch["labels"] != IGNORE_INDEX
        return {
            "words": int(words.sum()),
            "windows": int((batch["windows"] * words).sum()),
            "negatives": batch["negatives"].numel() if "negatives" in batch else 0,
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Mean window, and negatives per word."""
        words = max(1, counts["words"])
        return {"mean_window": counts["windows"] / words, "negatives_per_word": counts["negatives"] / words}


@dataclass
class WindowPrediction(DataCollatorForWindowPrediction, Objective):
    """Base class of word2vec's objectives; unknown words are skipped, with the defaults of the released code.

    Sentence boundaries are ignored: the text is cut every `max_length` words (1000 in the released code).

    | document | example | targets |
    |---|---|---|
    | running text | up to `max_length` known words | the words that remain after subsampling |
    """

    auto_class = "AutoModelForPreTraining"
    architecture: ClassVar[str]
    negative: int = flag(5, "Negatives per prediction.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "negative", at_least=1)
        self.baseline = replace(self.baseline, scores=self._frequency_scores)
        names = ("architecture", "output", "window", "negative")
        self.config_fields = {name: getattr(self, name) for name in names}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids. A single remaining word, which has no context, is skipped."""
        for document in self.tokenized(documents):
            words = document.ids[document.ids != self.tokenizer.unk_token_id]
            self.statistics["unknown_tokens"] += len(document.ids) - len(words)
            for start in range(0, len(words) - 1, self.max_length):
                yield {"input_ids": words[start : start + self.max_length]}

    def _frequency_scores(self, counts: np.ndarray) -> np.ndarray:
        """See `BaselineOptions.scores`: the logits of minimum loss that do not depend on the input."""
        subsampled_counts = counts * self.subsampling_probabilities
        if self.tree is not None:
            return self.tree.scores(subsampled_counts)
        if self.output == "softmax":
            return np.log(subsampled_counts + 1e-3)
        noise = np.maximum(self.negative * self.noise.probabilities, 1e-12)
        return np.log((subsampled_counts + 1e-3) / subsampled_counts.sum()) - np.log(noise)


@dataclass
class SkipGram(WindowPrediction):
    """Skip-gram: each context word alone predicts the center word of its window.

    References: Mikolov et al. 2013a, section 3.2; 2013b, section 2, for the full softmax (equation 2), negatives,
    hierarchical softmax and subsampling.
    Related: `ContinuousBagOfWords` averages the context, which is faster and worse for rare words; `Cooccurrence` fits
    counts.

    Example:
        >>> SkipGram(tokenizer, max_length=1000, seed=0, window=5, negative=5)
    """

    architecture = "skip-gram"


@dataclass
class ContinuousBagOfWords(WindowPrediction):
    """Continuous bag of words: the mean of the context words predicts the center word of the window.

    References: Mikolov et al. 2013a, section 3.1.
    Related: `SkipGram` predicts from each context word alone.

    Example:
        >>> ContinuousBagOfWords(tokenizer, max_length=1000, seed=0, output="hierarchical-softmax")
    """

    architecture = "cbow"
