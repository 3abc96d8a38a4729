"""The operators of compiled graphs, called without a compiler, against `attend` and packed layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from hf_ctxmodels.core.compiled_ops import _recorded_calls, true_indices
from hf_ctxmodels.layers.attention import prepared_masks
from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.compiled_attention import attend_traced
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, TracedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import BucketedPositionBias
from hf_ctxmodels.layers.attention.prepared_masks import prepare_mask

LENGTHS, LENGTH = (5, 9, 1, 7), 9
TOKENS = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
SEQUENCE_IDS = TOKENS * (1 + (torch.arange(LENGTH) >= 4))
NUM_TOKENS = sum(LENGTHS)


def _build(layout_class: type[PackedLayout], sequence_ids: Tensor | None = None) -> Any:
    return layout_class.build(*TOKENS.shape, TOKENS, sequence_ids, torch.device("cpu"))


def _masks() -> dict[str, Callable[[], MaskSpec]]:
    starts = torch.arange(NUM_TOKENS) % 4
    ranges = torch.stack([starts + 1, starts, starts + 1], -1)
    return {
        "bidirectional": lambda: BIDIRECTIONAL,
        "causal": lambda: CAUSAL,
        "window": lambda: MaskSpec(causal=True, window=2),
        "prefix": lambda: MaskSpec(causal=True, prefix_lengths=torch.tensor([2, 3, 1, 0])),
        "ranges": lambda: MaskSpec(ranges=ranges),
        "bias": lambda: MaskSpec(causal=True, bias=_position_bias()),
        "full mask with bias": lambda: MaskSpec(bias=_position_bias()),
        "prefix with bias": lambda: MaskSpec(
            causal=True, prefix_lengths=torch.tensor([2, 3, 1, 0]), bias=_position_bias()
        ),
        "ranges with bias": lambda: MaskSpec(ranges=ranges, bias=_position_bias()),
    }


def _position_bias() -> BucketedPositionBias:
    torch.manual_seed(1)
    return BucketedPositionBias(2, num_buckets=8, max_distance=4)


def _attend(attention: Callable, layout: Layout, spec: MaskSpec, **options: Any) -> list[Tensor]:
    """The context, and the gradients of queries, keys, values and the bias."""
    torch.manual_seed(0)
    states = [torch.randn(NUM_TOKENS, 2, 8, requires_grad=True) for _ in range(3)]
    leaves = states + (list(spec.bias.parameters()) if isinstance(spec.bias, BucketedPositionBias) else [])
    context = attention(layout.select_queries(states[0]), *states[1:], layout, spec, scale=0.5, **options)
    gradients = torch.autograd.grad(context.sin().sum(), leaves, materialize_grads=True)
    return [context, *gradients]


def _attend_eager(*arguments: Any, **options: Any) -> Tensor:
    return attend(*arguments, **options)[0]


def _attend_by_operator(
    query: Tensor, key: Tensor, value: Tensor, layout: TracedLayout, spec: MaskSpec, **options: Any
) -> Tensor:
    mask: Any = prepare_mask(spec, layout, query)
    return attend_traced(query, key, value, layout, mask, **{"dropout": 0.0, **options})


@pytest.mark.parametrize("period", [None, 3, LENGTH + 1], ids=["all queries", "selected queries", "no queries"])
@pytest.mark.parametrize("name", _masks())
def test_operator_equals_attend(name: str, period: int | None) -> None:
    spec = _masks()[name]()
    layouts = [_build(PackedLayout), _build(TracedLayout)]
    if period is not None:
        output_mask = TOKENS & (torch.arange(LENGTH) % period == period - 1)
        layouts = [layout.select(output_mask, include_first_tokens=period <= LENGTH) for layout in layouts]
    expected = _attend(_attend_eager, layouts[0], spec)
    actual = _attend(_attend_by_operator, layouts[1], spec)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor)


def test_layers_share_position_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks with the bias are computed once; the gradients of all layers are added before the bias's backward."""
    layout, bias = _build(TracedLayout), _position_bias()
    states = [torch.randn(NUM_TOKENS, 2, 8) for _ in range(3)]
    expected = attend(*states, _build(PackedLayout), MaskSpec(bias=bias), scale=0.5)[0]
    mask: Any = prepare_mask(MaskSpec(bias=bias), layout, states[0])
    monkeypatch.setattr(prepared_masks, "gather_position_bias", None)
    contexts = [attend_traced(*states, layout, mask, scale=0.5, dropout=0.0) for _ in range(2)]
    (gradient,) = torch.autograd.grad(sum(context.sin().sum() for context in contexts), bias.buckets.weight)
    (expected_gradient,) = torch.autograd.grad(2 * expected.sin().sum(), bias.buckets.weight)
    torch.testing.assert_close(gradient, expected_gradient)


def test_backward_reuses_dropout_mask() -> None:
    """The context is linear in the values: if G is the gradient of <context, W>, then <values, G> = <context, W>."""
    layout = _build(TracedLayout)
    query, key, value, weights = (torch.randn(NUM_TOKENS, 2, 8) for _ in range(4))
    value.requires_grad_()
    mask: Any = prepare_mask(BIDIRECTIONAL, layout, query)
    context = attend_traced(query, key, value, layout, mask, scale=1.0, dropout=0.5)
    second_context = attend_traced(query, key, value, layout, mask, scale=1.0, dropout=0.5)
    assert not torch.equal(context, second_context)
    product = (context * weights).sum()
    (gradient,) = torch.autograd.grad(product, value)
    torch.testing.assert_close((value * gradient).sum(), product)


@pytest.mark.parametrize("sequence_ids", [None, SEQUENCE_IDS], ids=["one sequence per row", "packed rows"])
def test_traced_layout_equals_packed_layout(sequence_ids: Tensor | None) -> None:
    packed, traced = (_build(layout_class, sequence_ids) for layout_class in (PackedLayout, TracedLayout))
    output_mask = TOKENS & (torch.arange(LENGTH) % 3 == 1)
    states = torch.randn(NUM_TOKENS, 4)
    for expected, actual in (
        (packed, traced),
        [x.select(output_mask, include_first_tokens=True) for x in (packed, traced)],
    ):
        assert tuple(actual.lengths.tolist()) == expected.lengths
        assert torch.equal(expected.positions, actual.positions)
        queries = expected.select_queries(states)
        assert torch.equal(actual.select_queries(states), queries)
        assert torch.equal(actual.first_tokens(queries), expected.first_tokens(queries))
        assert torch.equal(actual.select_outputs(queries), expected.select_outputs(queries))
    assert tuple(actual.query_lengths.tolist()) == expected.query_lengths


def test_operator_schemas_and_fake_tensors() -> None:
    """The fake implementations have the shapes and strides of the operators' results."""
    opcheck(true_indices, (TOKENS,), test_utils=("test_schema", "test_faketensor"))
    states = [torch.randn(NUM_TOKENS, 3, 2, 8)[:, index] for index in range(3)]
    arguments = (*states, None, torch.tensor(LENGTHS), *[None] * 5, True, None, 1.0, 0.0, False)
    opcheck(torch.ops.hf_ctxmodels.packed_attention.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_recorded_call_is_freed_with_output() -> None:
    layout = _build(TracedLayout)
    states = [torch.randn(NUM_TOKENS, 2, 8, requires_grad=True) for _ in range(3)]
    mask: Any = prepare_mask(CAUSAL, layout, states[0])
    num_calls = len(_recorded_calls)
    context = attend_traced(*states, layout, mask, scale=1.0, dropout=0.5)
    assert len(_recorded_calls) == num_calls + 1
    del context
    assert len(_recorded_calls) == num_calls
