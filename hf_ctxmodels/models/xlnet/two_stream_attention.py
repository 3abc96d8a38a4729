"""The layer of XLNet: two-stream relative attention with segment recurrence (Yang et al. 2019, sections 2.3 to 2.5).

The content stream holds the tokens themselves, the query stream one row for each token to predict: it knows the
token's position but not the token. Both share all weights and read the keys and values of the content stream. Without
query rows this is the encoder used for fine-tuning.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ctxmodels.layers.adapter_slots import BLOCK_SLOT, BlockAdapters, add_residual
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.transformer import FeedForward
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.relative_attention import RelativeBiases
from hf_ctxmodels.models.xlnet.stream_layouts import Probabilities, Streams


class RelativeAttention(nn.Module):
    """Multi-head attention by content, distance and segment, for one stream or two.

    Args:
        hidden_size: Width of the input and output.
        num_heads: Number of heads; must divide `hidden_size`.
        dropout: Dropout on the attention probabilities.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scaling = (hidden_size // num_heads) ** -0.5
        self.attention_dropout = dropout
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.position_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.segment_bias = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.segment_embeddings = nn.Parameter(torch.zeros(2, num_heads, hidden_size // num_heads))

    @property
    def biases(self) -> RelativeBiases:
        """The parameters of the score besides the projections."""
        return RelativeBiases(self.content_bias, self.position_bias, self.segment_bias, self.segment_embeddings)

    def forward(
        self, hidden_states: Tensor, streams: Streams, memory: Tensor | None = None
    ) -> tuple[Tensor, Probabilities]:
        """Attend as `streams` says.

        Args:
            hidden_states: (..., hidden), the rows of `streams`.
            streams: Which rows are keys, which are computed, and which keys are visible to each.
            memory: (batch, memory, hidden) states of earlier segments.

        Returns:
            (..., hidden) at the computed rows, and the attention probabilities where the implementation gives them.
        """
        width = hidden_states.shape[-1]
        queries, keys = streams.select_queries(hidden_states), streams.key_rows(hidden_states)
        if memory is not None:
            keys = torch.cat([memory, keys], 1)
        if queries is keys:
            query, key, value = self._split_heads(linear(self.qkv_proj, keys), 3)
        else:
            (query,) = self._split_heads(linear(self.qkv_proj, queries, 0, width), 1)
            key, value = self._split_heads(linear(self.qkv_proj, keys, width, 3 * width), 2)
        (relative,) = self._split_heads(linear(self.position_proj, streams.encodings), 1)
        options = {"scaling": self.scaling, "dropout": self.attention_dropout if self.training else 0.0}
        context, probabilities = streams.attend(query, key, value, relative, self.biases, **options)
        return linear(self.out_proj, context.flatten(-2)), probabilities

    def _split_heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(..., parts * hidden) -> `parts` tensors (..., heads, head_dim)."""
        return projected.unflatten(-1, (parts, self.num_heads, -1)).unbind(-3)


class CtxXLNetLayer(GradientCheckpointingLayer):
    """Relative attention and feed-forward, each followed by dropout, the residual sum and a LayerNorm (post-norm)."""

    adapters: BlockAdapters | None

    def __init__(self, config: CtxXLNetConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(
            config.hidden_size, config.num_attention_heads, dropout=config.attention_dropout
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(
            config.hidden_size, config.intermediate_size, config.hidden_act, dropout=config.hidden_dropout_prob
        )
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.register_module(BLOCK_SLOT, None)

    def forward(
        self, hidden_states: Tensor, streams: Streams, memory: Tensor | None = None
    ) -> tuple[Tensor, Probabilities]:
        """(..., hidden), the rows of `streams` -> (..., hidden) at the rows it computes, and the probabilities."""
        attended, probabilities = self.attention(hidden_states, streams, memory)
        rows, attended = streams.select_queries(hidden_states), self.dropout(attended)
        hidden_states = add_residual(self.adapters, "attention", self.attention_norm, rows, attended)
        fed = self.dropout(self.feed_forward(hidden_states))
        return add_residual(self.adapters, "feed_forward", self.feed_forward_norm, hidden_states, fed), probabilities
