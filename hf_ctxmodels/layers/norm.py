"""Norms that torch does not have, or computes in another precision."""

from torch import Tensor, nn
from torch.nn import functional as F


class SafeBatchNorm1d(nn.BatchNorm1d):
    """Batch normalisation that uses the running statistics for a single row, which has no variance; for the heads of
    CoVe and ULMFiT."""

    def forward(self, input: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        if self.training and len(input) == 1:
            statistics = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(input, *statistics, training=False, eps=self.eps)
        return super().forward(input)


class RMSNorm(nn.RMSNorm):
    """Scaling to a root mean square of 1, without a mean and without a bias (Zhang & Sennrich 2019, arXiv 1910.07467,
    equation 4).

    The mean square is computed in float32, as in T5: squares of half-precision states would overflow float16.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) -> (..., width), in the dtype of the weight."""
        scaled = F.rms_norm(input.float(), self.normalized_shape, None, self.eps)
        return self.weight * scaled.to(self.weight.dtype)
