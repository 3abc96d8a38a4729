"""Batch normalisation of rows, for the heads of CoVe and ULMFiT."""

from torch import Tensor, nn
from torch.nn import functional as F


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation that uses the running statistics for a single row, which has no variance."""

    def forward(self, input: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        if self.training and len(input) == 1:
            statistics = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(input, *statistics, training=False, eps=self.eps)
        return super().forward(input)
