"""New task networks from the models whose vectors are their features."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.adapter_support import is_adapter_parameter
from hf_ctxmodels.core.auto_classes import has_class
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.networks.configuration import CtxTaskNetworkConfig, encoder_entry
from hf_ctxmodels.downstream.networks.tokenization import CtxTaskNetworkTokenizer
from hf_ctxmodels.training.model_loading import make_config

TRAINED_ENCODER_OPTIONS = {"feature_layers": "last", "trainable_encoders": ["encoder"], "feature_dropout": 0.1}
"""Fields of a network on the last layer of a model that is trained with it."""

NETWORK_LEARNING_RATE = 1e-3
"""Peak learning rate of a network whose encoder has the rate of fine-tuning."""


def needs_network(config: PreTrainedConfig, auto_class: str) -> bool:
    """Whether a model has no class for a task, and task networks have one."""
    return not has_class(auto_class, type(config)) and has_class(auto_class, CtxTaskNetworkConfig)


def parse_features(assignments: Sequence[str]) -> dict[str, str]:
    """`["glove=runs/glove", "elmo=runs/elmo"]` as a dictionary; commas also separate assignments. Raises CtxError for
    another form or a repeated name."""
    sources: dict[str, str] = {}
    for assignment in (item for value in assignments for item in value.split(",")):
        name, equals, source = assignment.partition("=")
        if not (name and equals and source) or name in sources:
            raise CtxError(
                f"{assignment!r} is not NAME=DIR with a new name.",
                location="--features",
                hint="write, for example, --features glove=runs/glove,elmo=runs/elmo.",
            )
        sources[name] = source
    return sources


def new_network(
    sources: Mapping[str, str], changes: Mapping[str, Any]
) -> tuple[CtxTaskNetworkConfig, CtxTaskNetworkTokenizer]:
    """The configuration and the tokenizer of a new network.

    Args:
        sources: Name of each model -> its directory or Hub id.
        changes: Fields of the configuration.

    Raises:
        CtxError: A model cannot be opened, or a field is invalid.
    """
    encoders = {}
    for name, source in sources.items():
        model, tokenizer = load_model_and_tokenizer(source, "AutoModel")
        if any(is_adapter_parameter(key) for key, _ in model.named_parameters()):
            raise CtxError(
                "The features of a model with adapters are not supported.",
                location=f"--features {name}={source}",
                hint="merge the adapters into the model and save it.",
            )
        encoders[name] = encoder_entry(model.config, WordEncoder(model, tokenizer).widths, source)
    config = make_config(CtxTaskNetworkConfig, {"encoders": encoders, **changes}, location="--config_options")
    tokenizer = CtxTaskNetworkTokenizer.from_words([], max_characters=config.max_characters_per_token)
    return config, tokenizer  # type: ignore[return-value]
