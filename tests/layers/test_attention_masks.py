"""Masks, biases, cross-attention and caches: every path equals the formula applied to each sequence by itself."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from masks_by_hand import (
    BLOCKS,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    MASKS,
    MEMORY_LENGTHS,
    PATHS,
    SIDES,
    WIDTH,
    Toy,
    assert_same,
    draw,
    expected_rows,
    lengths_for,
    make_bias,
    make_blocks,
    make_config,
    padding,
    spread,
)
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, StaticCache
from transformers.models.t5.modeling_t5 import T5Attention, T5Config
from zoo import assert_close

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention import masks as attention_masks
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, build_layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, CAUSAL, MaskSpec
from hf_ctxmodels.layers.attention.modules import BucketedPositionBias, SelfAttention
from hf_ctxmodels.layers.transformer import Memory, StackOutput, run_stack


@pytest.fixture(autouse=True)
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few tokens would all be one group; with this, three of the four sequences share one."""
    monkeypatch.setattr(attention_masks, "_CALL_PAIRS", 60)


@pytest.mark.parametrize("name", MASKS)
def test_every_path_is_the_formula(name: str) -> None:
    """With the outputs of all tokens, and with those of some, for which the last block computes no others."""
    toy = MASKS[name]
    blocks, bias = make_blocks(), make_bias() if toy.biased else None
    for side in SIDES:
        lengths = lengths_for(side, LENGTHS)
        spec = MaskSpec(**toy.spec(len(lengths)), bias=bias)
        rows, mask = draw(lengths), padding(side, lengths)
        states, first = spread(rows, mask), torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        leaves = [rows, *blocks.parameters(), *([] if bias is None else bias.parameters())]
        expected = expected_rows(blocks, rows, lengths, toy, bias)
        chosen = mask.bool() & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(4)) < 0.4)
        chosen[1] = False
        for path in PATHS:
            where = f"by {path} with padding {side}"
            layout = build_layout(states, mask, None, make_config(path))
            assert isinstance(layout, PackedLayout) == (path == "packed")
            outputs = run_stack(blocks, layout.pack(states), layout, spec, output_hidden_states=True)
            assert_same(outputs.last_hidden_state[mask == 1], expected, leaves, where)
            assert torch.equal(outputs.hidden_states[0][mask == 1], rows), where
            some = run_stack(blocks, layout.pack(states), layout, spec, output_mask=chosen, include_first_tokens=True)
            assert_same(some.last_hidden_state, expected[chosen[mask == 1]], leaves, f"of some {where}")
            assert_close(some.layout.first_tokens(some.computed_states), expected[first], f"first {where}")


@pytest.mark.parametrize("name", ["prefix", "band", "causal and bias"])
def test_several_sequences_in_a_row(name: str) -> None:
    """Positions and prefixes are those of each sequence."""
    toy, ids = MASKS[name], torch.tensor([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 0, 2, 2, 2]])
    lengths = (7, 3, 5, 3)
    blocks, bias = make_blocks(), make_bias() if toy.biased else None
    rows, mask = draw(lengths), (ids != 0).long()
    expected = expected_rows(blocks, rows, lengths, toy, bias)
    states, spec = spread(rows, mask), MaskSpec(**toy.spec(4), bias=bias)
    for path in PATHS:
        layout = build_layout(states, None, ids, make_config(path))
        got = run_stack(blocks, layout.pack(states), layout, spec).last_hidden_state
        assert_same(got[mask == 1], expected, [rows, *blocks.parameters()], f"by {path}")


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_cross_attention(norm: str) -> None:
    """A causal decoder over the outputs of an encoder, with other lengths, in packed and padded layouts."""
    blocks = make_blocks(norm, cross=True)
    for side in SIDES:
        lengths, memory_lengths = lengths_for(side, LENGTHS), lengths_for(side, MEMORY_LENGTHS)
        rows, memory_rows = draw(lengths), draw(memory_lengths, 10, seed=2)
        leaves = [rows, memory_rows, *blocks.parameters()]
        memories = list(memory_rows.split(memory_lengths))
        expected = expected_rows(blocks, rows, lengths, MASKS["causal"], None, memories)
        mask, memory_mask = padding(side, lengths), padding(side, memory_lengths, extra=1)
        states, memory = spread(rows, mask), spread(memory_rows, memory_mask)
        chosen = mask.bool() & (torch.arange(mask.shape[1]) % 3 == 0)
        for path in PATHS:
            where, config = f"by {path} with padding {side}", make_config(path)
            layout, memory_layout = (
                build_layout(each, tokens, None, config) for each, tokens in ((states, mask), (memory, memory_mask))
            )
            read = Memory(memory_layout.pack(memory), memory_layout)
            run = partial(run_stack, blocks, layout.pack(states), layout, CAUSAL, memory=read)
            assert_same(run().last_hidden_state[mask == 1], expected, leaves, where)
            some = run(output_mask=chosen).last_hidden_state
            assert_same(some, expected[chosen[mask == 1]], leaves, f"of some {where}")


def test_cross_attention_of_unlike_layouts_is_refused() -> None:
    blocks, states = make_blocks(cross=True), torch.randn(2, 3, WIDTH)
    memory = torch.randn(2, 4, 10)
    padded, packed = (build_layout(memory, None, None, make_config(path)) for path in ("sdpa", "packed"))
    layout = build_layout(states, None, None, make_config("packed"))
    with pytest.raises(CtxError, match="padded and a packed layout"):
        run_stack(blocks, layout.pack(states), layout, memory=Memory(memory, padded))
    short = build_layout(states[:1], None, None, make_config("packed"))
    with pytest.raises(CtxError, match="from 1 sequences to 2"):
        run_stack(blocks, short.pack(states[:1]), short, memory=Memory(packed.pack(memory), packed))


def make_cache(kind: str, config: PreTrainedConfig, length: int) -> DynamicCache | StaticCache:
    return DynamicCache() if kind == "dynamic" else StaticCache(config, max_cache_len=length)


@pytest.mark.parametrize("name", ["causal", "prefix", "band", "causal and bias"])
def test_cached_steps_are_one_pass(name: str) -> None:
    """A prompt, padded on either side, then its continuation, by several tokens and by one."""
    toy = MASKS[name]
    blocks, bias = make_blocks("pre"), make_bias() if toy.biased else None
    spec = MaskSpec(**toy.spec(4), bias=bias)
    for side in SIDES:
        prompts = lengths_for(side, LENGTHS)
        prompt_mask, new = padding(side, prompts), 4
        mask = torch.cat([prompt_mask, torch.ones(4, new, dtype=torch.long)], 1)
        lengths = tuple(length + new for length in prompts)
        rows = draw(lengths).detach()
        states = spread(rows, mask)
        expected = expected_rows(blocks, rows, lengths, toy, bias)
        for path, kind in (("sdpa", "dynamic"), ("sdpa", "static"), ("eager", "static")):
            config = make_config(path)
            cache, got, start = make_cache(kind, config, mask.shape[1] + 3), [], 0
            for width in (prompt_mask.shape[1], 2, 1, 1):
                part = states[:, start : start + width]
                given = None if side == "none" else mask[:, : start + width]
                layout = build_layout(part, given, None, config, past_key_values=cache)
                got.append(run_stack(blocks, part, layout, spec, past_key_values=cache).last_hidden_state)
                start += width
            where = f"by {path} with padding {side} and a {kind} cache"
            assert_close(torch.cat(got, 1)[mask == 1], expected, where)


@pytest.mark.parametrize("side", SIDES)
def test_cached_steps_of_a_decoder(side: str) -> None:
    """The keys and values of the encoder's output are computed once."""
    config, blocks = make_config("sdpa"), make_blocks(cross=True)
    lengths, memory_lengths = (5, 5, 5, 5), lengths_for(side, MEMORY_LENGTHS)
    memory_mask = padding(side, memory_lengths)
    rows, memory_rows = draw(lengths).detach(), draw(memory_lengths, 10, seed=2).detach()
    memories = list(memory_rows.split(memory_lengths))
    expected = expected_rows(blocks, rows, lengths, MASKS["causal"], None, memories).view(4, 5, WIDTH)
    states, memory = rows.view(4, 5, WIDTH), spread(memory_rows, memory_mask)
    memory_layout = build_layout(memory, memory_mask, None, config)
    calls: list[int] = []
    for block in blocks:
        block.cross_attention.kv_proj.register_forward_hook(lambda *args: calls.append(1))
    for kind in ("dynamic", "static"):
        cache = EncoderDecoderCache(*(make_cache(kind, config, length) for length in (8, memory.shape[1] + 2)))
        calls.clear()
        for start, stop in ((0, 2), (2, 3), (3, 4), (4, 5)):
            layout = build_layout(states[:, start:stop], None, None, config, past_key_values=cache)
            read = Memory(memory, memory_layout)
            part = run_stack(blocks, states[:, start:stop], layout, CAUSAL, memory=read, past_key_values=cache)
            assert_close(part.last_hidden_state, expected[:, start:stop], f"from {start} on with a {kind} cache")
        assert len(calls) == BLOCKS, kind


def test_mask_narrower_than_the_cache_is_refused() -> None:
    config, blocks, cache = make_config("sdpa"), make_blocks(), DynamicCache()
    states, mask = torch.randn(1, 3, WIDTH), torch.ones(1, 3, dtype=torch.long)
    layout = build_layout(states, mask, None, config, past_key_values=cache)
    run_stack(blocks, states, layout, CAUSAL, past_key_values=cache)
    with pytest.raises(CtxError, match=r"attention_mask is .*\(1, 6\)"):
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


def test_bias_of_one_layer_replaces_the_shared_one() -> None:
    module = SelfAttention(WIDTH, HEADS, head_dim=HEAD_DIM, position_bias=make_bias())
    plain = SelfAttention(WIDTH, HEADS, head_dim=HEAD_DIM)
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if "bias.buckets" not in name})
    states = torch.randn(2, 5, WIDTH)
    for path in PATHS:
        layout: Layout = build_layout(states, None, None, make_config(path))
        got, _ = module(layout.pack(states), layout, CAUSAL)
        expected, _ = plain(layout.pack(states), layout, MaskSpec(causal=True, bias=make_bias()))
        assert_close(got, expected, path)


def test_shared_bias_under_checkpointing() -> None:
    blocks, bias = make_blocks(), make_bias()
    rows, mask = draw(LENGTHS), padding("left", LENGTHS)
    leaves = [rows, *bias.parameters(), *blocks.parameters()]
    expected = expected_rows(blocks, rows, LENGTHS, MASKS["causal and bias"], bias)
    for path, checkpointing in product(("packed", "sdpa"), (False, True)):
        for block in blocks.train():
            block.gradient_checkpointing = checkpointing
            block._gradient_checkpointing_func = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        layout = build_layout(spread(rows, mask), mask, None, make_config(path))
        got = run_stack(blocks, layout.pack(spread(rows, mask)), layout, MaskSpec(causal=True, bias=bias))
        where = f"by {path} with checkpointing={checkpointing}"
        assert_same(got.last_hidden_state[mask == 1], expected, leaves, where)


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
    one, other = (
        torch.autograd.grad(x.square().sum(), bias.buckets.weight)[0] for x in (got.computed_states, expected)
    )
    torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("options", [{"prefix_lengths": torch.tensor([1])}, {"window": 0}])
def test_specs_that_describe_no_mask(options: dict[str, Any]) -> None:
    with pytest.raises(CtxError, match=next(iter(options))):
        MaskSpec(**options)


def test_flash_attention_refuses_what_it_does_not_know() -> None:
    config, states = make_config("flash_attention_2"), torch.randn(2, 3, WIDTH)
    layout = build_layout(states, None, None, config)
    for spec in (MaskSpec(bias=make_bias()), MaskSpec(causal=True, prefix_lengths=torch.tensor([1, 2]))):
        with pytest.raises(CtxError, match=r"(?s)flash_attention_2 supports no position bias.*sdpa"):
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
