"""Rows of different length -> rectangular tensors."""

from collections.abc import Sequence

import numpy as np
import torch


class RowPadder:
    """Lays rows of the given lengths into a rectangle on one side, by one array assignment per column.

    Args:
        lengths: of the rows of this batch.
        side: "right" or "left": where the padding goes.
        multiple: the width is rounded up to a multiple of it (tensor cores like 8); None for no rounding.

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
