"""MASS configuration (Song et al. 2019, section 4.1, and the released code)."""

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxSeq2SeqConfig
from hf_ctxmodels.models.xlm.configuration_xlm import CtxMultilingualConfig


@strict
class CtxMassConfig(CtxSeq2SeqConfig, CtxMultilingualConfig):
    """Configuration of MASS; the defaults are the translation model of two languages.

    The summarization model has `scale_embedding`, one language and no `output_bias`. See `CtxSeq2SeqConfig` and
    `CtxMultilingualConfig` for the other arguments.

    Args:
        activation_dropout: Dropout after the activation of the feed-forward layer.
        scale_embedding: Multiply the word embeddings by sqrt(hidden_size).
        output_bias: Whether the output layer has a bias.
    """

    model_type = "ctx-mass"

    vocab_size: int = 60000
    num_hidden_layers: int = 6
    decoder_layers: int = 6
    num_attention_heads: int = 8
    decoder_attention_heads: int = 8
    attention_probs_dropout_prob: float | int = 0.1
    activation_dropout: float | int = 0.0
    max_position_embeddings: int = 512
    scale_embedding: bool = False
    output_bias: bool = True
    n_langs: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 2
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 1
