"""Linear layers and embeddings whose weight is a product of two low-rank factors."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.layers.cpu.linear import fast_linear, is_rowwise, linear


class _FactorizedLinear(nn.Module):
    """Base class of linear layers from in to rank features (`project_input`) and from rank to out features."""

    has_low_rank_weights = True
    accepts_output_range = True
    in_features: int
    out_features: int
    rank: int
    output_factor: nn.Linear

    @property
    def bias(self) -> Tensor | None:
        """The (out,) bias, if there is one."""
        return self.output_factor.bias

    def project_input(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., rank)."""
        raise NotImplementedError

    def forward(self, input: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
        """(..., in) -> (..., out), or the output features from `start` to `stop`."""
        return linear(self.output_factor, self.project_input(input), start, stop)

    def extra_repr(self) -> str:
        """Text for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}"


class LowRankLinear(_FactorizedLinear):
    """Linear layer whose (out, in) weight is the product of an (out, rank) and a (rank, in) factor.

    Attributes:
        input_factor, output_factor: Linear layers from in to rank features, and from rank to out features with the
            bias, if there is one.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool = True, **factory_options: Any
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.input_factor = nn.Linear(in_features, rank, bias=False, **factory_options)
        self.output_factor = nn.Linear(rank, out_features, bias=bias, **factory_options)

    @property
    def weight(self) -> Tensor:
        """The (out, in) product of the factors."""
        return _dense_weight(self.output_factor) @ _dense_weight(self.input_factor)

    @property
    def is_rowwise(self) -> bool:
        """Whether an output row depends on its own input row only."""
        return is_rowwise(self.input_factor) and is_rowwise(self.output_factor)

    def project_input(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., rank)."""
        return linear(self.input_factor, input)


class LowRankEmbedding(nn.Module):
    """Embeddings of a small width with a linear projection (Lan et al. 2019, arXiv 1909.11942, section 3.1, "factorized
    embedding parameterization"), multiplied by `factor`.

    Attributes:
        table: The (num_embeddings, rank) embeddings.
        projection: Linear layer from rank to embedding_dim features.
    """

    has_low_rank_weights = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        padding_idx: int | None = None,
        factor: float = 1.0,
        **factory_options: Any,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.rank = num_embeddings, embedding_dim, rank
        self.padding_idx, self.factor = padding_idx, factor
        self.table = nn.Embedding(num_embeddings, rank, padding_idx=padding_idx, **factory_options)
        self.projection = nn.Linear(rank, embedding_dim, bias=False, **factory_options)

    @property
    def weight(self) -> Tensor:
        """The (num_embeddings, embedding_dim) product of the factors, without `factor`."""
        return self.table.weight @ _dense_weight(self.projection).T

    def forward(self, input: Tensor) -> Tensor:
        """(...) ids -> (..., embedding_dim)."""
        embeddings = linear(self.projection, self.table(input))
        return embeddings if self.factor == 1.0 else embeddings * self.factor

    def extra_repr(self) -> str:
        """Text for `print(model)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}"


class TiedLowRankLinear(_FactorizedLinear):
    """Output layer whose weight is the weight of a `LowRankEmbedding`: both factors are tied to it.

    Attributes:
        projection_weight: The (in, rank) weight of `LowRankEmbedding.projection`, multiplied from the other side.
        output_factor: Linear layer from rank to out features with the weight of `LowRankEmbedding.table`.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool = True, **factory_options: Any
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.projection_weight = nn.Parameter(torch.empty(in_features, rank, **factory_options))
        self.output_factor = nn.Linear(rank, out_features, bias=bias, **factory_options)

    @property
    def weight(self) -> Tensor:
        """The (out, in) product of the factors."""
        return _dense_weight(self.output_factor) @ self.projection_weight.T

    @property
    def is_rowwise(self) -> bool:
        """Whether an output row depends on its own input row only."""
        return is_rowwise(self.output_factor)

    def project_input(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., rank)."""
        return fast_linear(input, self.projection_weight.T)


def _dense_weight(layer: Any) -> Tensor:
    """The weight of a linear layer, dequantized if it is quantized to int8."""
    return layer.dequantized() if hasattr(layer, "dequantized") else layer.weight
