"""Segments of UniLM and the attention masks that they define (Dong et al. 2019, section 2.3 and figure 1)."""

import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import is_traced
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec

# values of `token_type_ids`: the segments of a pair, a left-to-right or right-to-left text, source and target
FIRST, SECOND, LEFT_TO_RIGHT, RIGHT_TO_LEFT, SOURCE, TARGET = range(6)

NUM_SEGMENTS = 6
COPIED_SEGMENTS = (FIRST, FIRST, FIRST, SECOND)
"""BERT's segments with whose embeddings the other four are initialised."""


def segment_mask_spec(layout: Layout, token_type_ids: Tensor) -> MaskSpec:
    """The attention mask of each sequence of a batch.

    All tokens attend to the tokens of `FIRST`, `SECOND` and `SOURCE`. Tokens of `LEFT_TO_RIGHT` and `TARGET` also
    attend to themselves and earlier tokens, tokens of `RIGHT_TO_LEFT` to themselves and later tokens.

    Args:
        layout: Layout of the tokens.
        token_type_ids: (batch, length) segments.

    Raises:
        CtxError: Tokens of `FIRST`, `SECOND` or `SOURCE` follow other segments, or a sequence mixes `RIGHT_TO_LEFT`
            with other segments.
    """
    segments = layout.pack(token_type_ids)
    has_custom_mask = isinstance(layout, PaddedLayout) and layout.custom_mask is not None
    if has_custom_mask or (not is_traced(segments) and not bool((segments > SECOND).any())):
        return BIDIRECTIONAL
    positions, sequence_numbers, num_sequences = _sequence_positions(layout, segments.device)
    tokens = torch.ones_like(segments, dtype=torch.bool)
    if isinstance(layout, PaddedLayout) and layout.tokens is not None:
        tokens = layout.tokens
    is_prefix = ((segments <= SECOND) | (segments == SOURCE)) & tokens
    is_backward = (segments == RIGHT_TO_LEFT) & tokens
    prefix_lengths, lengths, backward_lengths = (
        _count_per_sequence(selected, sequence_numbers, num_sequences) for selected in (is_prefix, tokens, is_backward)
    )
    if not is_traced(segments):
        is_misplaced = is_prefix != ((positions < prefix_lengths) & tokens)
        _check_segments(is_misplaced, (backward_lengths != 0) & (backward_lengths != lengths))
    is_causal = (segments == LEFT_TO_RIGHT) | (segments == TARGET)
    prefix_stop = torch.where(is_causal, torch.maximum(prefix_lengths, positions + 1), prefix_lengths)
    prefix_stop = torch.where(tokens, prefix_stop, lengths)  # padding attends to some key, which avoids NaN
    suffix_stop = torch.where(is_backward, lengths, positions + 1)
    return MaskSpec(ranges=torch.stack([prefix_stop, positions, suffix_stop], -1))


def _sequence_positions(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The position of each packed token in its sequence, the number of its sequence, and the number of sequences."""
    if isinstance(layout, PackedLayout):
        lengths = torch.tensor(layout.lengths)
        sequence_numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return layout.positions.to(device), sequence_numbers.to(device), len(lengths)
    shape = (layout.batch_size, layout.length)
    positions = layout.key_positions(device).expand(shape)
    examples = torch.arange(layout.batch_size, device=device)[:, None]
    if layout.sequences is None:
        return positions, examples.expand(shape), layout.batch_size
    numbers_per_example = layout.length + 1
    return positions, examples * numbers_per_example + layout.sequences, layout.batch_size * numbers_per_example


def _count_per_sequence(selected: Tensor, sequence_numbers: Tensor, num_sequences: int) -> Tensor:
    """Number of selected tokens in the sequence of each token."""
    counts = torch.zeros(num_sequences, dtype=torch.long, device=sequence_numbers.device)
    return counts.index_add(0, sequence_numbers.flatten(), selected.flatten().long())[sequence_numbers]


def _check_segments(is_misplaced: Tensor, is_mixed: Tensor) -> None:
    """Raise CtxError if a prefix token follows another segment, or a sequence has several directions."""
    if bool(is_misplaced.any()):
        raise CtxError(
            "token_type_ids: tokens of the segments 0, 1 and 4 follow tokens of other segments.",
            hint="use 0 and 1 for a pair, 2 or 3 for a text in one direction, 4 and then 5 for source and target.",
        )
    if bool(is_mixed.any()):
        raise CtxError(
            "token_type_ids: a sequence mixes segment 3 (right to left) with other segments.",
            hint="use segment 3 for all tokens of the sequence.",
        )
