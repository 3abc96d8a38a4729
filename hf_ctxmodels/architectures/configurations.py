"""Base configurations of the architectures, with the fields and checks that several families share."""

from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.core.config import CtxConfig, CtxTransformerConfig


@strict
class CtxEncoderConfig(CtxTransformerConfig):
    """Configuration of a Transformer encoder with absolute position embeddings; the defaults are BERT-base.

    See `CtxTransformerConfig` for the other arguments.

    Args:
        hidden_act: Activation of the feed-forward layer and of the pretraining heads' dense layer.
        type_vocab_size: Number of segments (sentence A, sentence B); 0 for no segment embeddings (DistilBERT).
        pad_token_id: Id of the padding token; its embedding starts at zero.
        tie_word_embeddings: Share the masked-LM decoder with the word embeddings.
        answer_steps: Number of steps of the stochastic answer network that classifies text pairs (see
            `heads.answer_network`); 0 for a linear classifier. It requires two segments.
        answer_dropout: Dropout rate of whole steps of the answer network in training.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    answer_steps: int = 0
    answer_dropout: float | int = 0.1

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("vocab_size",)
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "answer_steps",
        "answer_dropout",
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }

    def validate_architecture(self) -> None:
        """Check that there are two segments for the answer network (called at construction)."""
        super().validate_architecture()
        if self.answer_steps < 0 or (self.answer_steps and self.type_vocab_size < 2):
            raise ValueError(
                f"answer_steps={self.answer_steps} with type_vocab_size={self.type_vocab_size}: an answer network "
                "compares two segments in one step or more; use 0 for a linear classifier."
            )


PAIR_SEGMENTS = 2  # of BERT
# for generation; BERT's configuration lacks them
GENERATION_TOKEN_FIELDS = ("query_token_id", "decoder_start_token_id", "eos_token_id")


@strict
class CtxQueryGenerationConfig(CtxEncoderConfig):
    """Configuration of an encoder with the head `QueryForConditionalGeneration`; see `CtxEncoderConfig`.

    Args:
        query_token_id: Id of the query token, whose state predicts a target token: the mask token or a special one.
        decoder_start_token_id: Id of the first of `decoder_input_ids`.
        label_smoothing: Label smoothing of the generation loss in training (Szegedy et al. 2016, section 7).
        span_loss_weight: Weight in [0, 1] of the loss of whole spans, with `span_ids`; the loss of single tokens has
            the remaining weight.
    """

    query_token_id: int | None = None
    decoder_start_token_id: int | None = None
    label_smoothing: float | int = 0.0
    span_loss_weight: float | int = 0.5
    is_encoder_decoder: bool = True

    copied_segments: ClassVar[tuple[int, ...]]
    """For each segment after BERT's two: the segment of BERT from which its embedding is copied."""
    feeds_start_token: ClassVar[bool] = False
    """Whether the first of `decoder_input_ids` is encoded as a target token, rather than skipped."""

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxEncoderConfig.non_reference_fields,
        *GENERATION_TOKEN_FIELDS,
        *("label_smoothing", "span_loss_weight", "is_encoder_decoder", "type_vocab_size"),
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.is_encoder_decoder = True  # in a reference checkpoint, it refers to other heads

    def validate_loss_weights(self) -> None:
        """Check the range of the loss weights (called at construction)."""
        for name in ("label_smoothing", "span_loss_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1.")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json; a BERT checkpoint with two segments receives all segments of the family."""
        fields, unused = super().get_config_dict(*args, **kwargs)
        if fields.get("type_vocab_size") == PAIR_SEGMENTS:
            fields = {**fields, "type_vocab_size": PAIR_SEGMENTS + len(cls.copied_segments)}
        return fields, unused

    @property
    def max_source_target_length(self) -> int:
        """Maximum number of tokens of source and target together, including the end token."""
        return self.max_position_embeddings - int(self.feeds_start_token)


@strict
class CtxDecoderConfig(CtxTransformerConfig):
    """Configuration of a Transformer decoder with learned position embeddings.

    The field names of the reference (`n_embd`, `n_layer`, `n_head`, `n_positions`, `resid_pdrop`, ...) are aliases.
    See `CtxTransformerConfig` for the other arguments.

    Args:
        embedding_dropout_prob: Dropout on the sum of token and position embeddings.
        hidden_dropout_prob: Dropout after each sub-layer.
        lm_loss_weight: Weight of the auxiliary language modeling loss of some task heads (Radford et al. 2018, section
            3.2, equation 5); 0 for none.
        prefix_lm: Whether the tokens of a prompt attend to one another in both directions in `generate`, as in a model
            trained by the objective `PrefixLM`. It does not change `forward`, which has the argument `prefix_mask`.
        control_codes: Name -> token id of the control codes that texts begin with (Keskar et al. 2019); None for none.
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
    lm_loss_weight: float | int = 0.5
    prefix_lm: bool = False
    control_codes: dict[str, int] | None = None

    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "lm_loss_weight",
        "prefix_lm",
        "control_codes",
    )

    def validate_lm_loss_weight(self) -> None:
        """Check that the weight is not negative (called at construction)."""
        if self.lm_loss_weight < 0:
            raise ValueError(f"lm_loss_weight={self.lm_loss_weight} is negative; use 0 or more.")


@strict
class CtxSeq2SeqConfig(CtxTransformerConfig):
    """Configuration of a Transformer encoder-decoder with one hidden size (Vaswani et al. 2017).

    Fields without "decoder" apply to the encoder, and to the decoder if there is no field for the decoder. The defaults
    are BART-large. See `CtxTransformerConfig` for the other arguments.

    Args:
        decoder_layers, decoder_attention_heads, decoder_ffn_dim: `num_hidden_layers`, `num_attention_heads` and
            `intermediate_size` of the decoder.
        tie_word_embeddings: Share the output layer with the encoder's word embeddings.
        share_word_embeddings: Share the decoder's word embeddings with the encoder's; None for `tie_word_embeddings`.
    """

    vocab_size: int = 50265
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    decoder_layers: int = 12
    num_attention_heads: int = 16
    decoder_attention_heads: int = 16
    intermediate_size: int = 4096
    decoder_ffn_dim: int = 4096
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = None
    max_position_embeddings: int = 1024
    initializer_range: float | int = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    share_word_embeddings: bool | None = None

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("vocab_size",)
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxTransformerConfig.non_reference_fields,
        "share_word_embeddings",
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.share_word_embeddings is None:  # fixed here, since adapters may untie the output layer later
            self.share_word_embeddings = self.tie_word_embeddings

    def validate_decoder(self) -> None:
        """Check the numbers of layers and attention heads (called at construction)."""
        self.require_positive("num_hidden_layers", "decoder_layers", "decoder_attention_heads")
        if self.hidden_size % self.decoder_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"decoder_attention_heads={self.decoder_attention_heads}; choose a number of heads that divides it."
            )

    @property
    def shares_word_embeddings(self) -> bool:
        """Whether encoder and decoder share their word embeddings."""
        return bool(self.share_word_embeddings)


@strict
class CtxLSTMLanguageModelConfig(CtxConfig):
    """Configuration of an LSTM language model; the families add fields and set their defaults.

    See `CtxConfig` for the other arguments.

    Args:
        hidden_size: Width of the last layer's output.
        stateful: Whether `past_key_values` are returned by default, so that the next batch can continue from them.
        initializer_range: Bound of the embeddings' uniform initialization.
        control_codes: Name -> token id of the control codes that texts begin with (Keskar et al. 2019); None for none.
    """

    vocab_size: int = 60_000
    hidden_size: int = 400
    num_hidden_layers: int = 1
    stateful: bool = False
    initializer_range: float | int = 0.1
    control_codes: dict[str, int] | None = None

    non_reference_fields: ClassVar[tuple[str, ...]] = (*CtxConfig.non_reference_fields, "control_codes")

    @property
    def layer_sizes(self) -> list[int]:
        """Widths of the embeddings and of the layers' outputs."""
        return [self.embedding_size, *[self.hidden_size] * self.num_hidden_layers]


# Widths of released vectors (GloVe: 50, 100, 200, 300; word2vec: 300)
WORD_VECTOR_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 50},
    "small": {"hidden_size": 100},
    "base": {"hidden_size": 300},
}


@strict
class CtxStaticConfig(CtxConfig):
    """Configuration of static word embeddings, including their use in downstream tasks.

    See `CtxConfig` for the other arguments.

    Args:
        vocab_size, hidden_size: Number of words, special tokens included, and width of their vectors.
        pad_token_id: Id of the padding token; its vector is zero.
        pooling: Pooling of the word vectors of a sequence: "mean", or "mean+max", which doubles the width.
        update_threads: Number of threads of the in-place updates on a CPU. Several threads write without locks, as in
            the released code, and the result is not exactly reproducible.
    """

    vocab_size: int = 30_000
    hidden_size: int = 100
    pad_token_id: int | None = 0
    pooling: Literal["mean", "mean+max"] = "mean"
    classifier_dropout: float | int = 0.0
    update_threads: int = 1

    padded_vocabularies: ClassVar[tuple[str, ...]] = ("vocab_size",)

    @classmethod
    def for_single_table(cls, vocab_size: int, hidden_size: int) -> Self:
        """Return the configuration of existing vectors of this shape."""
        return cls(vocab_size=vocab_size, hidden_size=hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        """0: there are no layers after the embeddings."""
        return 0


@strict
class CtxCharacterConfig(CtxConfig):
    """Configuration of a character encoder with bidirectional LSTM layers and optional pretrained word vectors.

    See `CtxConfig` for the other arguments.

    Args:
        vocab_size: Size of the tokenizer's vocabulary; the encoder does not depend on it.
        hidden_size, cell_size: Widths of a hidden state, both directions concatenated, and of a direction's cell state.
        num_characters: Number of character ids, including the ids of padding, boundaries and languages.
        num_languages: Number of languages; each has a character id, which are the last ones.
        max_characters_per_token: Maximum number of characters of a word, including its boundaries; longer words are
            truncated.
        character_embedding_size: Width of a character embedding.
        filters: [width in characters, number of filters] pairs.
        num_highway_layers: Number of highway layers after the filters.
        hidden_act: Activation after max-pooling of the filters.
        cell_clip, projection_clip: Bounds of the cell state and of a direction's output; None for none.
        initializer_range: Standard deviation of the normal initialization of heads.
        pretrained_embeddings: Directory or Hub id of static word embeddings. `load_pretrained_embeddings` copies the
            vectors into a new model; they are saved with it.
        train_pretrained_embeddings: Whether these vectors are trained.
        pretrained_vocab_size, pretrained_embedding_size, pretrained_lower_case: Number and width of these vectors, and
            whether their words are lower-cased; the model class's `embedding_fields` returns these fields.
    """

    vocab_size: int = 1000
    hidden_size: int = 1024
    cell_size: int = 1024
    num_hidden_layers: int = 2
    num_characters: int = 262
    num_languages: int = 0
    max_characters_per_token: int = 50
    character_embedding_size: int = 16
    filters: list[Any] | None = None
    num_highway_layers: int = 0
    hidden_act: str = "relu"
    cell_clip: float | int | None = None
    projection_clip: float | int | None = None
    initializer_range: float | int = 0.02
    pretrained_embeddings: str | None = None
    train_pretrained_embeddings: bool = False
    pretrained_vocab_size: int = 0
    pretrained_embedding_size: int = 0
    pretrained_lower_case: bool = False
    classifier_dropout: float | int = 0.1
    pad_token_id: int | None = 0

    def validate_words(self) -> None:
        """Check the sizes and filters (called at construction)."""
        self.require_even_hidden_size()
        self.require_positive("vocab_size", "cell_size", "num_hidden_layers", "num_characters")
        if not 0 <= self.num_languages < self.num_characters - 1:
            raise ValueError(
                f"num_languages={self.num_languages} must be less than num_characters - 1 = {self.num_characters - 1}."
            )
        pairs = self.filters or []
        if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
            raise ValueError(f"filters={pairs} must be pairs of a width and a number, each 1 or more.")
        if max(width for width, _ in pairs) > self.max_characters_per_token:
            raise ValueError(
                f"The widest filter has {max(width for width, _ in pairs)} characters, more than "
                f"max_characters_per_token={self.max_characters_per_token}."
            )

    @property
    def projection_size(self) -> int:
        """Output width of one direction."""
        return self.hidden_size // 2

    @property
    def padding_character(self) -> int:
        """The character id of padding after the end of a word."""
        return self.num_characters - self.num_languages - 1
