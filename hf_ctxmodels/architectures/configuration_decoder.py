"""The base configuration of GPT-like decoders."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig


@strict
class CtxDecoderConfig(CtxTransformerConfig):
    """Shape and regularisation of a causal Transformer with learned positions.

    The reference's names (`n_embd`, `n_layer`, `n_head`, `n_positions`, `resid_pdrop`, ...) are read as well.

    Args: those of `CtxTransformerConfig`, and
        vocab_size: Number of tokens of the tokenizer.
        hidden_size: Width of the residual stream; a multiple of `num_attention_heads`.
        num_hidden_layers: Number of layers.
        num_attention_heads: Attention heads per layer.
        intermediate_size: Width of the feed-forward layer; None for 4 * hidden_size.
        hidden_act: Activation of the feed-forward layer; "gelu_new" is the tanh approximation of GELU.
        embedding_dropout_prob: Dropout on the sum of token and position embeddings.
        hidden_dropout_prob: Dropout after each sub-layer.
        attention_probs_dropout_prob: Dropout on attention probabilities.
        classifier_dropout: Dropout before the task heads; None for `hidden_dropout_prob`.
        max_position_embeddings: Longest sequence, in tokens.
        initializer_range: Standard deviation of the normal initialisation.
        layer_norm_eps: Epsilon of every LayerNorm.
        tie_word_embeddings: Share the output layer with the word embeddings.
    """

    attribute_map: ClassVar[dict[str, str]] = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "embd_pdrop": "embedding_dropout_prob",
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu_new"
    embedding_dropout_prob: float | int = 0.1
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    classifier_dropout: float | int | None = None
    max_position_embeddings: int = 1024
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    @property
    def feed_forward_size(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size
