"""Configuration of an encoder-decoder that consists of an encoder and a language model."""

from collections.abc import Mapping
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_ctxmodels.core.config import REFERENCE_KEY, CtxConfig, CtxTransformerConfig
from hf_ctxmodels.core.errors import CtxError

_SIDE_FIELDS = ("is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder")


@strict
class CtxEncoderDecoderConfig(CtxConfig):
    """Configuration of `CtxEncoderDecoderModel`; see `CtxConfig` for the other arguments.

    Args:
        encoder: Configuration of the encoder, or its dictionary; a small BERT by default.
        decoder: Configuration of the language model that is the decoder, or its dictionary; a small BERT by default.
        share_weights: Share the weights of the encoder with the decoder, except for the cross-attention (Rothe et al.
            2020, section 3, "RoBERTaShare").
        decoder_start_token_id: Id of the decoder's first input.
        pad_token_id, eos_token_id: Ids of the padding token and the end token of targets; None for the ids in the
            configuration of the decoder.

    Raises:
        ValueError: `share_weights=True`, but the two configurations differ.
        CtxError: A configuration does not belong to this package.
    """

    model_type = "ctx-encoder-decoder"
    reference_model_types: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    sub_configs: ClassVar[dict[str, Any]] = {"encoder": AutoConfig, "decoder": AutoConfig}

    encoder: Any = None
    decoder: Any = None
    share_weights: bool = False
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = True

    non_reference_fields: ClassVar[tuple[str, ...]] = (*CtxConfig.non_reference_fields, "share_weights")

    def __post_init__(self, **kwargs: Any) -> None:
        self.encoder, self.decoder = _read_config(self.encoder), _read_config(self.decoder)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.decoder, name))
        super().__post_init__(**kwargs)

    def validate_sides(self) -> None:
        """Check that an encoder and a decoder with shared weights have the same layers (called at construction)."""
        if not self.share_weights:
            return
        encoder, decoder = _layer_fields(self.encoder), _layer_fields(self.decoder)
        if different := sorted(name for name in encoder | decoder if encoder.get(name) != decoder.get(name)):
            raise ValueError(
                "share_weights=True needs an encoder and a decoder with the same configuration; these fields differ: "
                f"{', '.join(different)}."
            )

    @classmethod
    def convert_reference_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the configurations of both models to configurations of this package."""
        sides = {name: _convert_reference(fields[name]) for name in ("encoder", "decoder")}
        names = ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "dtype")
        return {**{name: fields[name] for name in names if name in fields}, **sides}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the encoder."""
        return self.encoder.vocab_size

    @property
    def target_vocab_size(self) -> int:
        """Vocabulary size of the decoder."""
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the decoder's states."""
        return self.decoder.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers of the encoder."""
        return self.encoder.num_hidden_layers

    @property
    def max_sequence_length(self) -> int | None:
        """Longest source and longest target, in tokens; None for no limit."""
        lengths = (self.encoder.max_sequence_length, self.decoder.max_sequence_length)
        return min((length for length in lengths if length is not None), default=None)

    @property
    def has_equal_vocabularies(self) -> bool:
        """Whether both models have the same vocabulary size, and the same tokenizer if their digests are saved."""
        digests = {self.encoder.tokenizer_digest, self.decoder.tokenizer_digest} - {None}
        return self.vocab_size == self.target_vocab_size and len(digests) < 2

    @property
    def needs_languages(self) -> bool:
        """Whether the encoder or the decoder needs the language of each token."""
        return any(getattr(config, "needs_languages", False) for config in (self.encoder, self.decoder))

    @property
    def n_langs(self) -> int:
        """Number of languages of the language embeddings; 1 without any."""
        return max(getattr(config, "n_langs", 1) for config in (self.encoder, self.decoder))

    @n_langs.setter
    def n_langs(self, value: int) -> None:
        self._require_equal("n_langs", value)

    @property
    def lang2id(self) -> dict[str, int] | None:
        """Language name -> id of the language embeddings, or None."""
        return getattr(self.encoder, "lang2id", None) or getattr(self.decoder, "lang2id", None)

    @lang2id.setter
    def lang2id(self, value: dict[str, int] | None) -> None:
        self._require_equal("lang2id", value)

    @property
    def default_lang(self) -> int | None:
        """Language id of sources without `langs`, or None."""
        return getattr(self.encoder, "default_lang", None)

    @default_lang.setter
    def default_lang(self, value: int | None) -> None:
        self.encoder.default_lang = value

    def _require_equal(self, name: str, value: Any) -> None:
        """Raise ValueError if a value differs from the languages of the two models, which cannot be changed."""
        if value != getattr(self, name):
            raise ValueError(f"{name}={value}, but the models of the checkpoints have {getattr(self, name)}.")


def find_config_class(model_type: str) -> type[CtxConfig]:
    """The configuration class of this package for a `model_type`, also of a reference in transformers; raises CtxError
    if there is none."""
    registered = {config.model_type: config for config in CONFIG_MAPPING._extra_content.values()}
    candidates = [registered.get(model_type), *registered.values()]
    for config_class in candidates:
        if config_class is None or not issubclass(config_class, CtxConfig):
            continue
        if model_type in (config_class.model_type, *config_class.reference_model_types):
            return config_class
    raise CtxError(
        f"A model of type {model_type!r} belongs to no family.",
        hint="use a model of this package, or of transformers in a layout that a family loads.",
    )


def _read_config(config: Any) -> CtxConfig:
    if config is None:
        config = {"model_type": "ctx-bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    if isinstance(config, Mapping):
        config = find_config_class(str(config.get("model_type"))).from_dict(dict(config))
    if not isinstance(config, CtxConfig):
        raise CtxError(
            f"{type(config).__name__} is not a configuration of this package.", hint="use a model of a family."
        )
    return config


def _convert_reference(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of this package for one side of a reference checkpoint."""
    model_type = fields["model_type"]
    config_class = find_config_class(model_type)
    values = {name: value for name, value in fields.items() if name not in (*_SIDE_FIELDS, "architectures")}
    values = {**config_class.convert_reference_fields(values), "model_type": config_class.model_type}
    return config_class.from_dict({**values, REFERENCE_KEY: model_type})


def _layer_fields(config: CtxConfig) -> dict[str, Any]:
    """The fields on which the shapes of a model's weights may depend."""
    names = set(type(config).__dataclass_fields__) - set(CtxTransformerConfig.__dataclass_fields__)
    fields = {name: getattr(config, name) for name in names if "dropout" not in name and name != "causal"}
    return {**fields, "model_type": config.model_type}
