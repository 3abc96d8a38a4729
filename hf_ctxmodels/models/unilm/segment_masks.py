"""Segments of UniLM, and the masks that they say (Dong et al. 2019, section 2.3 and figure 1)."""

import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec

# Values of `token_type_ids`: both segments of a pair, a text read in one direction, source and target.
FIRST, SECOND, LEFT_TO_RIGHT, RIGHT_TO_LEFT, SOURCE, TARGET = range(6)

NUM_SEGMENTS = 6
COPIED_SEGMENTS = (FIRST, FIRST, FIRST, SECOND)
"""BERT's segments, of which the embeddings of the other four begin as copies."""


def segment_mask_spec(layout: Layout, token_type_ids: Tensor) -> MaskSpec:
    """Who sees whom in each sequence of a batch.

    All tokens see those of `FIRST`, `SECOND` and `SOURCE`. A token of `LEFT_TO_RIGHT` or `TARGET` sees itself and what
    is before it as well, one of `RIGHT_TO_LEFT` itself and what is after it.

    Args:
        layout: Where the tokens lie.
        token_type_ids: (batch, length) their segments.

    Raises:
        CtxError: Tokens that all others see stand behind others, or a sequence is read in both directions.
    """
    types = layout.pack(token_type_ids)
    ready = isinstance(layout, PaddedLayout) and layout.custom_mask is not None  # which says it already
    if ready or (not is_traced(types) and not bool((types > SECOND).any())):
        return BIDIRECTIONAL
    positions, numbers, count = _places(layout, types.device)
    tokens = torch.ones_like(types, dtype=torch.bool)
    if isinstance(layout, PaddedLayout) and layout.tokens is not None:
        tokens = layout.tokens
    shared = ((types <= SECOND) | (types == SOURCE)) & tokens
    backward = (types == RIGHT_TO_LEFT) & tokens
    prefixes, lengths, backwards = (_totals(each, numbers, count) for each in (shared, tokens, backward))
    if not is_traced(types):
        _check(shared != ((positions < prefixes) & tokens), (backwards != 0) & (backwards != lengths))
    ahead = (types == LEFT_TO_RIGHT) | (types == TARGET)
    first = torch.where(ahead, torch.maximum(prefixes, positions + 1), prefixes)
    first = torch.where(tokens, first, lengths)  # padding, which nobody reads, sees something
    stop = torch.where(backward, lengths, positions + 1)
    return MaskSpec(ranges=torch.stack([first, positions, stop], -1))


def _places(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Each packed token's position in its sequence and the number of that sequence, and how many there are."""
    if isinstance(layout, PackedLayout):
        lengths = torch.tensor(layout.lengths)
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return layout.positions.to(device), numbers.to(device), len(lengths)
    shape = (layout.batch_size, layout.length)
    positions = layout.key_positions(device).expand(shape)
    rows = torch.arange(layout.batch_size, device=device)[:, None]
    if layout.sequences is None:
        return positions, rows.expand(shape), layout.batch_size
    return positions, rows * (layout.length + 1) + layout.sequences, layout.batch_size * (layout.length + 1)


def _totals(chosen: Tensor, numbers: Tensor, count: int) -> Tensor:
    """How many tokens of each one's sequence are chosen, in the shape of `numbers`."""
    totals = torch.zeros(count, dtype=torch.long, device=numbers.device)
    return totals.index_add(0, numbers.flatten(), chosen.flatten().long())[numbers]


def _check(misplaced: Tensor, mixed: Tensor) -> None:
    """Raise CtxError if a token is in the wrong place, or a sequence is read in several directions."""
    if bool(misplaced.any()):
        raise CtxError(
            "token_type_ids: tokens of the segments 0, 1 and 4, which all tokens of their sequence see, must come "
            "before those of other segments.",
            hint="use 0 and 1 for a pair, 2 or 3 for a text in one direction, 4 and then 5 for source and target.",
        )
    if bool(mixed.any()):
        raise CtxError(
            "token_type_ids: a sequence has tokens of segment 3 (right to left) beside others.",
            hint="give segment 3 to all tokens of the sequence.",
        )
