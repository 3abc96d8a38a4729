"""Rows of different length -> rectangular tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorMixin

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError


@dataclass
class PaddingCollator(DataCollatorMixin):
    """The base of all collators.

    Attributes:
        tokenizer: Its padding token and side are used.

    Raises:
        CtxError: The tokenizer has no padding token.
    """

    tokenizer: PreTrainedTokenizerBase
    return_tensors: ClassVar[str] = "pt"

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no padding token, which rows of unequal length need.",
                hint="tokenizer.add_special_tokens({'pad_token': '[PAD]'}), and resize the model's embeddings.",
            )


class RowPadder:
    """Pads rows of the given lengths, with one array assignment per column.

    Args:
        lengths: Lengths of the rows.
        side: Side of the padding, "right" or "left".
        multiple: The width is rounded up to a multiple of it (8 suits tensor cores); None for no rounding.

    Attributes:
        offsets: (rows,) column of each row's first value.
    """

    def __init__(self, lengths: Sequence[int], side: str, multiple: int | None = None) -> None:
        width = max(1, *lengths)
        if multiple:
            width = -(-width // multiple) * multiple
        column, length = np.arange(width), np.asarray(lengths)[:, None]
        self.offsets = width - length[:, 0] if side == "left" else np.zeros(len(length), dtype=np.int64)
        self.filled = column < length if side == "right" else column >= width - length  # (rows, width)

    def pad(self, rows: Sequence[np.ndarray], value: int) -> torch.Tensor:
        """(rows, width) int64 tensor of the rows, `value` elsewhere."""
        rectangle = np.full(self.filled.shape, value, dtype=np.int64)
        rectangle[self.filled] = np.concatenate(rows)
        return torch.from_numpy(rectangle)

    def attention_mask(self) -> torch.Tensor:
        """(rows, width) int64: 1 for tokens, 0 for padding."""
        return torch.from_numpy(self.filled.astype(np.int64))


_Row = TypeVar("_Row", list[int], np.ndarray)


def strip_decoder_start(target: _Row, start: int | None) -> _Row:
    """A target without the decoder's first input, if it begins with that."""
    return target[1:] if len(target) > 1 and target[0] == start else target


@dataclass
class SourceTargetCollator(PaddingCollator):
    """Pads sources on the tokenizer's side, and targets on the right.

    Each feature holds:
        input_ids: (tokens,) of the source.
        labels: (tokens,) of the target, its end included.
        target_language: Number of the target's language, optional.
        language: Number of the source's language beside it, for models with embeddings of both.

    Returns: input_ids, attention_mask (batch, width); labels (batch, steps), -100 after a target's end;
        target_languages (batch,), if the features hold one; with both languages langs (batch, width) and decoder_langs
        (batch, steps) in its place.

    Args:
        decoder_start_token_id: The decoder's first input, which is left out where a tokenizer begins targets with it:
            the model would be given it twice. None leaves targets as they are.
    """

    decoder_start_token_id: int | None = None

    def torch_call(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate features; see the class for what they hold and what is returned."""
        rows, targets = ([np.asarray(feature[name]) for feature in features] for name in ("input_ids", "labels"))
        targets = [strip_decoder_start(each, self.decoder_start_token_id) for each in targets]
        padder = RowPadder([len(row) for row in rows], self.tokenizer.padding_side)
        batch = {
            "input_ids": padder.pad(rows, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": RowPadder([len(row) for row in targets], "right").pad(targets, IGNORE_INDEX),
        }
        if "language" in features[0]:
            return batch | language_columns(features, batch, "language", "target_language")
        if "target_language" in features[0]:
            batch["target_languages"] = torch.tensor([int(feature["target_language"]) for feature in features])
        return batch


def language_columns(
    features: Sequence[Mapping[str, Any]], batch: Mapping[str, torch.Tensor], source: str, target: str
) -> dict[str, torch.Tensor]:
    """`langs` and `decoder_langs` of a batch, by the names of the features' languages; nothing if they hold none."""
    if source not in features[0]:
        return {}
    shapes = {"langs": (source, "input_ids"), "decoder_langs": (target, "labels")}
    return {
        column: torch.tensor([[int(feature[name])] * batch[beside].shape[1] for feature in features])
        for column, (name, beside) in shapes.items()
    }
