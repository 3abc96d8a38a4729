"""The base configuration of static word embeddings."""

from typing import Any, Literal, Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig

# The widths of released vectors (GloVe: 50, 100, 200, 300; word2vec: 300), and smaller ones for tests.
WORD_VECTOR_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 50},
    "small": {"hidden_size": 100},
    "base": {"hidden_size": 300},
}


@strict
class CtxStaticConfig(CtxConfig):
    """A table of word vectors, and its use in downstream tasks.

    Args:
        vocab_size: Number of words, special tokens included.
        hidden_size: Width of a vector.
        pad_token_id: Id of the padding token; its vector is zero.
        pooling: Pooling of a sequence: "mean" of its words' vectors, or "mean+max", twice as wide.
        classifier_dropout: Dropout before the task heads.
        update_threads: Threads of in-place updates on a CPU. Several threads write without locks, as in the released
            code: faster, but not reproducible to the last bit.
    """

    vocab_size: int = 30_000
    hidden_size: int = 100
    pad_token_id: int | None = 0
    pooling: Literal["mean", "mean+max"] = "mean"
    classifier_dropout: float | int = 0.0
    update_threads: int = 1

    def validate_width(self) -> None:
        """Check the sizes (called at construction)."""
        self.require_positive("vocab_size", "hidden_size", "update_threads")

    @classmethod
    def for_single_table(cls, vocab_size: int, hidden_size: int) -> Self:
        """The configuration of one table of given vectors."""
        return cls(vocab_size=vocab_size, hidden_size=hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        """0: there are no layers after the table."""
        return 0

    @property
    def pooler_size(self) -> int:
        """Width of `pooler_output`."""
        return self.hidden_size * (2 if self.pooling == "mean+max" else 1)
