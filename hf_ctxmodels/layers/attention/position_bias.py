"""Biases of attention scores that depend on the distance of query and key."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BucketedPositionBias(nn.Module):
    """A learned number for each head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`, and the last one
    holds all beyond. Bidirectional, keys before and after the query have half of the buckets each; else keys after it
    share the bucket of distance 0 (a causal mask hides them).

    Args:
        num_heads: Number of heads.
        num_buckets: Number of buckets.
        max_distance: Distance from which on the last bucket serves.
        bidirectional: Whether keys after the query are told apart.
    """

    def __init__(
        self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        self.num_buckets = num_buckets  # what wraps the table may not say it
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.buckets = nn.Embedding(num_buckets, num_heads)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch, queries) and (batch, keys) positions -> (batch, heads, queries, keys)."""
        farthest = self.max_distance
        table = self.buckets(self.bucket(torch.arange(-farthest, farthest + 1, device=queries.device)))
        relative = (keys[:, None, :] - queries[:, :, None]).clamp(-farthest, farthest)
        return F.embedding(relative + farthest, table).permute(0, 3, 1, 2)

    def bucket(self, relative: Tensor) -> Tensor:
        """(...) positions of keys minus those of queries -> (...) numbers of buckets."""
        size = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        distance = relative.abs() if self.bidirectional else (-relative).clamp(min=0)
        exact = size // 2
        growth = (size - exact) / math.log(self.max_distance / exact)
        far = exact + ((distance.clamp(min=1) / exact).log() * growth).long()
        bucket = torch.where(distance < exact, distance, far.clamp(max=size - 1))
        return bucket + size * (relative > 0) if self.bidirectional else bucket
