"""What the configurations of families have in common that read words from left to right."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxLSTMLanguageModelConfig(CtxConfig):
    """Fields of `hf_ctxmodels.models._shared.lstm_language_model`; a family has others, and its own defaults.

    Args:
        vocab_size: Number of words.
        hidden_size: Width of what the last layer gives.
        num_hidden_layers: LSTM layers.
        stateful: Return the LSTM's state, from which the next batch may go on, unless `use_states=False` is given.
        initializer_range: The words' vectors are drawn from -this to this.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = [*CtxConfig.keys_to_ignore_at_inference, "states"]

    vocab_size: int = 60_000
    hidden_size: int = 400
    num_hidden_layers: int = 1
    stateful: bool = False
    initializer_range: float | int = 0.1

    @property
    def layer_sizes(self) -> list[int]:
        """Width of the input of every layer, and of what the last one gives."""
        return [self.hidden_size] * (self.num_hidden_layers + 1)

    def require_positive(self, *names: str) -> None:
        """Raise ValueError unless the fields of these names are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
