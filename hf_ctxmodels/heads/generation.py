"""`generate` for all families."""

from typing import Any

from transformers import GenerationMixin

from hf_ctxmodels.layers.cpu.linear import MAX_PREPACKED_BYTES, prepacked_weights


class PrepackingGenerationMixin(GenerationMixin):
    """`generate` that reads the weights in oneDNN's order, see `layers.cpu.prepacking`.

    Attributes:
        prepacked_bytes: How much memory copies of weights may take; set it on a model for another limit, 0 for none.
    """

    prepacked_bytes: int = MAX_PREPACKED_BYTES

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with prepacked_weights(self.prepacked_bytes):
            return super().generate(*args, **kwargs)
