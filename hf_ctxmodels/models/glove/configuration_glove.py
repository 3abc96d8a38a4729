"""GloVe configuration (Pennington, Socher, Manning 2014, "GloVe: Global Vectors for Word Representation")."""

from typing import Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configuration_static import CtxStaticConfig


@strict
class CtxGloveConfig(CtxStaticConfig):
    """Word vectors and their training; the defaults are the paper's.

    Args:
        x_max: Count from which a co-occurrence has the full weight (equation 9).
        alpha: Power of the weight below it.
        context_vectors: Whether there are two tables, whose sum is the word's vector (section 4.2); False for vectors
            from a file, which holds the sum only.
    """

    model_type = "ctx-glove"

    x_max: float | int = 100.0
    alpha: float | int = 0.75
    context_vectors: bool = True

    @classmethod
    def for_single_table(cls, vocab_size: int, hidden_size: int) -> Self:
        """See `CtxStaticConfig`: the sum of the two tables."""
        return cls(vocab_size=vocab_size, hidden_size=hidden_size, context_vectors=False)

    def validate_weighting(self) -> None:
        """Check the weighting (called at construction)."""
        if self.x_max <= 0 or self.alpha < 0:
            raise ValueError(f"x_max={self.x_max} must be above 0, alpha={self.alpha} at least 0.")
