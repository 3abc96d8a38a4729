"""Packed layouts against a slow, obvious version, and the ways to attend over them against each other."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.backends import attend_in_groups, eager_attention_forward
from hf_ctxmodels.layers.attention.layouts import PackedLayout, PaddedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, group_sequences

HEADS, HEAD_DIM = 2, 4
CPU = torch.device("cpu")
NO_ROWS = torch.zeros(0, dtype=torch.long)


@st.composite
def masks(draw: Callable) -> Tensor:
    """(batch, length) of 0 and 1, at least one 1 in each row; padding anywhere."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    row = st.lists(st.booleans(), min_size=columns, max_size=columns).filter(any)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows))).long()


@st.composite
def sequences(draw: Callable) -> Tensor:
    """(batch, length) `sequence_ids`: runs of 1, 2, ... in each row, then padding."""
    runs = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4))
    width = max(map(sum, runs)) + draw(st.integers(0, 2))
    ids = torch.zeros(len(runs), width, dtype=torch.long)
    for row, lengths in enumerate(runs):
        values = [number for number, length in enumerate(lengths, start=1) for _ in range(length)]
        ids[row, : len(values)] = torch.tensor(values)
    return ids


@st.composite
def masks_and_output_masks(draw: Callable) -> tuple[Tensor, Tensor]:
    """A mask, and some of its tokens; possibly none."""
    mask = draw(masks())
    chosen = draw(st.lists(st.booleans(), min_size=mask.numel(), max_size=mask.numel()))
    return mask, torch.tensor(chosen).view_as(mask) & mask.bool()


def build(mask: Tensor | None, ids: Tensor | None = None) -> PackedLayout:
    shape = (mask if ids is None else ids).shape
    return PackedLayout.build(*shape, mask, ids, CPU)


def numbered(mask: Tensor) -> Tensor:
    """(batch, length, 2): every position has its own value, none is zero."""
    return torch.arange(1.0, 1 + 2 * mask.numel()).view(*mask.shape, 2)


@given(masks())
def test_pack_takes_the_tokens_in_order(mask: Tensor) -> None:
    layout, values = build(mask), numbered(mask)
    expected = [values[row, column] for row, column in mask.nonzero().tolist()]
    assert torch.equal(layout.pack(values), torch.stack(expected))
    assert layout.lengths == tuple(mask.sum(1).tolist())
    assert layout.num_tokens == int(mask.sum())


@given(masks())
def test_unpack_undoes_pack_and_leaves_zeros(mask: Tensor) -> None:
    layout, values = build(mask), numbered(mask)
    assert torch.equal(layout.unpack(layout.pack(values)), values * mask[..., None])
    assert torch.equal(layout.select_outputs(layout.pack(values)), values * mask[..., None])


@given(masks())
def test_first_is_the_first_token_of_each_row(mask: Tensor) -> None:
    layout, values = build(mask), numbered(mask)
    expected = torch.stack([row[int(present.nonzero()[0])] for row, present in zip(values, mask)])
    assert torch.equal(layout.first_tokens(layout.pack(values)), expected)
    padded = PaddedLayout(*mask.shape, mask == 1)
    assert torch.equal(padded.first_tokens(values), expected)


@given(masks_and_output_masks(), st.booleans())
def test_select(masks_and_output_masks: tuple[Tensor, Tensor], include_first_tokens: bool) -> None:
    mask, output_mask = masks_and_output_masks
    values = numbered(mask)
    layout = build(mask)
    packed = layout.pack(values)
    selected = layout.select(output_mask, include_first_tokens=include_first_tokens)
    computed = output_mask.clone()
    if include_first_tokens:
        for row, present in enumerate(mask):
            computed[row, int(present.nonzero()[0])] = True
    rows = selected.select_queries(packed)
    assert torch.equal(rows, values[computed])
    assert torch.equal(selected.select_outputs(rows), values[output_mask])
    assert sum(selected.query_lengths or selected.lengths) == len(rows)
    if selected.query is not None:
        assert selected.query_lengths == tuple(computed.sum(1).tolist())
    assert selected.lengths == layout.lengths
    if include_first_tokens:
        assert torch.equal(selected.first_tokens(rows), layout.first_tokens(packed))


@given(sequences())
def test_sequences_of_a_row(ids: Tensor) -> None:
    layout = build(None, ids)
    expected = [int((row == number).sum()) for row in ids for number in row.unique().tolist() if number]
    assert list(layout.lengths) == expected
    assert torch.equal(layout.pack(ids), ids[ids != 0])


@given(masks())
def test_mask_and_sequence_ids_are_both_heeded(mask: Tensor) -> None:
    ids = torch.ones_like(mask)
    ids[0, 0] = 0 if mask[0].sum() > mask[0, 0] else 1
    layout = build(mask, ids)
    assert torch.equal(layout.pack(numbered(mask)), numbered(mask)[(mask != 0) & (ids != 0)])


def test_no_padding_packs_to_a_view() -> None:
    for mask in (None, torch.ones(2, 3, dtype=torch.long)):
        layout = PackedLayout.build(2, 3, mask, None, CPU)
        values = torch.randn(2, 3, 4)
        assert layout.pack(values).data_ptr() == values.data_ptr()
        assert layout.unpack(layout.pack(values)).data_ptr() == values.data_ptr()


def test_row_without_tokens_is_refused() -> None:
    with pytest.raises(CtxError, match="Row 1 of attention_mask has no token"):
        build(torch.tensor([[1, 1], [0, 0]]))


def attention_inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(queries, HEADS, HEAD_DIM), (keys, HEADS, HEAD_DIM), (keys, HEADS, HEAD_DIM)]
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def attend_eagerly(scaling: float, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """The formula over all pairs; `seen` (queries, keys) says which belong together."""
    bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    batch = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    return eager_attention_forward(torch.nn.Module().eval(), *batch, bias, scaling)[0][0]


def min_and_max(pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(queries, keys) of each sequence; never more queries than keys."""
    return tuple(min(pair) for pair in pairs), tuple(max(pair) for pair in pairs)


def packed_layout(lengths: tuple[int, ...], counts: tuple[int, ...] | None = None) -> PackedLayout:
    """Sequences of these lengths, of which the first `counts` tokens are computed."""
    layout = PackedLayout(len(lengths), max(lengths), None, lengths, NO_ROWS)
    if counts is None:
        return layout
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    tokens = torch.cat([start + torch.arange(count) for start, count in zip(starts, counts, strict=True)])
    return replace(layout, query=tokens, query_lengths=counts)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5).filter(lambda p: any(map(min, p)))
)
@pytest.mark.parametrize("is_single", [False, True], ids=["groups", "one group"])
def test_groups_equal_eager_attention(is_single: bool, pairs: list[tuple[int, int]]) -> None:
    """In several groups (CPU) and in one (accelerators), in values and gradients."""
    query_lengths, key_lengths = min_and_max(pairs)
    inputs = attention_inputs(sum(query_lengths), sum(key_lengths))
    sequences = [torch.repeat_interleave(torch.tensor(lengths)) for lengths in (query_lengths, key_lengths)]
    expected = attend_eagerly(0.3, *inputs, sequences[0][:, None] == sequences[1][None, :])
    layouts = packed_layout(key_lengths, query_lengths), packed_layout(key_lengths)
    groups = group_sequences(BIDIRECTIONAL, *layouts, dtype=torch.float32, device=CPU, is_single=is_single)
    assert len(groups) == 1 or not is_single
    actual = attend_in_groups(*inputs, groups, query_lengths, key_lengths, scale=0.3, dropout=0.0)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    actual_gradients = torch.autograd.grad((actual * weights).sum(), inputs)
    for gradient, reference in zip(actual_gradients, torch.autograd.grad((expected * weights).sum(), inputs)):
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_groups_partition_the_sequences_with_little_padding(lengths: list[int]) -> None:
    layout = packed_layout(tuple(lengths))
    groups = group_sequences(BIDIRECTIONAL, layout, layout, dtype=torch.float32, device=CPU, is_single=False)
    assert sorted(member for group in groups for member in group.members) == list(range(len(lengths)))
    for group in groups:
        assert group.num_keys == max(lengths[member] for member in group.members)
        num_pairs = sum(lengths[member] ** 2 for member in group.members)
        assert len(group.members) * group.num_keys * group.num_queries - num_pairs <= 500
    assert len(groups) <= len(set(lengths))
