"""What recurrent families share on top of the model base."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.layers.pooling import token_mask
from hf_ctxmodels.layers.recurrent import PackedRows
from hf_ctxmodels.layers.varlen import check_row_lengths
from hf_ctxmodels.modeling_base import is_traced, sequence_numbers


def rows_of(
    config: Any, given: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None, directions: int
) -> PackedRows:
    """Where the tokens of a batch are: packed, unless `config.unpad` is off or a graph is traced.

    Raises:
        CtxError: A row without tokens.
    """
    tokens = token_mask(given, attention_mask, sequence_ids)
    numbers = None if sequence_ids is None else sequence_numbers(sequence_ids)
    if is_traced(given):
        return PackedRows.with_padding(tokens, numbers, directions)
    check_row_lengths(tokens.sum(1))
    build = PackedRows.build if config.unpad else PackedRows.with_padding
    return build(tokens, numbers, directions)


def side_by_side(states: Tensor) -> Tensor:
    """(2, batch, words, width) of the directions -> (batch, words, 2 * width)."""
    return torch.cat([states[0], states[1]], -1)


def check_states(states: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise CtxError unless the `states` that a model is given have these shapes."""
    found = [tuple(each.shape) for each in states]
    if found != list(expected):
        raise CtxError(
            f"states are {found}, expected {list(expected)}.",
            mend="give what the last forward returned, of as many rows, or states=None to start anew.",
        )
