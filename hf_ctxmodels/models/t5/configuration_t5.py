"""T5 configuration (Raffel et al. 2020, section 2.1, and the released models, v1.0 and v1.1)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import REFERENCE_KEY, CtxTransformerConfig

_GATED = "gated-"


@strict
class CtxT5Config(CtxTransformerConfig):
    """Configuration of T5; the defaults are the released T5-small (v1.0).

    The names of transformers (`d_model`, `d_kv`, `d_ff`, `num_layers`, `num_decoder_layers`, `num_heads`,
    `dropout_rate`, `feed_forward_proj`, `layer_norm_epsilon`) are accepted. Version 1.1 has `hidden_act="gated-gelu"`
    and `tie_word_embeddings=False`, and was pretrained without dropout. Checkpoints of mT5 (Xue et al. 2021, arXiv
    2010.11934) are version 1.1; those of UMT5 (Chung et al. 2023, arXiv 2304.09151) also have
    `layerwise_position_bias=True`. See `CtxTransformerConfig` for the other arguments.

    Args:
        vocab_size: Number of word embeddings, the size of the tokenizer rounded up to a multiple of 128.
        decoder_layers: None for `num_hidden_layers`.
        head_dim: Width of a head, independent of `hidden_size`.
        hidden_act: Activation of the feed-forward layer. With the prefix "gated-" it gates a second linear layer, and
            "gelu" is the tanh approximation, as in the release (section 2 of Shazeer 2020).
        clamp_half_precision: In float16, clamp infinite values of the feed-forward layers and of the residual stream to
            the largest finite value. The released weights overflow there; bfloat16 needs no clamp.
        hidden_dropout_prob: Dropout after the embeddings, the activation, each sub-layer and the final norms.
        attention_probs_dropout_prob: Dropout on attention probabilities; None for `hidden_dropout_prob`, as released.
        classifier_dropout: Dropout before and in the task heads.
        relative_attention_num_buckets, relative_attention_max_distance: See `BucketedPositionBias`.
        layerwise_position_bias: Learn a position bias for each layer, not one for each of encoder and decoder.
        initializer_factor: Factor applied to the standard deviations of the initialization.
        decoder_start_token_id: Id of the decoder's first input; None for `pad_token_id`.
        scale_decoder_outputs: Multiply the decoder's output by `hidden_size ** -0.5` before the output layer; None for
            `tie_word_embeddings`. The released files of UMT5 do not tie, so their outputs are not multiplied, as in
            pretraining; transformers 5.23 multiplies the outputs of all UMT5 models.
    """

    model_type = "ctx-t5"
    reference_model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5", "umt5")
    attribute_map: ClassVar[dict[str, str]] = {
        "d_model": "hidden_size",
        "d_kv": "head_dim",
        "d_ff": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_decoder_layers": "decoder_layers",
        "num_heads": "num_attention_heads",
        "dropout_rate": "hidden_dropout_prob",
        "feed_forward_proj": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    vocab_size: int = 32128
    hidden_size: int = 512
    num_hidden_layers: int = 6
    decoder_layers: int | None = None
    num_attention_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 2048
    hidden_act: str = "relu"
    clamp_half_precision: bool = False
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int | None = None
    classifier_dropout: float | int | None = 0.0
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layerwise_position_bias: bool = False
    initializer_factor: float | int = 1.0
    layer_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None

    vocab_size_multiple: ClassVar[int] = 128
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "attention_probs_dropout_prob",
        "clamp_half_precision",
        "layerwise_position_bias",
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {"is_decoder": (False,)}

    def __post_init__(self, **kwargs: Any) -> None:
        reference_type = kwargs.get("model_type"), kwargs.get(REFERENCE_KEY)
        super().__post_init__(**kwargs)
        if self.decoder_layers is None:
            self.decoder_layers = self.num_hidden_layers
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.pad_token_id
        if "umt5" in reference_type:
            self.layerwise_position_bias = True
        if "mt5" in reference_type:  # whatever `tie_word_embeddings` is, which transformers always saves as True
            self.scale_decoder_outputs = False
        if self.scale_decoder_outputs is None:
            self.scale_decoder_outputs = self.tie_word_embeddings

    def validate_buckets(self) -> None:
        """Check the buckets of the position bias (called at construction)."""
        half = self.relative_attention_num_buckets // 2
        if self.relative_attention_num_buckets % 4 or self.relative_attention_max_distance <= half:
            raise ValueError(
                f"relative_attention_num_buckets={self.relative_attention_num_buckets} must be a multiple of 4, and "
                f"relative_attention_max_distance={self.relative_attention_max_distance} above half of it."
            )

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer is gated."""
        return self.hidden_act.startswith(_GATED)

    @property
    def activation(self) -> str:
        """Name of the activation."""
        return "gelu_new" if self.hidden_act == "gated-gelu" else self.hidden_act.removeprefix(_GATED)

    @property
    def shares_word_embeddings(self) -> bool:
        """Whether encoder and decoder share the word embeddings: always, also with an untied output layer."""
        return True
