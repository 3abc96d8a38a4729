"""Fields of the features that collators receive, and the tokens that may be predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.padding import RowPadder
from hf_ctxmodels.data.seeding import Purpose, generator, row_hashes


class NonSpecialTokens:
    """The non-special tokens of a vocabulary: only these are predicted, masked or sampled as replacements.

    Attributes:
        table: (largest id + 1,) bool, True for non-special ids.
        ids: The non-special ids, ascending.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = np.unique(np.fromiter(tokenizer.get_vocab().values(), dtype=np.int64))
        self.table = np.zeros(int(ids[-1]) + 1, dtype=bool)
        self.table[ids] = True
        self.table[tokenizer.all_special_ids] = False
        self.ids = np.flatnonzero(self.table)
        if not len(self.ids):
            raise CtxError("The tokenizer's vocabulary holds special tokens only.", hint="train it on text first.")

    def candidates(self, ids: np.ndarray) -> np.ndarray:
        """(tokens,) bool, True for non-special tokens; raises CtxError for an id outside the vocabulary."""
        check_token_ids(ids, len(self.table))
        return self.table[ids]


def check_token_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise CtxError if an id is outside the tokenizer's vocabulary."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong_id = ids.min() if ids.min() < 0 else ids.max()
        raise CtxError(
            f"Token id {wrong_id} is outside the tokenizer's vocabulary (0 to {vocab_size - 1}): the example was made "
            "with another tokenizer.",
            hint="tokenize the text with this tokenizer.",
        )


def feature_generator(
    feature: Mapping[str, Any], seed: int, purpose: Purpose = Purpose.CORRUPTION, *, period: int | None = None
) -> np.random.Generator:
    """The random generator of a feature, seeded by its `example_index` and its `epoch`.

    Args:
        period: Number of epochs after which the random numbers repeat, 1 for the same ones in all epochs; None for new
            ones in each epoch.
    """
    epoch = 0 if period == 1 else _integer(feature, "epoch")
    return generator(seed, epoch % period if period else epoch, _integer(feature, "example_index"), purpose)


def feature_keys(features: Sequence[Mapping[str, Any]], seed: int, uses: int) -> list[np.ndarray]:
    """(features,) keys of `seeding.uniforms` for each of several uses, from `example_index` and `epoch`."""
    epochs, indices = ([_integer(feature, name) for feature in features] for name in ("epoch", "example_index"))
    return [row_hashes(seed, epochs, indices, use=use) for use in range(uses)]


def feature_word_ids(feature: Mapping[str, Any], name: str = "word_ids") -> np.ndarray:
    """(tokens,) word index of each token, -1 for special tokens."""
    words = feature.get(name)
    if words is None:
        raise CtxError(
            f"Selecting whole words requires `{name}` in every feature.",
            hint="add them from a fast tokenizer's encoding.word_ids(), or select single tokens: whole_word=False, and "
            "no n-grams.",
        )
    if not isinstance(words, np.ndarray):
        words = np.array([-1 if word is None else word for word in words])
    return words


def padded_columns(
    features: Sequence[Mapping[str, Any]], names: Sequence[str], padder: RowPadder, tokenizer: PreTrainedTokenizerBase
) -> dict[str, torch.Tensor]:
    """The padded token-wise columns among `names` that the features hold."""
    columns = {}
    for name in names:
        if name in features[0]:
            padding = tokenizer.pad_token_type_id if name == "token_type_ids" else 0
            columns[name] = padder.pad([np.asarray(feature[name]) for feature in features], padding)
    return columns


def _integer(feature: Mapping[str, Any], name: str) -> int:
    if name not in feature:
        raise CtxError(
            f"A feature has no `{name}`, which seeds its random numbers.",
            hint="use hf_ctxmodels.data.ExampleSet, or number the examples: "
            "dataset.map(lambda example, index: {'example_index': index, 'epoch': 0}, with_indices=True), and keep "
            "both columns (Trainer: remove_unused_columns=False).",
        )
    return int(feature[name])
