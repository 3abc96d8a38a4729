"""`generate` for all families."""

from typing import Any

from transformers import GenerationMixin

from hf_ctxmodels.layers.prepacking import prepacked_weights


class PrepackingGenerationMixin(GenerationMixin):
    """`generate` that reads the weights in oneDNN's order, see `layers.prepacking`.

    Attributes:
        prepacks_weights: Whether it makes copies of the weights it uses. False, also for one model, saves memory.
    """

    prepacks_weights: bool = True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with prepacked_weights(self.prepacks_weights):
            return super().generate(*args, **kwargs)
