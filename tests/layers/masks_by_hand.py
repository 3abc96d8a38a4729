"""Blocks of layers and the masks they take, and what they give by the formula, one sequence at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from zoo import assert_close

from hf_ctxmodels.layers.attention.modules import BucketedPositionBias, CrossAttention, SelfAttention
from hf_ctxmodels.layers.transformer import FeedForward, TransformerBlock

WIDTH, HEADS, HEAD_DIM, BLOCKS = 12, 3, 6, 2
LENGTHS, MEMORY_LENGTHS = (7, 3, 5, 6), (4, 8, 1, 5)
SIDES = ("left", "right", "none")
PATHS = ("packed", "sdpa", "eager")


@dataclass(frozen=True)
class Toy:
    """A mask as the layers take it, and as a predicate of (query, key, length of the prefix)."""

    spec: Callable[[int], dict[str, Any]]
    allows: Callable[[int, int, int], bool]
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
        pairs = [[toy.allows(q, k, PREFIXES[number]) for k in range(length)] for q in range(length)]
        added = torch.zeros(length, length).masked_fill(~torch.tensor(pairs), float("-inf"))[None]
        if bias is not None:
            relative = torch.arange(length) - torch.arange(length)[:, None]
            added = added + bias.buckets(bias.bucket(relative)).permute(2, 0, 1)
        for block in blocks:
            states = block_by_hand(block, states, added, None if memories is None else memories[number])
        outputs.append(states)
    return torch.cat(outputs)


def assert_same(got: Tensor, expected: Tensor, leaves: list[Tensor], where: str = "") -> None:
    """Values, and gradients of everything they were made of."""
    assert_close(got, expected, f"values {where}")
    weights = torch.linspace(-1, 1, got.numel()).view_as(got)
    gradients = [torch.autograd.grad((each * weights).sum(), leaves, retain_graph=True) for each in (got, expected)]
    for number, (one, other) in enumerate(zip(*gradients, strict=True)):
        assert_close(one, other, f"gradient {number} {where}", tolerance=1e-4)
