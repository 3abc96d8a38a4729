"""The Transformer layer of BERT and its heirs, normalised after each residual sum."""

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ctxmodels.layers.attention.layouts import Layout
from hf_ctxmodels.layers.attention.modules import SelfAttention
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.feed_forward import FeedForward


class PostNormLayer(GradientCheckpointingLayer):
    """Self-attention and feed-forward, each followed by dropout, residual sum and LayerNorm (Vaswani et al. 2017).

    Args:
        hidden_size: Width of the input and output.
        num_heads: Attention heads; must divide `hidden_size`.
        intermediate_size: Width of the feed-forward network.
        activation: Its activation, by transformers' name.
        layer_norm_eps: Epsilon of both LayerNorms.
        attention_dropout: Dropout on attention probabilities.
        dropout: Dropout after each of the two.
        config: Only handed to the attention interface of transformers, see `SelfAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        *,
        activation: str,
        layer_norm_eps: float,
        attention_dropout: float,
        dropout: float,
        config: PreTrainedConfig,
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads, dropout=attention_dropout, config=config)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.feed_forward = FeedForward(hidden_size, intermediate_size, activation)
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = Dropout(dropout)

    def forward(self, hidden_states: Tensor, layout: Layout) -> Tensor:
        """(..., hidden) as packed by `layout` -> (..., hidden) at the rows it wants."""
        attended, _ = self.attention(hidden_states, layout)
        hidden_states = self.attention_norm(layout.query_rows(hidden_states) + self.dropout(attended))
        return self.feed_forward_norm(hidden_states + self.dropout(self.feed_forward(hidden_states)))


class FirstTokenPooler(nn.Module):
    """Dense and tanh on the first token's state: what the pair and sequence heads read.

    Args:
        hidden_size: Width of the input and output.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first_states: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden)."""
        return self.dense(first_states).tanh()
