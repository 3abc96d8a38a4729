"""XLM configuration (Lample & Conneau 2019, section 5.1, and the released code)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxTransformerConfig

# former name of a field, which released files have in addition to the present name -> name
_FORMER_NAMES = {
    "n_words": "vocab_size",
    "bos_index": "bos_token_id",
    "eos_index": "eos_token_id",
    "pad_index": "pad_token_id",
}


@strict
class CtxMultilingualConfig(CtxTransformerConfig):
    """Base configuration of Transformers with language embeddings; see `CtxTransformerConfig` for the other arguments.

    Args:
        n_langs: Number of languages.
        use_lang_emb: Whether to embed the languages if there are several; `langs` is then required.
        lang2id: Language name -> id, or None.
        default_lang: Language id of inputs without `langs`; None makes `langs` required.
    """

    n_langs: int = 1
    use_lang_emb: bool = True
    lang2id: dict[str, int] | None = None
    default_lang: int | None = None

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("vocab_size",)

    def validate_languages(self) -> None:
        """Check that the language ids are 0 to `n_langs` - 1 (called at construction)."""
        self.require_positive("n_langs")
        if self.default_lang is not None and not 0 <= self.default_lang < self.n_langs:
            raise ValueError(f"default_lang={self.default_lang} is outside [0, n_langs={self.n_langs}).")
        if self.lang2id is not None and sorted(self.lang2id.values()) != list(range(self.n_langs)):
            raise ValueError(f"lang2id={self.lang2id} must have the ids 0 to n_langs - 1 = {self.n_langs - 1}.")

    @property
    def embeds_languages(self) -> bool:
        """Whether the model has language embeddings."""
        return self.use_lang_emb and self.n_langs > 1

    @property
    def needs_languages(self) -> bool:
        """Whether the model needs the language of each token."""
        return self.embeds_languages


@strict
class CtxXLMConfig(CtxMultilingualConfig):
    """Configuration of XLM; the defaults are the released English model.

    The names of transformers (`emb_dim`, `n_layers`, `n_heads`, `dropout`, `attention_dropout`, `embed_init_std`, ...)
    are accepted, and `gelu_activation` as `hidden_act`. `lang_id` is ignored, since transformers writes 0 to all files.
    See `CtxMultilingualConfig` for the other arguments.

    Args:
        classifier_dropout: Dropout before the sequence classifier; None for `hidden_dropout_prob`.
        sinusoidal_embeddings: Fixed sinusoidal instead of learned positions.
        causal: Causal attention; set by `CtxXLMForCausalLM`.
        num_language_layers: Number of lower layers that each language has separately, if there are several languages
            (Wu et al. 2020, arXiv 1911.01464, section 4.3).
        start_n_top, end_n_top: Number of start candidates of the beam-search span head, and of ends per start.
        initializer_range: Standard deviation of the embeddings; None for hidden_size ** -0.5. Linear layers keep the
            initialization of torch, as in the released code.
    """

    model_type = "ctx-xlm"
    reference_model_types: ClassVar[tuple[str, ...]] = ("xlm",)
    attribute_map: ClassVar[dict[str, str]] = {
        "emb_dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "summary_first_dropout": "classifier_dropout",
        "embed_init_std": "initializer_range",
    }

    vocab_size: int = 30145
    hidden_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    classifier_dropout: float | int | None = None
    max_position_embeddings: int = 512
    sinusoidal_embeddings: bool = False
    causal: bool = False
    num_language_layers: int = 0
    start_n_top: int = 5
    end_n_top: int = 5
    initializer_range: float | int | None = None
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 2
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    tie_word_embeddings: bool = True

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "hidden_act",
        "intermediate_size",
        "default_lang",
        "num_language_layers",
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "asm": (False,),
        "is_encoder": (True,),
        "summary_type": ("first",),
        "summary_use_proj": (True,),
        "summary_activation": (None, ""),
        "summary_proj_to_labels": (True,),
    }

    def __post_init__(self, **kwargs: Any) -> None:
        for former_name, name in _FORMER_NAMES.items():
            if (value := kwargs.pop(former_name, None)) is not None:
                setattr(self, name, value)
        if (uses_gelu := kwargs.pop("gelu_activation", None)) is not None:
            self.hidden_act = "gelu" if uses_gelu else "relu"
        super().__post_init__(**kwargs)

    def validate_positions(self) -> None:
        """Check that the width is even with sinusoidal positions (called at construction)."""
        if self.sinusoidal_embeddings and self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} is odd; sinusoidal positions are pairs of a sine and a cosine."
            )

    def validate_language_layers(self) -> None:
        """Check the number of language-specific layers (called at construction)."""
        if not 0 <= self.num_language_layers < self.num_hidden_layers:
            raise ValueError(
                f"num_language_layers={self.num_language_layers} must be 0 or more, and less than "
                f"num_hidden_layers={self.num_hidden_layers}: languages share the last layer."
            )

    @property
    def has_language_layers(self) -> bool:
        """Whether each language has lower layers separately."""
        return self.num_language_layers > 0 and self.n_langs > 1

    @property
    def needs_languages(self) -> bool:
        """Whether the model needs the language of each token, for embeddings or layers."""
        return self.embeds_languages or self.has_language_layers

    @property
    def embedding_dropout_prob(self) -> float | int:
        """Dropout after the embeddings."""
        return self.hidden_dropout_prob

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the initial embeddings."""
        return self.hidden_size**-0.5 if self.initializer_range is None else float(self.initializer_range)
