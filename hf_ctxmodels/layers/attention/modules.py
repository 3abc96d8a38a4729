"""Multi-head attention (Vaswani et al. 2017, section 3.2) within a sequence, and from one sequence to another.

Both modules accept transformers' caches, with keys and values (batch, heads, length, head_dim) of each layer.
"""

from dataclasses import replace

from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from hf_ctxmodels.layers.attention.backends import attend
from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.masks import BIDIRECTIONAL, AttentionMask, MaskSpec, PositionBias
from hf_ctxmodels.layers.cpu.linear import linear


class _MultiHeadAttention(nn.Module):
    """Heads, scale, dropout and output projection of `SelfAttention` and `CrossAttention`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None,
        bias: bool,
        dropout: float,
        scale: float | None,
        position_bias: PositionBias | None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.attention_dropout = dropout
        self.position_bias = position_bias
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=bias)

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        mask: AttentionMask,
        key_layout: Layout | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.position_bias is not None:
            spec = mask if isinstance(mask, MaskSpec) else mask.spec
            mask = replace(spec, bias=self.position_bias)
        dropout = self.attention_dropout if self.training else 0.0
        return attend(query, key, value, layout, mask, scale=self.scale, dropout=dropout, key_layout=key_layout)

    def _split_heads(self, projected: Tensor, number: int) -> tuple[Tensor, ...]:
        """(..., number * inner) -> `number` tensors (..., heads, head_dim)."""
        return projected.unflatten(-1, (number, self.num_heads, self.head_dim)).unbind(-3)

    def _project_output(self, context: Tensor) -> Tensor:
        """(..., heads, head_dim) -> (..., hidden)."""
        return linear(self.out_proj, context.flatten(-2))


class SelfAttention(_MultiHeadAttention):
    """Multi-head self-attention, with one linear layer for queries, keys and values.

    Args:
        hidden_size: Width of the input and output.
        num_heads: Number of heads.
        head_dim: Width of a head; None for `hidden_size // num_heads`.
        bias: Whether the linear layers have a bias.
        dropout: Dropout on the attention probabilities.
        scale: Factor on the scores; None for 1 / sqrt(head_dim).
        position_bias: A bias of the scores of this layer, instead of the mask's bias, which all layers share.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        position_bias: PositionBias | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, bias, dropout, scale, position_bias)
        self.qkv_proj = nn.Linear(hidden_size, 3 * self.inner_size, bias=bias)

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
            hidden_states: (..., hidden) as packed by `layout`.
            layout: The layout, which also selects the computed tokens.
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
        return self._project_output(context), probabilities


class CrossAttention(_MultiHeadAttention):
    """Multi-head attention from the tokens of one sequence to the tokens of another (decoder to encoder).

    Args:
        hidden_size: Width of the input and output.
        num_heads: Number of heads.
        memory_size: Width of the memory; None for `hidden_size`.
        head_dim, bias, dropout, scale, position_bias: As in `SelfAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        memory_size: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        position_bias: PositionBias | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, bias, dropout, scale, position_bias)
        self.q_proj = nn.Linear(hidden_size, self.inner_size, bias=bias)
        self.kv_proj = nn.Linear(hidden_size if memory_size is None else memory_size, 2 * self.inner_size, bias=bias)

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
            layout: The layout of the queries.
            memory: (..., memory) states to attend to.
            memory_layout: The layout of `memory`.
            mask: Attention pattern; prepare it if several layers share it.
            past_key_values: The cache, whose cross-attention cache has the keys and values of `memory` after the first
                step.
            layer_index: Number of this layer in the cache.
            targets_per_source: Number of consecutive rows of a padded `layout` that attend to the same row of
                `memory_layout`, see `SharedSourceCache`.

        Returns:
            The same as `SelfAttention`.
        """
        (query,) = self._split_heads(linear(self.q_proj, hidden_states), 1)
        key, value = self._keys_and_values(memory, past_key_values, layer_index)
        if targets_per_source > 1:
            query = query.unflatten(0, (-1, targets_per_source)).flatten(1, 2)
        query_layout = layout.share_source(targets_per_source)
        context, probabilities = self._attend(query, key, value, query_layout, mask, memory_layout)
        del query, key, value  # as in `SelfAttention`
        output = self._project_output(context)
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
