"""Adaptive embeddings and softmax: frequent tokens are wider and cheaper to predict than rare ones.

The vocabulary is ordered by frequency and divided into clusters (Grave et al. 2017, arXiv 1609.04309; Baevski & Auli
2019, arXiv 1809.10853). The first cluster and one symbol for each other cluster have a common softmax, and a token of
another cluster has the probability of its cluster times its probability within the cluster.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.core.host_copies import on_host, true_indices
from hf_ctxmodels.core.weights import require_loaded
from hf_ctxmodels.layers.common import embedding_matrix


class AdaptiveEmbedding(nn.Module):
    """Token embeddings whose width depends on the cluster, projected to the width of the layers and multiplied by the
    square root of that width.

    Args:
        cluster_sizes: Number of tokens and width of each cluster.
        hidden_size: Width of the output.
    """

    def __init__(self, cluster_sizes: Sequence[tuple[int, int]], hidden_size: int) -> None:
        super().__init__()
        self.ends = list(accumulate(size for size, _ in cluster_sizes))
        self.embedding_dim, self.scale = hidden_size, hidden_size**0.5
        self.clusters = nn.ModuleList(nn.Embedding(*size) for size in cluster_sizes)
        is_projected = any(width != hidden_size for _, width in cluster_sizes)
        # parameters, not linear layers: the softmax multiplies with their transposes
        self.projections = nn.ParameterList(
            torch.zeros(hidden_size, width) for _, width in cluster_sizes if is_projected
        )

    def project(self, cluster: int, vectors: Tensor) -> Tensor:
        """(..., width of the cluster) -> (..., hidden)."""
        if not len(self.projections):
            return vectors
        _require_loaded(self.projections[cluster], vectors)
        return F.linear(vectors, self.projections[cluster])

    def forward(self, input_ids: Tensor) -> Tensor:
        """(...) token ids -> (..., hidden)."""
        if len(self.clusters) == 1:
            return self.project(0, self.clusters[0](input_ids)) * self.scale
        ids = input_ids.flatten()
        output = None
        for number, (cluster, start, end) in enumerate(zip(self.clusters, [0, *self.ends], self.ends, strict=False)):
            is_inside = (ids >= start) & (ids < end)
            vectors = self.project(number, cluster((ids - start).clamp(0, end - start - 1)))
            output = vectors if output is None else torch.where(is_inside[:, None], vectors, output)
        assert output is not None
        return output.unflatten(0, input_ids.shape) * self.scale


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of tokens, with the weights of an `AdaptiveEmbedding`.

    The symbols follow the tokens of the first cluster, in the order of the clusters, as in transformers 4 and in the
    TensorFlow code that trained the released checkpoint. In the released PyTorch code they are in reverse order.

    Args:
        cluster_sizes, hidden_size: As in `AdaptiveEmbedding`.
        is_tied: For each cluster, whether it shares the projection of the embedding.
    """

    def __init__(self, cluster_sizes: Sequence[tuple[int, int]], hidden_size: int, is_tied: Sequence[bool]) -> None:
        super().__init__()
        (_, first_width), num_tails = cluster_sizes[0], len(cluster_sizes) - 1
        self.biases = nn.ParameterList(torch.zeros(size) for size, _ in cluster_sizes)
        self.cluster_weight = nn.Parameter(torch.zeros(num_tails, first_width)) if num_tails else None
        self.cluster_bias = nn.Parameter(torch.zeros(num_tails)) if num_tails else None
        is_projected = any(width != hidden_size for _, width in cluster_sizes)
        self.projections = nn.ParameterDict(
            {
                str(number): torch.zeros(hidden_size, width)
                for number, ((_, width), tied) in enumerate(zip(cluster_sizes, is_tied, strict=True))
                if is_projected and not tied
            }
        )

    def _log_softmax(self, states: Tensor, cluster: int, embedding: AdaptiveEmbedding) -> Tensor:
        """(rows, hidden) -> (rows, tokens of the cluster) log-probabilities, for cluster 0 with the other clusters."""
        projection: Tensor | None = None
        if str(cluster) in self.projections:
            projection = self.projections[str(cluster)]
        elif len(embedding.projections):
            projection = embedding.projections[cluster]
        if projection is not None:
            _require_loaded(projection, states)
            states = states @ projection
        bias = self.biases[cluster]
        weight = embedding_matrix(embedding.clusters[cluster], len(bias))
        _require_loaded(bias, states)
        _require_loaded(weight, states)
        if cluster == 0 and self.cluster_weight is not None and self.cluster_bias is not None:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return F.linear(states, weight, bias).float().log_softmax(-1)

    def log_probabilities(self, states: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """(..., hidden) states -> (..., vocabulary) log-probabilities."""
        first = self._log_softmax(states, 0, embedding)
        num_first = embedding.ends[0]
        tails = [
            self._log_softmax(states, cluster, embedding) + first[..., num_first + cluster - 1, None]
            for cluster in range(1, len(embedding.clusters))
        ]
        return torch.cat([first[..., :num_first], *tails], -1)

    def loss(self, states: Tensor, targets: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """(rows,) negative log-likelihood in nats of (rows,) target ids, given (rows, hidden) states.

        The softmax of a cluster is computed only for the targets in it.
        """
        first = self._log_softmax(states, 0, embedding)
        columns = targets
        for cluster, start in enumerate(embedding.ends[:-1], 1):  # the last cluster that contains larger ids remains
            columns = torch.where(targets >= start, embedding.ends[0] + cluster - 1, columns)
        losses = -first.gather(1, columns[:, None])[:, 0]
        for cluster, (start, end) in enumerate(zip(embedding.ends, embedding.ends[1:]), 1):
            rows = _rows_between(targets, start, end)
            tail = self._log_softmax(states[rows], cluster, embedding)  # also without rows: DDP expects gradients
            losses = losses.index_add(0, rows, -tail.gather(1, (targets[rows] - start)[:, None])[:, 0])
        return losses


def _rows_between(targets: Tensor, start: int, end: int) -> Tensor:
    """Indices of the targets from `start` to before `end`."""
    return on_host(lambda ids: true_indices((ids >= start) & (ids < end)), targets)


def _require_loaded(weight: Tensor, states: Tensor) -> None:
    content = "The adaptive embeddings and the adaptive softmax"
    require_loaded(weight, states, content, hint="pass a device_map that offloads only modules of `layers`.")
