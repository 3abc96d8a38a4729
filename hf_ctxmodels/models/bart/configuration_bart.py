"""BART configuration (Lewis et al. 2020, section 2.1, and the released models)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxSeq2SeqConfig


@strict
class CtxBartConfig(CtxSeq2SeqConfig):
    """Configuration of BART; the defaults are the released BART-large.

    The names of transformers (`d_model`, `encoder_layers`, ...) are accepted. See `CtxSeq2SeqConfig` for the other
    arguments.

    Args:
        layer_norm_eps: Epsilon of the LayerNorms; transformers supports only 1e-5.
        activation_dropout: Dropout after the activation of the feed-forward layer.
        scale_embedding: Multiply the word embeddings by sqrt(hidden_size).
        forced_bos_token_id, forced_eos_token_id: First and last token that `generate` forces. None forces no token;
            transformers forces </s> at the maximum length by default.
    """

    model_type = "ctx-bart"
    reference_model_types: ClassVar[tuple[str, ...]] = ("bart",)
    attribute_map: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "init_std": "initializer_range",
    }

    classifier_dropout: float | int | None = 0.0
    activation_dropout: float | int = 0.0
    scale_embedding: bool = False
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None

    non_reference_fields: ClassVar[tuple[str, ...]] = (*CtxSeq2SeqConfig.non_reference_fields, "layer_norm_eps")
    # fields of old checkpoints: pre-norm, sinusoidal positions and LayerDrop
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "add_final_layer_norm": (False,),
        "static_position_embeddings": (False,),
        "encoder_layerdrop": (0.0, None),
        "decoder_layerdrop": (0.0, None),
    }
