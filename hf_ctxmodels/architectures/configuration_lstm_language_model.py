"""The base configuration of LSTM language models."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig


@strict
class CtxLSTMLanguageModelConfig(CtxConfig):
    """Fields of `hf_ctxmodels.architectures.lstm_language_model`; families add others and set their defaults.

    Args:
        vocab_size: Number of words.
        hidden_size: Width of the last layer's output.
        num_hidden_layers: Number of LSTM layers.
        stateful: Return `past_key_values` by default, so that the next batch may continue from them.
        initializer_range: Bound of the embeddings' uniform initialisation.
    """

    vocab_size: int = 60_000
    hidden_size: int = 400
    num_hidden_layers: int = 1
    stateful: bool = False
    initializer_range: float | int = 0.1

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of all layers' inputs, and of the last layer's output."""
        return [self.hidden_size] * (self.num_hidden_layers + 1)
