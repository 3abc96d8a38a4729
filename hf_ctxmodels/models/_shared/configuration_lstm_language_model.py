"""The configuration of language models of LSTM layers."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxLSTMLanguageModelConfig(CtxConfig):
    """Fields of `hf_ctxmodels.models._shared.lstm_language_model`; families add others and set their defaults.

    Args:
        vocab_size: Number of words.
        hidden_size: Width of the last layer's output.
        num_hidden_layers: LSTM layers.
        stateful: Return `past_key_values`, with which the next batch may continue, unless `use_cache=False` is given.
        initializer_range: Embeddings are drawn uniformly from -this to this.
    """

    vocab_size: int = 60_000
    hidden_size: int = 400
    num_hidden_layers: int = 1
    stateful: bool = False
    initializer_range: float | int = 0.1

    @property
    def layer_sizes(self) -> list[int]:
        """Width of the input of every layer, and of the last one's output."""
        return [self.hidden_size] * (self.num_hidden_layers + 1)

    def require_positive(self, *names: str) -> None:
        """Raise ValueError unless the fields of these names are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
