"""Packed layouts against a naive implementation, and grouped attention against eager attention."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_ctxmodels.layers.attention.backends import (
    attend_in_groups,
    attend_in_one_group,
    eager_attention_forward,
    supports_varlen,
)
from hf_ctxmodels.layers.attention.layouts import PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, MaskSpec
from hf_ctxmodels.layers.attention.prepared_masks import PackedMask

HEADS, HEAD_DIM = 2, 4
CPU = torch.device("cpu")


@st.composite
def masks(draw: Callable) -> Tensor:
    """(batch, length) of 0 and 1, with a 1 in each row; padding anywhere."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    row = st.lists(st.booleans(), min_size=columns, max_size=columns).filter(any)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows))).long()


@st.composite
def masks_and_output_masks(draw: Callable) -> tuple[Tensor, Tensor]:
    """A mask, and a selection of its tokens, possibly none."""
    mask = draw(masks())
    selection = draw(st.lists(st.booleans(), min_size=mask.numel(), max_size=mask.numel()))
    return mask, torch.tensor(selection).view_as(mask) & mask.bool()


@st.composite
def sequence_ids(draw: Callable) -> Tensor:
    """(batch, length): runs of 1, 2, ... in each row, then padding."""
    runs = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4))
    ids = torch.zeros(len(runs), max(map(sum, runs)) + draw(st.integers(0, 2)), dtype=torch.long)
    for row, lengths in enumerate(runs):
        ids[row, : sum(lengths)] = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    return ids


def build(mask: Tensor | None, ids: Tensor | None = None) -> PackedLayout:
    return PackedLayout.build(*(mask if ids is None else ids).shape, mask, ids, CPU)


def distinct_values(mask: Tensor) -> Tensor:
    """(batch, length, 2) of distinct values other than zero."""
    return torch.arange(1.0, 1 + 2 * mask.numel()).view(*mask.shape, 2)


@given(masks())
def test_pack_unpack_and_first_tokens(mask: Tensor) -> None:
    """Tokens are packed in order; unpacked padding is zero."""
    layout, values = build(mask), distinct_values(mask)
    packed = layout.pack(values)
    assert torch.equal(packed, torch.stack([values[row, column] for row, column in mask.nonzero().tolist()]))
    assert layout.lengths == tuple(mask.sum(1).tolist())
    assert layout.num_tokens == int(mask.sum())
    assert torch.equal(layout.unpack(packed), values * mask[..., None])
    assert torch.equal(layout.select_outputs(packed), values * mask[..., None])
    first_tokens = torch.stack([row[int(token_mask.nonzero()[0])] for row, token_mask in zip(values, mask)])
    assert torch.equal(layout.first_tokens(packed), first_tokens)
    assert torch.equal(PaddedLayout(*mask.shape, mask == 1).first_tokens(values), first_tokens)


@given(masks_and_output_masks(), st.booleans())
def test_select_tokens(masks_and_output_masks: tuple[Tensor, Tensor], include_first_tokens: bool) -> None:
    mask, output_mask = masks_and_output_masks
    values, layout = distinct_values(mask), build(mask)
    packed = layout.pack(values)
    selected = layout.select(output_mask, include_first_tokens=include_first_tokens)
    computed = output_mask.clone()
    if include_first_tokens:
        for row, token_mask in enumerate(mask):
            computed[row, int(token_mask.nonzero()[0])] = True
    queries = selected.select_queries(packed)
    assert torch.equal(queries, values[computed])
    assert torch.equal(selected.select_outputs(queries), values[output_mask])
    assert sum(selected.query_lengths or selected.lengths) == len(queries)
    if selected.query is not None:
        assert selected.query_lengths == tuple(computed.sum(1).tolist())
    assert selected.lengths == layout.lengths
    if include_first_tokens:
        assert torch.equal(selected.first_tokens(queries), layout.first_tokens(packed))
    all_tokens = layout.select(mask == 1, include_first_tokens=False)
    assert all_tokens.select_queries(packed) is packed, "a selection of all tokens copies nothing"


@given(sequence_ids())
def test_packed_sequences(ids: Tensor) -> None:
    layout = build(None, ids)
    assert list(layout.lengths) == [int((row == n).sum()) for row in ids for n in row.unique().tolist() if n]
    assert torch.equal(layout.pack(ids), ids[ids != 0])


@given(masks())
def test_mask_combined_with_sequence_ids(mask: Tensor) -> None:
    ids = torch.ones_like(mask)
    ids[0, 0] = 0 if mask[0].sum() > mask[0, 0] else 1
    values = distinct_values(mask)
    assert torch.equal(build(mask, ids).pack(values), values[(mask != 0) & (ids != 0)])


@pytest.mark.parametrize("mask", [None, torch.ones(2, 3, dtype=torch.long)], ids=["no mask", "no padding"])
def test_packing_without_padding_is_a_view(mask: Tensor | None) -> None:
    layout, values = PackedLayout.build(2, 3, mask, None, CPU), torch.randn(2, 3, 4)
    assert layout.pack(values).data_ptr() == values.data_ptr()
    assert layout.unpack(layout.pack(values)).data_ptr() == values.data_ptr()


def packed_layout(lengths: tuple[int, ...], counts: tuple[int, ...] | None = None) -> PackedLayout:
    """Layout of sequences of these lengths, of which only the first `counts` tokens are computed."""
    layout = PackedLayout(len(lengths), max(lengths), None, lengths, torch.zeros(0, dtype=torch.long))
    if counts is None:
        return layout
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    tokens = torch.cat([start + torch.arange(count) for start, count in zip(starts, counts, strict=True)])
    return replace(layout, query=tokens, query_lengths=counts)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5).filter(lambda p: any(map(min, p)))
)
@pytest.mark.parametrize("spec", [BIDIRECTIONAL, MaskSpec(window=2)], ids=["bidirectional", "window"])
@pytest.mark.parametrize("is_single", [False, True], ids=["groups", "one group"])
def test_groups_equal_eager_attention(is_single: bool, spec: MaskSpec, pairs: list[tuple[int, int]]) -> None:
    """Values and gradients, in several groups (CPU) and in one (accelerators)."""
    query_lengths, key_lengths = tuple(map(min, pairs)), tuple(map(max, pairs))
    generator = torch.Generator().manual_seed(sum(query_lengths + key_lengths))
    sizes = (sum(query_lengths), sum(key_lengths), sum(key_lengths))
    inputs = [torch.randn(size, HEADS, HEAD_DIM, generator=generator).requires_grad_() for size in sizes]
    query_sequences, key_sequences = (
        torch.repeat_interleave(torch.tensor(lengths)) for lengths in (query_lengths, key_lengths)
    )
    query_positions, key_positions = (
        torch.cat([torch.arange(length) for length in lengths]) for lengths in (query_lengths, key_lengths)
    )
    is_visible = query_sequences[:, None] == key_sequences
    is_visible &= spec.allows(query_positions[:, None], key_positions)
    bias = torch.zeros(is_visible.shape).masked_fill(~is_visible, float("-inf"))
    batch = [tensor.transpose(0, 1)[None] for tensor in inputs]
    expected = eager_attention_forward(torch.nn.Module().eval(), *batch, bias, 0.3)[0][0]
    layouts = packed_layout(key_lengths, query_lengths), packed_layout(key_lengths)
    mask = PackedMask(spec, *layouts, torch.float32, CPU, is_single=is_single)
    if is_single:
        actual = attend_in_one_group(*inputs, mask, scale=0.3, dropout=0.0)
    else:
        actual = attend_in_groups(*inputs, mask.groups, query_lengths, key_lengths, scale=0.3, dropout=0.0)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    gradients, expected_gradients = (
        torch.autograd.grad((tensor * weights).sum(), inputs) for tensor in (actual, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "expected"),
    [
        ((7, 0), 64, torch.float16, False),
        ((7, 5), 64, torch.float16, False),
        ((8, 0), 64, torch.bfloat16, True),
        ((8, 6), 64, torch.float16, True),
        ((9, 0), 64, torch.float32, False),
        ((9, 0), 26, torch.bfloat16, False),
        ((9, 0), 256, torch.bfloat16, True),
        ((9, 0), 264, torch.bfloat16, False),
        ((8, 9), 256, torch.bfloat16, False),
        ((8, 9), 192, torch.bfloat16, True),
    ],
)
def test_gpus_supported_by_varlen_kernel(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, expected: bool
) -> None:
    assert supports_varlen(capability, head_dim, dtype) == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_groups_partition_sequences_with_little_padding(lengths: list[int]) -> None:
    layout = packed_layout(tuple(lengths))
    groups = PackedMask(BIDIRECTIONAL, layout, layout, torch.float32, CPU, is_single=False).groups
    assert sorted(member for group in groups for member in group.sequence_indices) == list(range(len(lengths)))
    for group in groups:
        assert group.num_keys == max(lengths[member] for member in group.sequence_indices)
        num_pairs = sum(lengths[member] ** 2 for member in group.sequence_indices)
        assert len(group.sequence_indices) * group.num_keys * group.num_queries - num_pairs <= 500
    assert len(groups) <= len(set(lengths))
