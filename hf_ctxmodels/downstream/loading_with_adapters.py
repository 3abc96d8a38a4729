"""Loading of models with their saved adapters, for inference and evaluation."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.adapter_files import suppress_adapter_notice
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.downstream.adapters import load_saved_adapters
from hf_ctxmodels.downstream.adapters.save_load import has_saved_adapters
from hf_ctxmodels.registry import checkpoint_class
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import (
    load_config,
    load_model,
    load_tokenizer,
    require_single_task,
    verify_weights,
)


def load_model_with_adapters(source: str | Path, auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    """`load_model`, with the adapters that were saved with the model.

    Raises:
        CtxError: As `load_model` or `load_saved_adapters`; or the model has several tasks, and a head is requested.
    """
    if auto_class != AutoModel.__name__:
        require_single_task(config, str(source))
    with suppress_adapter_notice():
        model = load_model(source, auto_class, config)
    return add_saved_adapters(model, source)


def load_saved_model(source: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Load a model with its saved head and adapters, in evaluation mode.

    Args:
        source: Directory or Hub id.
        config: The model's configuration, if it is loaded already.

    Raises:
        CtxError: The model cannot be loaded, is damaged, or has several tasks.
    """
    config = load_config(source) if config is None else config
    require_single_task(config, source)
    verify_weights(Path(source))
    with suppress_adapter_notice():
        model = load_pretrained(checkpoint_class(config), source, "the model")
    return add_saved_adapters(model, source).eval()


def add_saved_adapters(model: PreTrainedModel, source: str | Path) -> PreTrainedModel:
    """Add the adapters saved in a directory or Hub id to a model, if any; raises CtxError as `load_adapter`."""
    if has_saved_adapters(source):
        print_status(
            f"{source}: the adapters {', '.join(load_saved_adapters(model, source))} are loaded with the model"
        )
    return model


def load_model_and_tokenizer(
    source: str, auto_class: str | Callable[[PreTrainedConfig], str], max_length: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load_model_with_adapters`, and the tokenizer of the model.

    Args:
        source: Directory or Hub id.
        auto_class: Name of the head's Auto class, or a function that chooses it by the configuration.
        max_length: Longest input in tokens, which must fit the model.

    Raises:
        CtxError: The model or its tokenizer cannot be loaded, or they do not match.
    """
    config, tokenizer = load_config(source), load_tokenizer(source)
    check_tokenizer_matches_model(tokenizer, config, max_length, location=source)
    name = auto_class if isinstance(auto_class, str) else auto_class(config)
    return load_model_with_adapters(source, name, config), tokenizer
