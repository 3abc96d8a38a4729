"""Input embeddings of absolute-position encoders."""

import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.adapter_slots import EMBEDDING_SLOT, InvertibleSlot, after_embeddings
from hf_ctxmodels.layers.dropout import Dropout
from hf_ctxmodels.layers.linear import apply_linear


class TokenPositionTypeEmbeddings(nn.Module):
    """Sum of word, learned position and segment embeddings, normalised (Devlin et al. 2019, figure 2).

    Args:
        vocab_size: Number of tokens.
        width: Width of each table.
        max_positions: Longest sequence.
        num_types: Number of segments; 0 for no segment embeddings (DistilBERT).
        layer_norm_eps: Epsilon of the LayerNorm.
        dropout: Dropout on the result.
        padding_idx: Id with a zero word embedding without a gradient.
        projected_size: Width of a projection of the result (Lan et al. 2019, section 3.1, "factorized embedding
            parameterization"); None for none.

    Attributes:
        invertible: Invertible adapters of the result, before the projection, or None.
    """

    invertible: InvertibleSlot | None

    def __init__(
        self,
        vocab_size: int,
        width: int,
        max_positions: int,
        num_types: int,
        *,
        layer_norm_eps: float,
        dropout: float,
        padding_idx: int | None,
        projected_size: int | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx)
        self.position_embeddings = nn.Embedding(max_positions, width)
        self.token_type_embeddings = nn.Embedding(num_types, width) if num_types else None
        self.norm = nn.LayerNorm(width, eps=layer_norm_eps)
        self.dropout = Dropout(dropout)
        self.register_module(EMBEDDING_SLOT, None)
        self.projection = None if projected_size is None else nn.Linear(width, projected_size)

    def forward(self, words: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Embed tokens.

        Args:
            words: (...) ids, or (..., width) word embeddings.
            position_ids: Same leading shape as `words`, or broadcastable to it.
            token_type_ids: Likewise; None for the first segment. Not read without segment embeddings.

        Returns:
            (..., width), or (..., projected_size).
        """
        embedded = words if words.is_floating_point() else self.word_embeddings(words)
        embedded = embedded + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(position_ids)
            embedded = embedded + self.token_type_embeddings(token_type_ids)
        embedded = after_embeddings(self.invertible, self.dropout(self.norm(embedded)))
        return embedded if self.projection is None else apply_linear(self.projection, embedded)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., width)."""
        return super().forward(input) * self.embedding_dim**0.5
