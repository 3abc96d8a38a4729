"""Multi-head attention (Vaswani et al. 2017, section 3.2) within a sequence, and from one sequence to another.

Both modules accept transformers' caches, with keys and values (batch, heads, length, head_dim) of each layer.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from hf_ctxmodels.core.attention_heads import prune_projections
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.tensor_parallel import LOCAL_FEATURES, PACKED_KV, PACKED_QKV, UNSHARDED_HINT
from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.compiled_attention import attend_traced
from hf_ctxmodels.layers.attention.layouts import Layout, TracedLayout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, BiasOfHeads, MaskSpec, gather_position_bias
from hf_ctxmodels.layers.attention.prepared_masks import AttentionMask, prepare_mask
from hf_ctxmodels.layers.cpu.linear import linear


class _MultiHeadAttention(nn.Module):
    """Base class of `SelfAttention` and `CrossAttention`.

    Args:
        head_dim: Width of a head; None for `hidden_size // num_heads`.
        dropout: Dropout on the attention probabilities.
        scale: Factor on the scores; None for 1 / sqrt(head_dim).

    Attributes:
        heads: Numbers of the heads, without pruned ones; under tensor parallelism, of this process.
        bias_gates: (heads,) factors of the bias of the scores; None for 1.
        tp_styles: Name of a linear layer -> style of tensor parallelism, see `core.tensor_parallel`.
    """

    tp_styles: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = self.initial_num_heads = num_heads
        self.heads = tuple(range(num_heads))
        self.bias_gates: Tensor | None = None
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.attention_dropout = dropout
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=bias)

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    def shard_heads(self, rank: int, size: int) -> None:
        """Select the heads of process `rank` of `size`, which has their rows of the projections.

        Raises:
            CtxError: The number of heads is not a multiple of the number of processes, or heads are pruned.
        """
        if self.num_heads < self.initial_num_heads:
            raise CtxError("Layers with pruned heads cannot be sharded by tensor parallelism.", hint=UNSHARDED_HINT)
        if self.num_heads % size:
            raise CtxError(
                f"{self.num_heads} attention heads per layer cannot be divided among {size} processes.",
                hint="start a number of processes that divides the number of heads.",
            )
        self.num_heads = self.initial_num_heads = self.num_heads // size
        self.heads = self.heads[rank * self.num_heads : (rank + 1) * self.num_heads]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        mask: AttentionMask,
        key_layout: Layout | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        spec = mask if isinstance(mask, MaskSpec) else mask.spec
        has_other_heads = self.bias_gates is not None or self.num_heads < self.initial_num_heads
        if spec.bias is not None and has_other_heads:
            mask = replace(spec, bias=BiasOfHeads(spec.bias, self.heads, self.bias_gates))
        dropout = self.attention_dropout if self.training else 0.0
        if isinstance(layout, TracedLayout):
            traced_mask: Any = prepare_mask(mask, layout, query)
            keys: Any = key_layout
            context = attend_traced(
                query, key, value, layout, traced_mask, scale=self.scale, dropout=dropout, key_layout=keys
            )
            return context, None
        return attend(query, key, value, layout, mask, scale=self.scale, dropout=dropout, key_layout=key_layout)

    def _split_heads(self, projected: Tensor, number: int) -> tuple[Tensor, ...]:
        """(..., number * inner) -> `number` tensors (..., heads, head_dim)."""
        return projected.unflatten(-1, (number, self.num_heads, self.head_dim)).unbind(-3)


class SelfAttention(_MultiHeadAttention):
    """Multi-head self-attention, with one linear layer for queries, keys and values; see `_MultiHeadAttention`."""

    tp_styles = {"qkv_proj": PACKED_QKV, "out_proj": "rowwise"}

    def __init__(self, hidden_size: int, num_heads: int, *, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(hidden_size, num_heads, bias=bias, **kwargs)
        self.qkv_proj = nn.Linear(hidden_size, 3 * self.inner_size, bias=bias)

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Remove heads, see `core.attention_heads.prune_heads`."""
        prune_projections(self, heads, {self.qkv_proj: 3})

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        mask: AttentionMask = BIDIRECTIONAL,
        *,
        past_key_values: Cache | None = None,
        layer_index: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within the sequences of `layout`.

        Args:
            hidden_states: (..., hidden) as packed by `layout`, which also selects the computed tokens.
            mask: Attention pattern within a sequence; prepare it if several layers share it.
            past_key_values: Cache that is extended by these keys and values and then attended to; the argument of
                `build_layout`.
            layer_index: Number of this layer in the cache.

        Returns:
            (..., hidden) at the computed tokens, and the attention probabilities if the implementation returns them.
        """
        queries, width = layout.select_queries(hidden_states), self.inner_size
        if queries is hidden_states:
            query, key, value = self._split_heads(linear(self.qkv_proj, hidden_states), 3)
        else:
            (query,) = self._split_heads(linear(self.qkv_proj, queries, 0, width), 1)
            key, value = self._split_heads(linear(self.qkv_proj, hidden_states, width, 3 * width), 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key.transpose(1, 2), value.transpose(1, 2), layer_index)
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        context, probabilities = self._attend(query, key, value, layout, mask)
        del query, key, value  # frees their memory before the output is allocated if no gradient needs them
        return linear(self.out_proj, context.flatten(-2)), probabilities


class CrossAttention(_MultiHeadAttention):
    """Multi-head attention from the tokens of one sequence to another (decoder to encoder); see
    `_MultiHeadAttention`."""

    tp_styles = {"q_proj": "colwise", "kv_proj": PACKED_KV, "out_proj": "rowwise"}

    def __init__(self, hidden_size: int, num_heads: int, *, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(hidden_size, num_heads, bias=bias, **kwargs)
        self.q_proj = nn.Linear(hidden_size, self.inner_size, bias=bias)
        self.kv_proj = nn.Linear(hidden_size, 2 * self.inner_size, bias=bias)

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Remove heads, see `core.attention_heads.prune_heads`."""
        prune_projections(self, heads, {self.q_proj: 1, self.kv_proj: 2})

    def forward(
        self,
        hidden_states: Tensor,
        layout: Layout,
        memory: Tensor,
        memory_layout: Layout,
        mask: AttentionMask = BIDIRECTIONAL,
        *,
        past_key_values: EncoderDecoderCache | None = None,
        layer_index: int = 0,
        targets_per_source: int = 1,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each sequence of `layout` to the sequence with the same index of `memory_layout`.

        Args:
            hidden_states: (..., hidden) at the computed tokens of `layout`.
            memory: (..., hidden) states to attend to.
            past_key_values: The cache, whose cross-attention cache has the keys and values of `memory` after the first
                step.
            targets_per_source: Number of consecutive rows of a padded `layout` that attend to the same row of
                `memory_layout`, see `SharedSourceCache`.
        """
        (query,) = self._split_heads(linear(self.q_proj, hidden_states), 1)
        key, value = self._keys_and_values(memory, past_key_values, layer_index)
        if targets_per_source > 1:
            query = query.unflatten(0, (-1, targets_per_source)).flatten(1, 2)
        query_layout = layout.share_source(targets_per_source)
        context, probabilities = self._attend(query, key, value, query_layout, mask, memory_layout)
        del query, key, value  # as in `SelfAttention`
        output = linear(self.out_proj, context.flatten(-2))
        if targets_per_source == 1:
            return output, probabilities
        if probabilities is not None:
            probabilities = probabilities.unflatten(2, (targets_per_source, -1)).transpose(1, 2).flatten(0, 1)
        return output.unflatten(1, (targets_per_source, -1)).flatten(0, 1), probabilities

    def _keys_and_values(
        self, memory: Tensor, past_key_values: EncoderDecoderCache | None, layer_index: int
    ) -> tuple[Tensor, Tensor]:
        """(..., heads, head_dim) each; computed once per cache."""
        if past_key_values is None:
            key, value = self._split_heads(linear(self.kv_proj, memory), 2)
            return key, value
        cache = past_key_values.cross_attention_cache
        if past_key_values.is_updated.get(layer_index):
            key, value = cache.layers[layer_index].keys, cache.layers[layer_index].values
        else:
            key, value = self._split_heads(linear(self.kv_proj, memory), 2)
            key, value = cache.update(key.transpose(1, 2), value.transpose(1, 2), layer_index)
            past_key_values.is_updated[layer_index] = True
        length = memory.shape[1]  # a static cache may be longer
        return key[:, :, :length].transpose(1, 2), value[:, :, :length].transpose(1, 2)


class BucketedPositionBias(nn.Module):
    """A learned bias for each head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`, and the last
    bucket holds all larger distances. With `bidirectional`, keys before and after the query have half of the buckets
    each; otherwise keys after it share the bucket of distance 0 (a causal mask hides them).
    """

    tp_styles: ClassVar[Mapping[str, str]] = {"buckets": LOCAL_FEATURES}

    def __init__(
        self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        self.num_buckets = num_buckets  # a wrapper of the embedding may not have `num_embeddings`
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.buckets = nn.Embedding(num_buckets, num_heads)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch, queries) and (batch, keys) positions -> (batch, heads, queries, keys)."""
        return gather_position_bias(self.by_distance(queries.device), queries, keys)

    def by_distance(self, device: torch.device) -> Tensor:
        """(2 * max_distance + 1, heads) bias of the distances from -max_distance to max_distance."""
        return self.buckets(self.bucket(torch.arange(-self.max_distance, self.max_distance + 1, device=device)))

    def bucket(self, distances: Tensor) -> Tensor:
        """(...) position of the key minus position of the query -> (...) bucket."""
        size = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        magnitudes = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        num_exact = size // 2
        growth = (size - num_exact) / math.log(self.max_distance / num_exact)
        logarithmic = num_exact + ((magnitudes.clamp(min=1) / num_exact).log() * growth).long()
        buckets = torch.where(magnitudes < num_exact, magnitudes, logarithmic.clamp(max=size - 1))
        return buckets + size * (distances > 0) if self.bidirectional else buckets
