"""Relative attention of XLNet: outputs and gradients of fast implementations compared with eager attention."""

from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from benchmarks.measure import peak_bytes
from torch import Tensor
from zoo import assert_close

from hf_ctxmodels import CtxXLNetConfig
from hf_ctxmodels.layers.attention.layouts import PaddedLayout
from hf_ctxmodels.layers.cpu.relative_attention import RelativeBiases, attend_per_sequence
from hf_ctxmodels.models.xlnet import relative_attention
from hf_ctxmodels.models.xlnet.relative_attention import (
    DensePattern,
    dense_attention,
    eager_attention,
    flex_attention,
)
from hf_ctxmodels.models.xlnet.streams import EncoderInputs, StreamLayout

HEADS, HEAD_DIM = 3, 4
CPU = torch.device("cpu")
SHAPES = {  # batch, length, memory, targets
    "one token": (1, 1, 0, 0),
    "one stream": (3, 9, 0, 0),
    "two streams": (2, 9, 0, 4),
    "memory": (2, 5, 8, 3),
    "several blocks": (1, 150, 7, 2),
    "exactly one block": (2, 64, 0, 0),
}
FAST = ("dense", "dense blocks", "per sequence", "flex")


pytestmark = pytest.mark.usefixtures("uncompiled_flex")


class AttentionInputs(NamedTuple):
    tensors: list[Tensor]  # query, key, value, relative, and the four biases
    streams: StreamLayout


def make_inputs(
    shape: tuple[int, int, int, int], *, with_mask: bool, with_segments: bool, groups: int = 1
) -> AttentionInputs:
    """Random inputs; a mask hides some keys, and all keys of one target query, if there are targets."""
    batch, length, memory, targets = shape
    torch.manual_seed(0)
    target_positions = torch.randint(length, (batch, targets)) if targets else None
    if with_mask and target_positions is not None:
        target_positions[0, -1] = -1
    num_keys = memory + length
    inputs = EncoderInputs(
        CtxXLNetConfig(bi_data=groups > 1),
        torch.zeros(batch, length, dtype=torch.long),
        token_types=torch.randint(-1, 3, (batch, length)) if with_segments else None,
        memory=[torch.ones(batch, memory, 1)] if memory else None,
        hidden_pairs=torch.rand(batch, length, length) < 0.4 if with_mask else None,
        target_positions=target_positions,
    )
    sizes = [(batch, length + targets), (batch, num_keys), (batch, num_keys), (groups, num_keys + length)]
    tensors = [torch.randn(*size, HEADS, HEAD_DIM) for size in sizes]
    tensors += [torch.randn(HEADS, HEAD_DIM) for _ in range(3)] + [torch.randn(2, HEADS, HEAD_DIM)]
    streams = StreamLayout(inputs, tensors[3].flatten(-2), PaddedLayout(batch, length), inputs.build_pattern(), "sdpa")
    return AttentionInputs([tensor.requires_grad_() for tensor in tensors], streams)


def attend(inputs: AttentionInputs, implementation: str, dropout: float = 0.0) -> Tensor:
    """(batch, queries, heads, head_dim)."""
    query, key, value, relative, *biases = inputs.tensors
    options = {"scaling": HEAD_DIM**-0.5, "dropout": dropout}
    if implementation == "per sequence":
        packed = [tensor.flatten(0, 1) for tensor in (query, key, value)]
        context = attend_per_sequence(*packed, relative, RelativeBiases(*biases), inputs.streams.ranges, **options)
        return context.view_as(query)
    relative = relative.repeat_interleave(len(query) // len(relative), 0) if len(relative) > 1 else relative
    arguments = (query, key, value, relative, RelativeBiases(*biases), inputs.streams.pattern)
    if implementation == "eager":
        return eager_attention(*arguments, **options)[0]
    if implementation == "flex":
        return flex_attention(*arguments[:-1], inputs.streams.pattern.with_block_mask(), **options)
    block_size = 4 if implementation == "dense blocks" else 10**6
    pattern = DensePattern.build(inputs.streams.pattern, key.shape[1], query.dtype, HEAD_DIM**-0.5)
    with patch.object(relative_attention, "MAX_DENSE_QUERIES", block_size):
        return dense_attention(*arguments[:-1], pattern, **options)


def outputs_and_gradients(inputs: AttentionInputs, implementation: str) -> list[Tensor]:
    context = attend(inputs, implementation)
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((context * weights).sum(), inputs.tensors, allow_unused=True)
    return [context, *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


def assert_all_implementations_agree(inputs: AttentionInputs, label: str = "") -> None:
    expected = outputs_and_gradients(inputs, "eager")
    for implementation in FAST:
        assert_close(outputs_and_gradients(inputs, implementation), expected, f"by {implementation} {label}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_fast_implementations_match_eager(shape: tuple[int, int, int, int]) -> None:
    for with_mask, with_segments in product((True, False), repeat=2):
        inputs = make_inputs(shape, with_mask=with_mask, with_segments=with_segments)
        assert_all_implementations_agree(inputs, f"with mask={with_mask}, segments={with_segments}")


def test_two_groups_of_position_encodings() -> None:
    assert_all_implementations_agree(make_inputs((4, 6, 2, 2), with_mask=True, with_segments=True, groups=2))


def test_queries_without_visible_keys_are_zero() -> None:
    inputs = make_inputs((2, 5, 0, 2), with_mask=True, with_segments=True)
    has_keys = inputs.streams.pattern.visible.any(-1)
    assert not has_keys[0, -1]
    for implementation in ("eager", *FAST):
        context = attend(inputs, implementation)
        assert not context[~has_keys].any(), implementation
        assert context[has_keys].any(-1).all(), implementation


def test_blocks_reduce_peak_memory() -> None:
    inputs = make_inputs((2, 120, 0, 8), with_mask=True, with_segments=True)
    peaks = {name: peak_bytes(lambda name=name: outputs_and_gradients(inputs, name), CPU) for name in FAST[:2]}
    assert peaks["dense blocks"] < 0.4 * peaks["dense"]


@pytest.mark.parametrize("implementation", ["eager", "per sequence"])
def test_dropout_preserves_mean(implementation: str) -> None:
    inputs = make_inputs((1, 6, 0, 2), with_mask=True, with_segments=True)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = attend(inputs, implementation)
        samples = torch.stack([attend(inputs, implementation, dropout=0.3) for _ in range(600)])
    assert (samples[0] - expected).abs().max() > 0.01
    assert (samples.mean(0) - expected).abs().mean() < 0.05


def test_dropout_gradients_match_finite_differences() -> None:
    """With the same dropout mask in every forward pass."""
    inputs = make_inputs((1, 5, 2, 2), with_mask=True, with_segments=True)
    weights = torch.randn(1, 7, HEADS, HEAD_DIM)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return (attend(inputs, "per sequence", dropout=0.4) * weights).sum()

    gradients = torch.autograd.grad(loss(), inputs.tensors)
    for tensor, gradient in zip(inputs.tensors, gradients, strict=True):
        direction = torch.randn_like(tensor)
        losses = []
        with torch.no_grad():
            for step in (1e-2, -1e-2):
                tensor += step * direction
                losses.append(loss())
                tensor -= step * direction
        slope = (losses[0] - losses[1]) / 2e-2
        torch.testing.assert_close(slope, (gradient * direction).sum(), atol=2e-2, rtol=2e-2)
