"""Biases of attention scores that depend on the distance between query and key."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BucketedPositionBias(nn.Module):
    """A learned bias for each head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`, and the last
    bucket holds all larger distances. With `bidirectional`, keys before and after the query have half of the buckets
    each; otherwise keys after it share the bucket of distance 0 (a causal mask hides them).

    Args:
        num_heads: Number of heads.
        num_buckets: Number of buckets.
        max_distance: Smallest distance in the last bucket.
        bidirectional: Whether keys before and after the query have different buckets.
    """

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
        limit = self.max_distance
        bias_by_distance = self.buckets(self.bucket(torch.arange(-limit, limit + 1, device=queries.device)))
        distances = (keys[:, None, :] - queries[:, :, None]).clamp(-limit, limit)
        return F.embedding(distances + limit, bias_by_distance).permute(0, 3, 1, 2)

    def bucket(self, distances: Tensor) -> Tensor:
        """(...) position of the key minus position of the query -> (...) bucket."""
        size = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        magnitudes = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        num_exact = size // 2
        growth = (size - num_exact) / math.log(self.max_distance / num_exact)
        logarithmic = num_exact + ((magnitudes.clamp(min=1) / num_exact).log() * growth).long()
        buckets = torch.where(magnitudes < num_exact, magnitudes, logarithmic.clamp(max=size - 1))
        return buckets + size * (distances > 0) if self.bidirectional else buckets
