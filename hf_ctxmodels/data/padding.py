"""Collators: sequences of different length -> rectangular tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch

Batch = dict[str, torch.Tensor]
UNLABELED = "unlabeled"


def required_token(tokenizer: PreTrainedTokenizerBase, name: str, use: str) -> int:
    """The id of a special token such as "mask_token"; raises CtxError, which explains its use, if there is none."""
    token_id = getattr(tokenizer, f"{name}_id")
    if token_id is None:
        raise CtxError(
            f"{type(tokenizer).__name__} has no {name}, which {use}.",
            hint=f"call tokenizer.add_special_tokens({{'{name}': TOKEN}}), and resize the model's embeddings.",
        )
    return int(token_id)


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """The indices of sequences in batches of similar lengths, the shortest first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@dataclass
class PaddingCollator(ABC):
    """Base class of all collators; an instance is a `data_collator` of `transformers.Trainer`.

    The tokenizer defines the padding token and side; raises CtxError if it has no padding token. Collators that sample
    require the columns `example_index` and `epoch`, integers that seed the random numbers of a feature.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def __post_init__(self) -> None:
        required_token(self.tokenizer, "pad_token", "sequences of unequal length require")

    @abstractmethod
    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """A batch: exactly the arguments of the head's `forward`. The class documents the columns of features."""

    def __call__(self, features: list[dict[str, Any]]) -> CollatedBatch:
        """Collate features into a batch that can be copied to a device."""
        return CollatedBatch(self.collate(features))

    def pad_inputs(self, sequences: Sequence[np.ndarray], multiple: int | None = None) -> tuple["RowPadder", Batch]:
        """Pad (tokens,) ids, or (words, characters) ids with 0, on the tokenizer's side. Returns the padder of further
        columns, and `input_ids` (batch, width) or (batch, width, characters) and `attention_mask` (batch, width)."""
        padder = RowPadder([len(sequence) for sequence in sequences], self.tokenizer.padding_side, multiple)
        has_characters = sequences[0].ndim > 1
        input_ids = padder.pad(sequences, 0 if has_characters else int(self.tokenizer.pad_token_id))
        return padder, {"input_ids": input_ids, "attention_mask": padder.attention_mask()}


class RowPadder:
    """Pads sequences to a batch, with one array assignment per column.

    Args:
        side: Side of the padding, "right" or "left".
        multiple: The width is rounded up to a multiple of it (8 suits tensor cores); None for no rounding.

    Attributes:
        offsets: (batch,) column of each sequence's first value.
        filled: (batch, width) bool, False at padding.
    """

    def __init__(self, lengths: Sequence[int], side: str, multiple: int | None = None) -> None:
        width = max(1, *lengths)
        if multiple:
            width = -(-width // multiple) * multiple
        column, length = np.arange(width), np.asarray(lengths)[:, None]
        self.offsets = width - length[:, 0] if side == "left" else np.zeros(len(length), dtype=np.int64)
        self.filled = column < length if side == "right" else column >= width - length

    def pad(self, sequences: Sequence[np.ndarray], value: int) -> torch.Tensor:
        """(batch, width, ...) int64 tensor of the (tokens, ...) sequences, `value` at padding."""
        padded = np.full((*self.filled.shape, *np.shape(sequences[0])[1:]), value, dtype=np.int64)
        padded[self.filled] = np.concatenate(sequences)
        return torch.from_numpy(padded)

    def attention_mask(self) -> torch.Tensor:
        """(batch, width) int64: 1 for tokens, 0 for padding."""
        return torch.from_numpy(self.filled.astype(np.int64))


def pad_targets(targets: Sequence[np.ndarray], value: int = IGNORE_INDEX, multiple: int | None = None) -> torch.Tensor:
    """(batch, steps) int64 tensor of target sequences, padded on the right."""
    return RowPadder([len(target) for target in targets], "right", multiple).pad(targets, value)


_Ids = TypeVar("_Ids", list[int], np.ndarray)


def strip_decoder_start(target: _Ids, start: int | None) -> _Ids:
    """A target sequence without the decoder start token, if it begins with it."""
    return target[1:] if len(target) > 1 and target[0] == start else target


@dataclass
class SourceTargetCollator(PaddingCollator):
    """Pads source sequences on the tokenizer's side, and target sequences on the right.

    Each feature holds:
        input_ids: (tokens,) of the source, or (words, characters).
        labels: (tokens,) of the target, including its end token.
        target_language: Id of the target language, optional.
        language: Id of the source language, in addition, for models with embeddings of both languages.

    Returns: input_ids (batch, width), or (batch, width, characters); attention_mask (batch, width); labels (batch,
        steps), -100 after the end of a target; target_languages (batch,), if the features hold them; with both
        languages langs (batch, width) and decoder_langs (batch, steps) instead.

    Args:
        decoder_start_token_id: Start token to strip from targets, since the decoder prepends it; None for none.
    """

    decoder_start_token_id: int | None = None

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Pad features; see the class for their columns and the returned ones."""
        sources, targets = ([np.asarray(feature[name]) for feature in features] for name in ("input_ids", "labels"))
        targets = [strip_decoder_start(target, self.decoder_start_token_id) for target in targets]
        _, batch = self.pad_inputs(sources)
        batch["labels"] = pad_targets(targets)
        if "language" not in features[0] and "target_language" in features[0]:
            batch["target_languages"] = torch.tensor([int(feature["target_language"]) for feature in features])
        return batch | language_columns(features, batch)


@dataclass
class ContextTargetCollator(PaddingCollator):
    """Joins contexts and targets to sequences of a decoder, padded on the right; the loss is of the targets alone.

    Each feature holds:
        input_ids: (tokens,) of the context, at least one.
        labels: (tokens,) of the target, including its end token.

    Returns: input_ids, attention_mask, labels (batch, width); labels are -100 at contexts and padding.
    """

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Join and pad features; see the class for their columns and the returned ones."""
        contexts, targets = ([np.asarray(feature[name]) for feature in features] for name in ("input_ids", "labels"))
        padder = RowPadder([len(context) + len(target) for context, target in zip(contexts, targets)], "right")
        pairs = list(zip(contexts, targets, strict=True))
        ignored = [np.append(np.full(len(context), IGNORE_INDEX), target) for context, target in pairs]
        return {
            "input_ids": padder.pad([np.append(*pair) for pair in pairs], int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "labels": padder.pad(ignored, IGNORE_INDEX),
        }


def language_columns(features: Sequence[Mapping[str, Any]], batch: Batch) -> Batch:
    """`langs` and `decoder_langs` of a batch, if the features hold `language` (and another `target_language`)."""
    if "language" not in features[0]:
        return {}
    sources = [int(feature["language"]) for feature in features]
    targets = [int(feature.get("target_language", feature["language"])) for feature in features]
    return {
        "langs": torch.tensor(sources)[:, None].repeat(1, batch["input_ids"].shape[1]),
        "decoder_langs": torch.tensor(targets)[:, None].repeat(1, batch["labels"].shape[1]),
    }


def mark_unlabeled(features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mark features as unlabeled; their labels only indicate the positions of targets."""
    return [{**feature, UNLABELED: True} for feature in features]


class UnlabeledCollator:
    """Collates labeled and unlabeled examples (Clark et al. 2018, section 2); the latter have `views`, not labels.

    Args:
        collate: The collator of labeled examples.
        per_example: Whether `views` has one value per example, (batch,), instead of the shape of the labels.
    """

    def __init__(
        self, collate: Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]], per_example: bool = False
    ) -> None:
        self._collate, self._per_example = collate, per_example

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch with `labels` and `views`, -100 for none."""
        task_features = [{name: value for name, value in feature.items() if name != UNLABELED} for feature in features]
        batch = dict(self._collate(task_features))
        labels = batch["labels"]
        unlabeled_examples = torch.tensor([UNLABELED in feature for feature in features])
        is_unlabeled = unlabeled_examples.view(-1, *[1] * (labels.dim() - 1)).expand_as(labels)
        has_view = unlabeled_examples if self._per_example else is_unlabeled & (labels != IGNORE_INDEX)
        batch["views"] = torch.where(has_view, 1, IGNORE_INDEX)
        batch["labels"] = labels.masked_fill(is_unlabeled, IGNORE_INDEX)
        return batch
