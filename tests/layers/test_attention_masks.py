"""Masks, biases, cross-attention and caches: every path equals the formula applied to each sequence by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, StaticCache
from transformers.models.t5.modeling_t5 import T5Attention, T5Config

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention import grouping
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, build_layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import CrossAttention, SelfAttention
from hf_ctxmodels.layers.attention.position_bias import BucketedPositionBias
from hf_ctxmodels.layers.feed_forward import FeedForward
from hf_ctxmodels.layers.transformer.block import Memory, TransformerBlock
from hf_ctxmodels.layers.transformer.stack import StackOutput, run_stack

WIDTH, HEADS, HEAD_DIM, BLOCKS = 12, 3, 6, 2
LENGTHS, MEMORY_LENGTHS = (7, 3, 5, 6), (4, 8, 1, 5)
SIDES = ("left", "right", "none")
PATHS = ("packed", "sdpa", "eager")


@pytest.fixture(autouse=True)
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few tokens would all be one group; with this, three of the four sequences share one."""
    monkeypatch.setattr(grouping, "_CALL_PAIRS", 60)


@dataclass(frozen=True)
class Toy:
    """A mask as the layers take it, and as a predicate of (query, key, length of the prefix)."""

    spec: Callable[[int], dict[str, Any]]
    sees: Callable[[int, int, int], bool]
    biased: bool = False


PREFIXES = (2, 0, 5, 1)
MASKS = {
    "bidirectional": Toy(lambda rows: {}, lambda q, k, p: True),
    "causal": Toy(lambda rows: {"causal": True}, lambda q, k, p: k <= q),
    "prefix": Toy(
        lambda rows: {"causal": True, "prefix_lengths": torch.tensor(PREFIXES[:rows])},
        lambda q, k, p: k <= q or k < p,
    ),
    "band": Toy(lambda rows: {"causal": True, "window": 3}, lambda q, k, p: q - 3 < k <= q),
    "window": Toy(lambda rows: {"window": 2}, lambda q, k, p: abs(q - k) < 2),
    "causal and bias": Toy(lambda rows: {"causal": True}, lambda q, k, p: k <= q, biased=True),
    "bias": Toy(lambda rows: {}, lambda q, k, p: True, biased=True),
}


def make_bias() -> BucketedPositionBias:
    torch.manual_seed(5)
    return BucketedPositionBias(HEADS, num_buckets=8, max_distance=6)


def make_blocks(norm: str = "post", *, cross: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        TransformerBlock(
            WIDTH,
            SelfAttention(WIDTH, HEADS, head_dim=HEAD_DIM),
            FeedForward(WIDTH, 20, "gelu"),
            norm=norm,
            norm_cls=nn.LayerNorm,
            dropout=0.0,
            cross_attention=CrossAttention(WIDTH, HEADS, memory_size=10, head_dim=HEAD_DIM) if cross else None,
        )
        for _ in range(BLOCKS)
    )
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.4)
    return blocks


def make_config(path: str) -> PreTrainedConfig:
    shape = {"num_hidden_layers": BLOCKS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    config = PreTrainedConfig(**shape)
    config.unpad, config._attn_implementation = path == "packed", "sdpa" if path == "packed" else path
    return config


def padding(side: str, lengths: tuple[int, ...], extra: int = 2) -> Tensor:
    """(batch, length) mask."""
    columns = torch.arange(max(lengths) + (0 if side == "none" else extra))
    rows = torch.tensor(lengths)[:, None]
    return (columns >= len(columns) - rows if side == "left" else columns < rows).long()


def lengths_for(side: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return (max(lengths),) * len(lengths) if side == "none" else lengths


def spread(rows: Tensor, mask: Tensor) -> Tensor:
    """(tokens, ...) -> (batch, length, ...), noise at padding, which must not matter."""
    noise = torch.randn(*mask.shape, *rows.shape[1:], generator=torch.Generator().manual_seed(9))
    return noise.index_put((mask == 1,), rows)


def draw(lengths: tuple[int, ...], width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
    """(queries or keys, heads * head_dim), (heads or 1, queries, keys) -> (queries, heads * head_dim)."""
    query, key, value = (rows.unflatten(-1, (HEADS, HEAD_DIM)) for rows in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5 + added
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def block_by_hand(block: TransformerBlock, states: Tensor, added: Tensor, memory: Tensor | None) -> Tensor:
    """One sequence through one block, as the papers write it."""

    def around(norm: nn.Module, states: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        return norm(states + layer(states)) if block.norm == "post" else states + layer(norm(states))

    def attend(rows: Tensor) -> Tensor:
        parts = block.attention.qkv_proj(rows).chunk(3, -1)
        return block.attention.out_proj(attention_by_hand(*parts, added))

    def cross(rows: Tensor) -> Tensor:
        module = block.cross_attention
        context = attention_by_hand(module.q_proj(rows), *module.kv_proj(memory).chunk(2, -1), torch.zeros(1, 1, 1))
        return module.out_proj(context)

    states = around(block.attention_norm, states, attend)
    if memory is not None:
        states = around(block.cross_attention_norm, states, cross)
    return around(block.feed_forward_norm, states, block.feed_forward)


def expected_rows(
    blocks: nn.ModuleList,
    rows: Tensor,
    lengths: tuple[int, ...],
    toy: Toy,
    bias: BucketedPositionBias | None,
    memories: list[Tensor] | None = None,
) -> Tensor:
    """(tokens, hidden) of all sequences, each by itself."""
    outputs = []
    for number, states in enumerate(rows.split(lengths)):
        length = len(states)
        pairs = [[toy.sees(q, k, PREFIXES[number]) for k in range(length)] for q in range(length)]
        added = torch.zeros(length, length).masked_fill(~torch.tensor(pairs), float("-inf"))[None]
        if bias is not None:
            relative = torch.arange(length) - torch.arange(length)[:, None]
            added = added + bias.buckets(bias.bucket(relative)).permute(2, 0, 1)
        for block in blocks:
            states = block_by_hand(block, states, added, None if memories is None else memories[number])
        outputs.append(states)
    return torch.cat(outputs)


def assert_same(got: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Values, and gradients of everything they were made of."""
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    weights = torch.linspace(-1, 1, got.numel()).view_as(got)
    gradients = [torch.autograd.grad((each * weights).sum(), leaves, retain_graph=True) for each in (got, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MASKS)
def test_every_path_is_the_formula(name: str, path: str, side: str) -> None:
    """With the outputs of all tokens, and with those of some, for which the last block computes no others."""
    toy, lengths = MASKS[name], lengths_for(side, LENGTHS)
    blocks, bias = make_blocks(), make_bias() if MASKS[name].biased else None
    spec = MaskSpec(**toy.spec(len(lengths)), bias=bias)
    rows, mask = draw(lengths), padding(side, lengths)
    leaves = [rows, *blocks.parameters(), *([] if bias is None else bias.parameters())]
    expected = expected_rows(blocks, rows, lengths, toy, bias)
    states = spread(rows, mask)
    layout = build_layout(states, mask, None, make_config(path))
    assert isinstance(layout, PackedLayout) == (path == "packed")
    outputs = run_stack(blocks, layout.pack(states), layout, spec, output_hidden_states=True)
    assert_same(outputs.last_hidden_state[mask == 1], expected, leaves)
    assert torch.equal(outputs.hidden_states[0][mask == 1], rows)
    chosen = mask.bool() & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(4)) < 0.4)
    chosen[1] = False
    some = run_stack(blocks, layout.pack(states), layout, spec, output_mask=chosen, and_first=True)
    assert_same(some.last_hidden_state, expected[chosen[mask == 1]], leaves)
    first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    torch.testing.assert_close(some.layout.first(some.rows), expected[first], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["prefix", "band", "causal and bias"])
def test_several_sequences_in_a_row(name: str, path: str) -> None:
    """Positions and prefixes are those of each sequence."""
    toy, ids = MASKS[name], torch.tensor([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 0, 2, 2, 2]])
    lengths = (7, 3, 5, 3)
    blocks, bias = make_blocks(), make_bias() if toy.biased else None
    rows, mask = draw(lengths), (ids != 0).long()
    expected = expected_rows(blocks, rows, lengths, toy, bias)
    states = spread(rows, mask)
    layout = build_layout(states, None, ids, make_config(path))
    got = run_stack(blocks, layout.pack(states), layout, MaskSpec(**toy.spec(4), bias=bias)).last_hidden_state
    assert_same(got[mask == 1], expected, [rows, *blocks.parameters()])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("path", PATHS)
def test_cross_attention(path: str, side: str, norm: str) -> None:
    """A causal decoder over the outputs of an encoder, with other lengths, in packed and padded layouts."""
    lengths, memory_lengths = lengths_for(side, LENGTHS), lengths_for(side, MEMORY_LENGTHS)
    blocks = make_blocks(norm, cross=True)
    rows, memory_rows = draw(lengths), draw(memory_lengths, 10, seed=2)
    leaves = [rows, memory_rows, *blocks.parameters()]
    memories = list(memory_rows.split(memory_lengths))
    expected = expected_rows(blocks, rows, lengths, MASKS["causal"], None, memories)
    mask, memory_mask = padding(side, lengths), padding(side, memory_lengths, extra=1)
    states, memory = spread(rows, mask), spread(memory_rows, memory_mask)
    layout, memory_layout = (
        build_layout(each, where, None, make_config(path)) for each, where in ((states, mask), (memory, memory_mask))
    )
    read = Memory(memory_layout.pack(memory), memory_layout)
    run = partial(run_stack, blocks, layout.pack(states), layout, CAUSAL, memory=read)
    assert_same(run().last_hidden_state[mask == 1], expected, leaves)
    chosen = mask.bool() & (torch.arange(mask.shape[1]) % 3 == 0)
    assert_same(run(output_mask=chosen).last_hidden_state, expected[chosen[mask == 1]], leaves)


def test_cross_attention_of_unlike_layouts_is_refused() -> None:
    blocks, states = make_blocks(cross=True), torch.randn(2, 3, WIDTH)
    memory = torch.randn(2, 4, 10)
    padded, packed = (build_layout(memory, None, None, make_config(path)) for path in ("sdpa", "packed"))
    layout = build_layout(states, None, None, make_config("packed"))
    with pytest.raises(CtxError, match="One side"):
        run_stack(blocks, layout.pack(states), layout, memory=Memory(memory, padded))
    short = build_layout(states[:1], None, None, make_config("packed"))
    with pytest.raises(CtxError, match="from 1 sequences to 2"):
        run_stack(blocks, short.pack(states[:1]), short, memory=Memory(packed.pack(memory), packed))


def make_cache(kind: str, config: PreTrainedConfig, length: int) -> DynamicCache | StaticCache:
    return DynamicCache() if kind == "dynamic" else StaticCache(config, max_cache_len=length)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("path", "kind"), [("sdpa", "dynamic"), ("sdpa", "static"), ("eager", "static")])
@pytest.mark.parametrize("name", ["causal", "prefix", "band", "causal and bias"])
def test_cached_steps_are_one_pass(name: str, path: str, kind: str, side: str) -> None:
    """A prompt, padded on either side, then its continuation, by several tokens and by one."""
    toy, config = MASKS[name], make_config(path)
    blocks, bias = make_blocks("pre"), make_bias() if toy.biased else None
    spec = MaskSpec(**toy.spec(4), bias=bias)
    prompts = lengths_for(side, LENGTHS)
    prompt_mask, new = padding(side, prompts), 4
    mask = torch.cat([prompt_mask, torch.ones(4, new, dtype=torch.long)], 1)
    lengths = tuple(length + new for length in prompts)
    rows = draw(lengths).detach()
    states = spread(rows, mask)
    expected = expected_rows(blocks, rows, lengths, toy, bias)
    cache, got, start = make_cache(kind, config, mask.shape[1] + 3), [], 0
    for width in (prompt_mask.shape[1], 2, 1, 1):
        part = states[:, start : start + width]
        given = None if side == "none" else mask[:, : start + width]
        layout = build_layout(part, given, None, config, past_key_values=cache)
        got.append(run_stack(blocks, part, layout, spec, past_key_values=cache).last_hidden_state)
        start += width
    torch.testing.assert_close(torch.cat(got, 1)[mask == 1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cached_steps_of_a_decoder(kind: str, side: str) -> None:
    """The keys and values of the encoder's output are computed once."""
    config, blocks = make_config("sdpa"), make_blocks(cross=True)
    lengths, memory_lengths = (5, 5, 5, 5), lengths_for(side, MEMORY_LENGTHS)
    memory_mask = padding(side, memory_lengths)
    rows, memory_rows = draw(lengths).detach(), draw(memory_lengths, 10, seed=2).detach()
    memories = list(memory_rows.split(memory_lengths))
    expected = expected_rows(blocks, rows, lengths, MASKS["causal"], None, memories).view(4, 5, WIDTH)
    states, memory = rows.view(4, 5, WIDTH), spread(memory_rows, memory_mask)
    memory_layout = build_layout(memory, memory_mask, None, config)
    caches = (make_cache(kind, config, length) for length in (8, memory.shape[1] + 2))
    cache, calls = EncoderDecoderCache(*caches), []
    for block in blocks:
        block.cross_attention.kv_proj.register_forward_hook(lambda *args: calls.append(1))
    for start, stop in ((0, 2), (2, 3), (3, 4), (4, 5)):
        layout = build_layout(states[:, start:stop], None, None, config, past_key_values=cache)
        read = Memory(memory, memory_layout)
        part = run_stack(blocks, states[:, start:stop], layout, CAUSAL, memory=read, past_key_values=cache)
        torch.testing.assert_close(part.last_hidden_state, expected[:, start:stop], atol=1e-5, rtol=1e-4)
    assert len(calls) == BLOCKS


def test_mask_narrower_than_the_cache_is_refused() -> None:
    config, blocks, cache = make_config("sdpa"), make_blocks(), DynamicCache()
    states, mask = torch.randn(1, 3, WIDTH), torch.ones(1, 3, dtype=torch.long)
    layout = build_layout(states, mask, None, config, past_key_values=cache)
    run_stack(blocks, states, layout, CAUSAL, past_key_values=cache)
    with pytest.raises(CtxError, match=r"holds 3 tokens and the input 3; it must be \(1, 6\)"):
        build_layout(states, mask, None, config, past_key_values=cache)


@pytest.mark.parametrize("side", SIDES)
def test_blocks_with_masks_of_their_own(side: str) -> None:
    """Dense and local layers in turn; the outputs of some positions too."""
    lengths, blocks = lengths_for(side, LENGTHS), make_blocks()
    specs = [CAUSAL, MaskSpec(causal=True, window=2)]
    rows, mask = draw(lengths).detach(), padding(side, lengths)
    chosen = mask.bool() & (torch.arange(mask.shape[1]) % 2 == 0)
    expected = rows
    for block, toy in zip(blocks, (MASKS["causal"], Toy(MASKS["band"].spec, lambda q, k, p: q - 2 < k <= q))):
        expected = expected_rows(nn.ModuleList([block]), expected, lengths, toy, None)
    states = spread(rows, mask)
    for path in PATHS:
        layout = build_layout(states, mask, None, make_config(path))
        got = run_stack(blocks, layout.pack(states), layout, specs, output_mask=chosen).last_hidden_state
        torch.testing.assert_close(got, expected[chosen[mask == 1]], atol=1e-5, rtol=1e-4)
        got = run_stack(blocks, layout.pack(states), layout, specs).last_hidden_state
        torch.testing.assert_close(got[mask == 1], expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(CtxError, match="1 masks for 2 blocks"):
        run_stack(blocks, layout.pack(states), layout, specs[:1])


@pytest.mark.parametrize("path", PATHS)
def test_bias_of_one_layer_replaces_the_shared_one(path: str) -> None:
    module = SelfAttention(WIDTH, HEADS, head_dim=HEAD_DIM, position_bias=make_bias())
    plain = SelfAttention(WIDTH, HEADS, head_dim=HEAD_DIM)
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if "bias.buckets" not in name})
    states = torch.randn(2, 5, WIDTH)
    layout: Layout = build_layout(states, None, None, make_config(path))
    got, _ = module(layout.pack(states), layout, CAUSAL)
    expected, _ = plain(layout.pack(states), layout, MaskSpec(causal=True, bias=make_bias()))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("path", ["packed", "sdpa"])
def test_shared_bias_under_checkpointing(path: str, checkpointing: bool) -> None:
    blocks, bias = make_blocks(), make_bias()
    for block in blocks.train():
        block.gradient_checkpointing = checkpointing
        block._gradient_checkpointing_func = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    rows, mask = draw(LENGTHS), padding("left", LENGTHS)
    layout = build_layout(spread(rows, mask), mask, None, make_config(path))
    got = run_stack(blocks, layout.pack(spread(rows, mask)), layout, MaskSpec(causal=True, bias=bias))
    expected = expected_rows(blocks, rows, LENGTHS, MASKS["causal and bias"], bias)
    assert_same(got.last_hidden_state[mask == 1], expected, [rows, *bias.parameters(), *blocks.parameters()])


def test_bias_with_dropout_has_gradients() -> None:
    """Attention dropout with a learned bias, in groups: hardly any, so that it is the formula."""
    blocks, bias = make_blocks(), make_bias()
    for block in blocks.train():
        block.attention.attention_dropout = 1e-5 + 1 / (1 << 17)
    rows, mask = draw(LENGTHS), padding("right", LENGTHS)
    layout = build_layout(spread(rows, mask), mask, None, make_config("packed"))
    torch.manual_seed(0)
    got = run_stack(blocks, layout.pack(spread(rows, mask)), layout, MaskSpec(causal=True, bias=bias))
    expected = expected_rows(blocks, rows, LENGTHS, MASKS["causal and bias"], bias)
    torch.testing.assert_close(got.last_hidden_state[mask == 1], expected, atol=1e-3, rtol=1e-3)
    one, other = (torch.autograd.grad(x.square().sum(), bias.buckets.weight)[0] for x in (got.rows, expected))
    torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("options", [{"prefix_lengths": torch.tensor([1])}, {"window": 0}])
def test_specs_that_describe_no_mask(options: dict[str, Any]) -> None:
    with pytest.raises(CtxError, match=next(iter(options))):
        MaskSpec(**options)


def test_flash_attention_refuses_what_it_does_not_know() -> None:
    config, states = make_config("flash_attention_2"), torch.randn(2, 3, WIDTH)
    layout = build_layout(states, None, None, config)
    for spec in (MaskSpec(bias=make_bias()), MaskSpec(causal=True, prefix_lengths=torch.tensor([1, 2]))):
        with pytest.raises(CtxError, match=r"(?s)flash_attention_2 knows no bias.*sdpa"):
            run_stack(make_blocks(), states, layout, spec)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bucketed_bias_is_that_of_t5(bidirectional: bool) -> None:
    torch.manual_seed(0)
    config = T5Config(num_heads=4, is_decoder=not bidirectional)
    reference = T5Attention(config, has_relative_attention_bias=True)
    bias = BucketedPositionBias(4, bidirectional=bidirectional)
    bias.buckets.load_state_dict(reference.relative_attention_bias.state_dict())
    positions = torch.arange(300)[None]
    assert torch.equal(bias(positions, positions), reference.compute_bias(300, 300))
    assert torch.equal(bias(positions[:, 200:203], positions), reference.compute_bias(300, 300)[:, :, 200:203])


def test_outputs_of_a_stack() -> None:
    """Only what was asked for, in the order of the blocks."""
    blocks, states = make_blocks(), torch.randn(2, 4, WIDTH)
    layout = build_layout(states, None, None, make_config("eager"))

    def run(**options: Any) -> StackOutput:
        return run_stack(blocks, states, layout, BIDIRECTIONAL, **options)

    everything = run(output_hidden_states=True, output_attentions=True)
    assert len(everything.attentions) == BLOCKS
    assert len(everything.hidden_states) == BLOCKS + 1
    assert everything.cross_attentions == ()
    for choice, kept in ((1, {1}), ([0, -1], {0, 2}), ([5], set())):
        states_kept = run(output_hidden_states=choice).hidden_states
        assert {number for number, each in enumerate(states_kept) if each is not None} == kept
    nothing = run()
    assert nothing.hidden_states is None
    assert nothing.attentions is None
