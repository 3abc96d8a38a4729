"""Sub-layers without parameters, at which forward hooks change what a model computes.

A hook sees a named tensor and may replace it; no layer knows what is hooked to it. `hf_ctxmodels.downstream.adapters`
registers such hooks.
"""

from torch import Tensor, nn


class HookPoint(nn.Identity):
    """The identity, as a named place for forward hooks: the embeddings' output, or the input of an output layer."""


class ResidualSum(nn.Module):
    """Sum of a sub-layer's input and its output, normalised with post-norm.

    Forward pre-hooks may change its arguments, which are always given by position.
    """

    def forward(self, hidden_states: Tensor, output: Tensor, norm: nn.Module | None, layer_index: int) -> Tensor:
        """Add, and normalise with post-norm.

        Args:
            hidden_states: (..., hidden) the sub-layer's input, before any norm.
            output: (..., hidden) the sub-layer's output, after dropout.
            norm: The norm of the sum; None with pre-norm.
            layer_index: Position of the block in the order of application, from 0; for hooks.

        Returns:
            (..., hidden).
        """
        total = hidden_states + output
        return total if norm is None else norm(total)
