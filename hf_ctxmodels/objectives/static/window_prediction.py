"""Prediction of words from the words around them (Mikolov et al. 2013a, 2013b): what word2vec is trained on."""

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
from transformers.data.data_collator import DataCollatorMixin

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.base import Batch, Objective
from hf_ctxmodels.objectives.common.features import check_token_ids, feature_keys, require_padding_token
from hf_ctxmodels.objectives.common.masking import IGNORED
from hf_ctxmodels.objectives.common.segments import DOCUMENTS_PER_BATCH, tokenized_batches
from hf_ctxmodels.objectives.static import window_draws
from hf_ctxmodels.objectives.static.noise import HuffmanTree, NoiseDistribution, kept_shares, word_counts

_COMPILED = "hf_ctxmodels.objectives.static.window_kernels"
Output = Literal["negative-sampling", "hierarchical-softmax"]


@dataclass
class DataCollatorForWindowPrediction(DataCollatorMixin):
    """Subsamples frequent words, draws a window size for every word that is kept, and draws negatives.

    Windows are taken over the kept words, as in the released code, so subsampling widens them. All draws for example i
    in epoch e depend on (seed, e, i) only.

    Each feature holds:
        input_ids: (words,) without special tokens.
        example_index, epoch: integers; they seed the draws.

    Returns, with short rows concatenated in a line, padding between them, and all lines as long as the longest
    row, a multiple of `block`:
        input_ids, attention_mask: (lines, width).
        labels: (lines, width) the words again, -100 at padding.
        windows: (lines, width) 1 to `window`.
        negatives: (lines, width / block, shared_negatives), 0 where there is no row; or for hierarchical softmax
        paths, codes: (lines, width / block, block, depth), see `HuffmanTree`.

    Args:
        tokenizer: with `counts` (see `CtxWordTokenizer`) and a padding token.
        output, window, subsampling, noise_power, block, shared_negatives: see `WindowPredictionOptions`.
        seed: of all draws.

    Raises:
        CtxError: the tokenizer does not know how often its words occur.

    Example:
        >>> collate = DataCollatorForWindowPrediction(tokenizer, seed=1)
        >>> batch = collate([{"input_ids": tokenizer("a cat sat").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels', 'negatives', 'windows']
    """

    tokenizer: PreTrainedTokenizerBase
    output: Output = "negative-sampling"
    window: int = 5
    subsampling: float = 1e-3
    noise_power: float = 0.75
    block: int = 1
    shared_negatives: int = 5
    seed: int = 0
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        require_padding_token(self.tokenizer)
        self.counts = word_counts(self.tokenizer)
        self.kept = kept_shares(self.counts, self.subsampling)
        self.tree = HuffmanTree(self.counts) if self.output == "hierarchical-softmax" else None

    @cached_property
    def draws(self) -> ModuleType:
        """What draws: compiled where numba is installed, else the same with numpy."""
        return import_module(_COMPILED if find_spec("numba") else window_draws.__name__)

    @cached_property
    def noise(self) -> NoiseDistribution:
        """Of which negatives are drawn; hierarchical softmax never asks for it."""
        return NoiseDistribution(self.counts, self.noise_power)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"], dtype=np.int64) for feature in features]
        ids, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
        if not lengths.all():
            raise CtxError("A row holds no word.", hint="leave it out: nothing is to be predicted there.")
        check_token_ids(ids, len(self.kept))
        keys = feature_keys(features, self.seed, len(_Draw))
        ids, lengths = self.draws.keep(ids, lengths, keys[_Draw.DROPPED], self.kept, self.counts)
        first, shape = self._lines(lengths)
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

    def _lines(self, lengths: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """(rows,) where each row begins in the concatenated lines, and the lines' shape: they are as long as
        the longest row.

        Rows begin with a block of their own, so far after the row before that no window reaches it.
        """
        width = -(-int(lengths.max()) // self.block) * self.block
        first, line, start = [], 0, 0
        for length in lengths.tolist():
            if start + length > width:
                line, start = line + 1, 0
            first.append(line * width + start)
            start += -(-(length + self.window) // self.block) * self.block
        return np.array(first), (line + 1, width)


class _Draw(IntEnum):
    """What is drawn for a row."""

    DROPPED = 0
    WINDOW = 1
    NEGATIVES = 2


@dataclass(frozen=True)
class WindowPredictionOptions:
    """Options of `SkipGram` and `ContinuousBagOfWords`; the defaults are those of the released code."""

    output: Literal["negative-sampling", "hierarchical-softmax"] = flag(
        "negative-sampling", "Loss: negative-sampling or hierarchical-softmax."
    )
    window: int = flag(5, "Neighbours on either side, at most; drawn from 1 to this for every word.")
    negative: int = flag(5, "Negatives of a prediction.")
    subsampling: float = flag(1e-3, "Share of the text from which on a word is dropped now and then; 0 drops none.")
    noise_power: float = flag(0.75, "Negatives are drawn in proportion to this power of the counts.")
    block: int = flag(1, "Neighbouring words that share their negatives; on a GPU, or without numba, 16 is faster.")
    shared_negatives: int = flag(5, "Sampled words that serve as negatives for a whole block; with a block of 16, 16.")

    def __post_init__(self) -> None:
        for name in ("window", "negative", "block", "shared_negatives"):
            if getattr(self, name) < 1:
                raise CtxError(f"{name}={getattr(self, name)} is too small.", hint="use 1 or more.")
        if self.subsampling < 0:
            raise CtxError(f"subsampling={self.subsampling} is negative.", hint="use 0 or a small share such as 1e-3.")


class WindowPrediction(Objective):
    """Rows of consecutive known words of one document; unknown words are left out, as in the released code.

    Sentence boundaries are ignored: the text is cut where a row is full, as the released code does every 1000 words.

    | document | row | targets |
    |---|---|---|
    | running text | up to `max_length` known words | every word that subsampling keeps |
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = WindowPredictionOptions
    collate: DataCollatorForWindowPrediction
    architecture: ClassVar[str]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        own = self.options
        self.collate = DataCollatorForWindowPrediction(
            tokenizer,
            output=own.output,
            window=own.window,
            subsampling=own.subsampling,
            noise_power=own.noise_power,
            block=own.block,
            shared_negatives=own.shared_negatives,
            seed=seed,
        )
        self.baseline = replace(self.baseline, scores=self._frequency_scores)

    @property
    def config_fields(self) -> dict[str, Any]:
        """What the model has to know of the prediction."""
        own = self.options
        return {
            "architecture": self.architecture,
            "output": own.output,
            "window": own.window,
            "negative": own.negative,
        }

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids. A single word left over has no neighbour, and is left out."""
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, False):
            for document in batch:
                words = document.ids[document.ids != self.tokenizer.unk_token_id]
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                self.statistics["unknown_tokens"] += len(document.ids) - len(words)
                for start in range(0, len(words) - 1, self.max_length):
                    yield {"input_ids": words[start : start + self.max_length]}

    def _frequency_scores(self, counts: np.ndarray) -> np.ndarray:
        """See `BaselinePolicy.scores`: the logits of least loss among those that do not depend on the input."""
        seen = counts * self.collate.kept
        if self.collate.tree is not None:
            return self.collate.tree.scores(seen)
        noise = np.maximum(self.options.negative * self.collate.noise.probabilities, 1e-12)
        return np.log((seen + 1e-3) / seen.sum()) - np.log(noise)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        words = batch["labels"] != IGNORED
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
    """Each word in the window by itself predicts the word in its middle.

    References: Mikolov et al. 2013a, section 3.2; 2013b, section 2, for negatives, hierarchical softmax and
    subsampling.
    Related: `ContinuousBagOfWords` takes the words of a window together, which is faster and worse for rare words;
    `Cooccurrence` counts windows once and fits the counts.

    Example:
        >>> SkipGram(tokenizer, max_length=1000, seed=0, window=5, negative=5)
    """

    architecture = "skip-gram"


class ContinuousBagOfWords(WindowPrediction):
    """The mean of the words in the window predicts the word in its middle.

    References: Mikolov et al. 2013a, section 3.1.
    Related: `SkipGram` takes the words of a window one by one.

    Example:
        >>> ContinuousBagOfWords(tokenizer, max_length=1000, seed=0, output="hierarchical-softmax")
    """

    architecture = "cbow"
