"""Models as they were saved, with the adapters beside them: for what uses a model, and does not train it."""

from pathlib import Path

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.core.adapter_files import suppress_adapter_notice
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.downstream.adapters import load_saved_adapters
from hf_ctxmodels.downstream.adapters.save_load import has_saved_adapters
from hf_ctxmodels.registry import checkpoint_class
from hf_ctxmodels.training.model_loading import load_config, load_model, require_single_task, verify_weights


def load_model_with_adapters(source: str | Path, auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    """`load_model`, with the adapters that lie beside the model, as active as they were.

    Raises:
        CtxError: As there, or as `load_saved_adapters`; or the model has several tasks and a head is asked for.
    """
    if auto_class != AutoModel.__name__:
        require_single_task(config, str(source))
    with suppress_adapter_notice():
        model = load_model(source, auto_class, config)
    return add_saved_adapters(model, source)


def load_saved_model(source: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """The model as it was saved: the class with its head, and adapters as in `load_model_with_adapters`; in evaluation mode.

    Args:
        source: Directory or Hub id.
        config: Its configuration, where that was read already.

    Raises:
        CtxError: It cannot be opened, is damaged, or has several tasks.
    """
    config = load_config(source) if config is None else config
    require_single_task(config, source)
    verify_weights(Path(source))
    with suppress_adapter_notice():
        model = load_pretrained(checkpoint_class(config), source, "the model")
    return add_saved_adapters(model, source).eval()


def add_saved_adapters(model: PreTrainedModel, source: str | Path) -> PreTrainedModel:
    """The model, with the adapters that lie in a directory or Hub id, if any; raises CtxError as `load_adapter`."""
    if has_saved_adapters(source):
        print_status(
            f"{source}: the adapters {', '.join(load_saved_adapters(model, source))} are added, as active as they were"
        )
    return model
