"""Attention masks and biases: all implementations equal a naive reference that computes each sequence alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.t5.modeling_t5 import T5Attention, T5Config
from zoo import assert_close

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention import prepared_masks
from hf_ctxmodels.layers.attention.backends import eager_attention_forward
from hf_ctxmodels.layers.attention.layouts import PackedLayout, build_layout
from hf_ctxmodels.layers.attention.masks import MaskSpec
from hf_ctxmodels.layers.attention.modules import BucketedPositionBias, CrossAttention, SelfAttention
from hf_ctxmodels.layers.attention.prepared_masks import PackedMask
from hf_ctxmodels.layers.transformer import FeedForward, Memory, TransformerBlock, run_stack

pytestmark = pytest.mark.usefixtures("uncompiled_flex")

WIDTH, HEADS, HEAD_DIM, BLOCKS = 12, 3, 6, 2
LENGTHS, PREFIXES = (7, 3, 5, 6), (2, 0, 5, 1)
PADDING_SIDES = ("left", "right", "none")
IMPLEMENTATIONS = ("packed", "one group", "sdpa", "eager", "flex_attention")


class MaskCase(NamedTuple):
    """Arguments of `MaskSpec`, and the mask as a predicate of query, key and prefix length."""

    options: dict[str, Any]
    allows: Callable[[int, int, int], bool]
    has_bias: bool = False

    def spec(self, bias: BucketedPositionBias | None = None) -> MaskSpec:
        return MaskSpec(**self.options, bias=bias)


MASKS = {
    "bidirectional": MaskCase({}, lambda q, k, p: True),
    "causal": MaskCase({"causal": True}, lambda q, k, p: k <= q),
    "prefix": MaskCase({"causal": True, "prefix_lengths": torch.tensor(PREFIXES)}, lambda q, k, p: k <= q or k < p),
    "band": MaskCase({"causal": True, "window": 3}, lambda q, k, p: q - 3 < k <= q),
    "window": MaskCase({"window": 2}, lambda q, k, p: abs(q - k) < 2),
    "causal and bias": MaskCase({"causal": True}, lambda q, k, p: k <= q, has_bias=True),
    "bias": MaskCase({}, lambda q, k, p: True, has_bias=True),
}


def make_bias() -> BucketedPositionBias:
    torch.manual_seed(5)
    return BucketedPositionBias(HEADS, num_buckets=8, max_distance=6)


def make_blocks(*, cross: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        TransformerBlock(
            WIDTH,
            SelfAttention(WIDTH, HEADS, head_dim=HEAD_DIM),
            FeedForward(WIDTH, 20, "gelu"),
            norm="post",
            norm_cls=nn.LayerNorm,
            dropout=0.0,
            cross_attention=CrossAttention(WIDTH, HEADS, head_dim=HEAD_DIM) if cross else None,
        )
        for _ in range(BLOCKS)
    )
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.4)
    return blocks


def make_config(implementation: str) -> PreTrainedConfig:
    config = PreTrainedConfig(num_hidden_layers=BLOCKS, num_attention_heads=HEADS, hidden_size=WIDTH)
    config.unpad = implementation in ("packed", "one group")
    config._attn_implementation = "sdpa" if config.unpad else implementation
    return config


def padding_mask(side: str, lengths: tuple[int, ...]) -> Tensor:
    """(batch, length), with two columns of padding unless `side` is none."""
    columns = torch.arange(max(lengths) + (0 if side == "none" else 2))
    rows = torch.tensor(lengths)[:, None]
    return (columns >= len(columns) - rows if side == "left" else columns < rows).long()


def pad(tokens: Tensor, mask: Tensor) -> Tensor:
    """(tokens, ...) -> (batch, length, ...); padding is filled with noise, which must have no effect."""
    noise = torch.randn(*mask.shape, *tokens.shape[1:], generator=torch.Generator().manual_seed(9))
    return noise.index_put((mask == 1,), tokens)


def random_tokens(lengths: tuple[int, ...]) -> Tensor:
    return torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def naive_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """(queries or keys, heads * head_dim), (heads or 1, queries, keys) -> (queries, heads * head_dim)."""
    query, key, value = (tensor.unflatten(-1, (HEADS, HEAD_DIM)) for tensor in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5 + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def naive_block(block: TransformerBlock, states: Tensor, bias: Tensor) -> Tensor:
    """Output of one block for one sequence."""
    projections = block.attention.qkv_proj(states).chunk(3, -1)
    states = block.attention_norm(states + block.attention.out_proj(naive_attention(*projections, bias)))
    return block.feed_forward_norm(states + block.feed_forward(states))


def naive_stack(
    blocks: nn.ModuleList,
    tokens: Tensor,
    lengths: tuple[int, ...],
    case: MaskCase,
    bias: BucketedPositionBias | None = None,
) -> Tensor:
    """(tokens, hidden) of all sequences, each computed alone."""
    outputs = []
    for number, states in enumerate(tokens.split(lengths)):
        length = len(states)
        allowed = [[case.allows(q, k, PREFIXES[number]) for k in range(length)] for q in range(length)]
        total_bias = torch.zeros(length, length).masked_fill(~torch.tensor(allowed), float("-inf"))[None]
        if bias is not None:
            distances = torch.arange(length) - torch.arange(length)[:, None]
            total_bias = total_bias + bias.buckets(bias.bucket(distances)).permute(2, 0, 1)
        for block in blocks:
            states = naive_block(block, states, total_bias)
        outputs.append(states)
    return torch.cat(outputs)


def assert_same(actual: Tensor, expected: Tensor, leaves: list[Tensor], context: str) -> None:
    """Compare values, and gradients with respect to the leaves."""
    assert_close(actual, expected, f"values {context}")
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    gradients, expected_gradients = (
        torch.autograd.grad((tensor * weights).sum(), leaves, retain_graph=True) for tensor in (actual, expected)
    )
    assert_close(gradients, expected_gradients, f"gradients {context}", tolerance=1e-4)


@pytest.fixture(autouse=True)
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put three of the four sequences into one group; by default so few tokens form a single group."""
    monkeypatch.setattr(prepared_masks, "_CALL_PAIRS", 60)


def set_grouping(monkeypatch: pytest.MonkeyPatch, is_single: bool) -> None:
    """With `is_single`, put all sequences of a packed batch into one group, as on a GPU."""
    monkeypatch.setattr(prepared_masks, "PackedMask", lambda *args, **_: PackedMask(*args, is_single=is_single))


@pytest.mark.parametrize("name", MASKS)
def test_implementations_equal_naive_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of all tokens, and of selected tokens, for which the last block computes no others."""
    case = MASKS[name]
    blocks, bias = make_blocks(), make_bias() if case.has_bias else None
    spec = case.spec(bias)
    for side in PADDING_SIDES:
        lengths = (max(LENGTHS),) * len(LENGTHS) if side == "none" else LENGTHS
        tokens, mask = random_tokens(lengths), padding_mask(side, lengths)
        states, starts = pad(tokens, mask), torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        leaves = [tokens, *blocks.parameters(), *([] if bias is None else bias.parameters())]
        expected = naive_stack(blocks, tokens, lengths, case, bias)
        output_mask = mask.bool() & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(4)) < 0.4)
        output_mask[1] = False
        for implementation in IMPLEMENTATIONS:
            context = f"by {implementation} with padding {side}"
            set_grouping(monkeypatch, implementation == "one group")
            layout = build_layout(states, mask, None, make_config(implementation))
            assert isinstance(layout, PackedLayout) == (implementation in ("packed", "one group"))
            run = partial(run_stack, blocks, layout.pack(states), layout, spec)
            outputs = run(output_hidden_states=True)
            assert_same(outputs.last_hidden_state[mask == 1], expected, leaves, context)
            assert torch.equal(outputs.hidden_states[0][mask == 1], tokens), context
            selected = run(output_mask=output_mask, include_first_tokens=True)
            assert_same(selected.last_hidden_state, expected[output_mask[mask == 1]], leaves, f"selected {context}")
            assert_close(selected.layout.first_tokens(selected.computed_states), expected[starts], f"first {context}")


@pytest.mark.parametrize("name", ["prefix", "band", "causal and bias"])
def test_packed_sequences_equal_naive_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and prefixes are counted within each sequence."""
    case, ids = MASKS[name], torch.tensor([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 0, 2, 2, 2]])
    lengths, mask = (7, 3, 5, 3), (ids != 0).long()
    blocks, bias, tokens = make_blocks(), make_bias() if case.has_bias else None, random_tokens(lengths)
    expected, states = naive_stack(blocks, tokens, lengths, case, bias), pad(tokens, mask)
    for implementation in IMPLEMENTATIONS:
        set_grouping(monkeypatch, implementation == "one group")
        layout = build_layout(states, None, ids, make_config(implementation))
        actual = run_stack(blocks, layout.pack(states), layout, case.spec(bias)).last_hidden_state
        leaves = [tokens, *blocks.parameters(), *([] if bias is None else bias.parameters())]
        assert_same(actual[mask == 1], expected, leaves, f"by {implementation}")


def test_cross_attention_rejects_different_layouts() -> None:
    blocks, states, memory = make_blocks(cross=True), torch.randn(2, 3, WIDTH), torch.randn(2, 4, WIDTH)
    padded, packed = (build_layout(memory, None, None, make_config(name)) for name in ("sdpa", "packed"))
    layout = build_layout(states, None, None, make_config("packed"))
    with pytest.raises(CtxError, match="padded and a packed layout"):
        run_stack(blocks, layout.pack(states), layout, memory=Memory(memory, padded))
    short = build_layout(states[:1], None, None, make_config("packed"))
    with pytest.raises(CtxError, match="from 1 sequences to 2"):
        run_stack(blocks, short.pack(states[:1]), short, memory=Memory(packed.pack(memory), packed))


def test_bias_with_dropout_has_gradients() -> None:
    """In groups, with a dropout rate near 0, so that the result is close to the reference."""
    blocks, bias = make_blocks(), make_bias()
    for block in blocks.train():
        block.attention.attention_dropout = 1e-5 + 1 / (1 << 17)
    tokens, mask = random_tokens(LENGTHS), padding_mask("right", LENGTHS)
    layout = build_layout(pad(tokens, mask), mask, None, make_config("packed"))
    torch.manual_seed(0)
    outputs = run_stack(blocks, layout.pack(pad(tokens, mask)), layout, MaskSpec(causal=True, bias=bias))
    expected = naive_stack(blocks, tokens, LENGTHS, MASKS["causal and bias"], bias)
    torch.testing.assert_close(outputs.last_hidden_state[mask == 1], expected, atol=1e-3, rtol=1e-3)
    gradient, expected_gradient = (
        torch.autograd.grad(x.square().sum(), bias.buckets.weight)[0] for x in (outputs.computed_states, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("options", [{"prefix_lengths": torch.tensor([1])}, {"window": 0}])
def test_inconsistent_specs_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(CtxError, match=next(iter(options))):
        MaskSpec(**options)


def test_flash_attention_rejects_unsupported_masks() -> None:
    states = torch.randn(2, 3, WIDTH)
    layout = build_layout(states, None, None, make_config("flash_attention_2"))
    for spec in (MaskSpec(bias=make_bias()), MaskSpec(causal=True, prefix_lengths=torch.tensor([1, 2]))):
        with pytest.raises(CtxError, match=r"(?s)flash_attention_2 supports no position bias.*sdpa"):
            run_stack(make_blocks(), states, layout, spec)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bucketed_bias_equals_t5(bidirectional: bool) -> None:
    torch.manual_seed(0)
    config = T5Config(num_heads=4, is_decoder=not bidirectional)
    reference = T5Attention(config, has_relative_attention_bias=True)
    bias = BucketedPositionBias(4, bidirectional=bidirectional)
    bias.buckets.load_state_dict(reference.relative_attention_bias.state_dict())
    positions = torch.arange(300)[None]
    assert torch.equal(bias(positions, positions), reference.compute_bias(300, 300))
    assert torch.equal(bias(positions[:, 200:203], positions), reference.compute_bias(300, 300)[:, :, 200:203])


def test_only_requested_hidden_states_are_returned() -> None:
    """In the order of the blocks."""
    blocks, states = make_blocks(), torch.randn(2, 4, WIDTH)
    layout = build_layout(states, None, None, make_config("eager"))
    run = partial(run_stack, blocks, states, layout)
    for selection, expected in ((1, {1}), ([0, -1], {0, 2}), ([5], set())):
        hidden_states = run(output_hidden_states=selection).hidden_states
        assert {index for index, state in enumerate(hidden_states) if state is not None} == expected
    assert (run().hidden_states, run().attentions) == (None, None)


def test_eager_attention_has_dropout_only_in_training() -> None:
    module, query = nn.Module(), torch.randn(1, HEADS, 6, 5, generator=torch.Generator().manual_seed(3))
    _, expected = eager_attention_forward(module.eval(), query, query, query, None, scaling=1.0, dropout=0.5)
    torch.manual_seed(0)
    _, probabilities = eager_attention_forward(module.train(), query, query, query, None, scaling=1.0, dropout=0.5)
    is_dropped = probabilities == 0
    assert 0.2 < is_dropped.float().mean() < 0.8
    torch.testing.assert_close(probabilities[~is_dropped], 2 * expected[~is_dropped])
