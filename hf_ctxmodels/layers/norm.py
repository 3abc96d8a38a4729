"""Batch normalisation of whole rows, for the heads of CoVe and ULMFiT."""

from torch import Tensor, nn
from torch.nn import functional as F


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation that takes a single row too, by the running statistics: one row has no spread."""

    def forward(self, input: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        if self.training and len(input) == 1:
            spread = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(input, *spread, training=False, eps=self.eps)
        return super().forward(input)
