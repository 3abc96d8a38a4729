"""Configuration of task networks on contextual features."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

from hf_ctxmodels.core.config import CtxConfig, is_valid_module_name
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.networks.feature_stack import FeatureModel
from hf_ctxmodels.tokenizers.character_level import WORD_PADDING

_KEYS = {"config", "widths", "source"}


@strict
class CtxTaskNetworkConfig(CtxConfig):
    """Configuration of a network whose inputs are the word vectors of one or several models.

    Args: the arguments of `CtxConfig`, and
        encoders: Name of a model -> "config", its configuration or its dictionary; "widths", the width of each of its
            layers; and "source", the directory or Hub id of its weights and tokenizer, which a new network loads. The
            vectors are concatenated in the order of the names.
        feature_layers: "mix", a learned weighted sum of the layers (Peters et al. 2018, equation 1), "last", or the
            number of a layer; or a dictionary with one of these for each model.
        trainable_encoders: Names of the models that are trained; the others are frozen.
        word_pooling: Tokens of a word whose states are averaged: "mean" for all, "first" or "last".
        mix_layer_norm: Normalize the layers before they are mixed.
        mix_decay: Weight of the L2 penalty of the layer mixes, towards the average of the layers.
        feature_dropout: Dropout probability of the vectors.
        output_features: Concatenate the vectors to the states of the network before its output, too (Peters et al.
            2018, section 3.3); unlike in the paper, with the same layer mixes as at its input.
        network: Name of the network, one of the head's `networks`; None for the first of them.
        network_options: Options of the network that differ from its defaults.
        max_characters_per_token: Bytes of a word, with its start and end; longer words are truncated.

    Raises:
        CtxError: The name, an entry, or the layers of a model are invalid.
    """

    model_type = "ctx-task-network"
    sub_configs: ClassVar[dict[str, Any]] = {}
    head_dropout_field = "feature_dropout"

    encoders: dict[str, Any] | None = None
    feature_layers: Any = "mix"
    trainable_encoders: list[str] | None = None
    word_pooling: str = "mean"
    mix_layer_norm: bool = False
    mix_decay: float | int = 0.0
    feature_dropout: float | int = 0.5
    output_features: bool = False
    network: str | None = None
    network_options: dict[str, Any] | None = None
    max_characters_per_token: int = 100
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        # the order of the weights of the models; a saved configuration has sorted keys
        self.encoders = {name: self._read_entry(name, entry) for name, entry in sorted((self.encoders or {}).items())}
        self.trainable_encoders = list(self.trainable_encoders or [])
        self.network_options = dict(self.network_options or {})
        names = set(self.trainable_encoders)
        if isinstance(self.feature_layers, Mapping):
            names |= set(self.feature_layers)
        if unknown := sorted(names - set(self.encoders)):
            raise CtxError(f"There is no model {unknown[0]!r}.", hint=f"use names among: {', '.join(self.encoders)}.")
        super().__post_init__(**kwargs)

    @staticmethod
    def _read_entry(name: str, entry: Any) -> dict[str, Any]:
        location = f"encoders[{name!r}]"
        if not name.isidentifier() or not is_valid_module_name(name):
            raise CtxError(
                f"{name!r} is not a valid name of a model.", location=location, hint="use letters, digits and _."
            )
        if not isinstance(entry, Mapping) or set(entry) != _KEYS:
            raise CtxError(f"Expected {', '.join(sorted(_KEYS))}, got {entry!r}.", location=location)
        config = entry["config"]
        if isinstance(config, Mapping):
            fields = dict(config)
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        return {"config": config, "widths": list(entry["widths"]), "source": entry["source"]}

    def to_dict(self) -> dict[str, Any]:
        """The fields, with the configurations of the models as dictionaries."""
        values = super().to_dict()
        values["encoders"] = {
            name: {**entry, "config": _as_dictionary(entry["config"])} for name, entry in (self.encoders or {}).items()
        }
        return values

    def feature_models(self, models: Mapping[str, Any]) -> list[FeatureModel]:
        """The models, by name, as members of a feature stack."""
        layers: Any = self.feature_layers
        return [
            FeatureModel(
                name,
                models[name],
                entry["widths"],
                layers.get(name, "mix") if isinstance(layers, Mapping) else layers,
                name in (self.trainable_encoders or []),
            )
            for name, entry in (self.encoders or {}).items()
        ]

    @property
    def feature_size(self) -> int:
        """Width of the word vectors."""
        return sum(model.width for model in self.feature_models(dict.fromkeys(self.encoders or {})))

    @property
    def hidden_size(self) -> int:
        """Alias of `feature_size`, for code that reads the width of any model."""
        return self.feature_size

    @property
    def num_characters(self) -> int:
        """Number of character ids."""
        return WORD_PADDING + 1

    @property
    def max_sequence_length(self) -> int | None:
        """None: longer sentences are divided into windows for each model."""
        return None


def encoder_entry(config: PreTrainedConfig, widths: Sequence[int], source: str) -> dict[str, Any]:
    """The entry of a model in `CtxTaskNetworkConfig.encoders`."""
    return {"config": _as_dictionary(config), "widths": list(widths), "source": source}


def _as_dictionary(config: PreTrainedConfig) -> dict[str, Any]:
    values = config.to_diff_dict()
    values["model_type"] = config.model_type
    for name in ("architectures", "auto_map", "_name_or_path", "dtype"):  # the data type of the network applies
        values.pop(name, None)
    return values
