"""GloVe configuration (Pennington, Socher, Manning 2014, "GloVe: Global Vectors for Word Representation")."""

from typing import Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxStaticConfig


@strict
class CtxGloveConfig(CtxStaticConfig):
    """Word vectors and their training; the defaults follow the paper.

    Args:
        x_max: Count from which a co-occurrence has the full weight (equation 9).
        alpha: Exponent of the weight of smaller counts.
        context_vectors: Whether a word's vector is the sum of two tables (section 4.2); False for vectors from a file,
            which contains only the sum.
    """

    model_type = "ctx-glove"

    x_max: float | int = 100.0
    alpha: float | int = 0.75
    context_vectors: bool = True

    @classmethod
    def for_single_table(cls, vocab_size: int, hidden_size: int) -> Self:
        """Configuration of a model whose table holds the sums of word and context vectors."""
        return cls(vocab_size=vocab_size, hidden_size=hidden_size, context_vectors=False)

    def validate_weighting(self) -> None:
        """Check `x_max` and `alpha` (called at construction)."""
        if self.x_max <= 0 or self.alpha < 0:
            raise ValueError(f"x_max={self.x_max} must be above 0, alpha={self.alpha} at least 0.")
