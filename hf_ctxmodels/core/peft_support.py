"""Support of PEFT: its default target modules, and the modules that it must save with an adapter.

Nothing here imports PEFT, so that either package may be imported first. PEFT's tables are filled when it reads a
configuration, and PEFT assigns its configurations to `peft_config` of an adapted model.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hf_ctxmodels.core.errors import CtxError

_TABLES = "TRANSFORMERS_MODELS_TO_"  # prefix of the names of PEFT's tables: model type -> names of modules
_TASKS_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # PEFT trains and saves the heads of these tasks
_FEED_FORWARD = "feed_forward.down_proj"


def register_peft_targets(model_type: str, target_modules: Collection[str]) -> None:
    """Register the default target modules of a model type with PEFT, if PEFT is imported.

    Methods that adapt BERT's query and value by default (LoRA and its relatives) adapt `target_modules`; IA3 also
    adapts the output of the feed-forward layers.

    Args:
        model_type: The configuration's model type.
        target_modules: Names of linear layers; nothing is registered if empty.
    """
    constants = sys.modules.get("peft.utils.constants")
    if constants is None or not target_modules:
        return
    tables = vars(constants)
    for name, table in tables.items():
        if name.startswith(_TABLES) and isinstance(table, dict) and table.get("bert") == ["query", "value"]:
            table.setdefault(model_type, list(target_modules))
    tables.get(f"{_TABLES}IA3_TARGET_MODULES_MAPPING", {}).setdefault(model_type, [*target_modules, _FEED_FORWARD])
    tables.get(f"{_TABLES}IA3_FEEDFORWARD_MODULES_MAPPING", {}).setdefault(model_type, [_FEED_FORWARD])


class PeftConfigAttribute:
    """The attribute `peft_config` of a model, which PEFT assigns once it has adapted the model.

    The assignment adds newly initialised modules to the adapters' `modules_to_save`, and unties adapted weights, by the
    model's method `untie_adapted_weights` if it has one. A model without adapters has no such attribute.
    """

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        if "peft_config" not in model.__dict__:
            raise AttributeError(f"{type(model).__name__} has no attribute 'peft_config'.")
        return model.__dict__["peft_config"]

    def __set__(self, model: Any, adapters: dict[str, Any]) -> None:
        model.__dict__["peft_config"] = adapters
        if not model._hf_peft_config_loaded:  # transformers' `add_adapter` saves no head
            save_new_modules_with_adapters(model, adapters, model.newly_initialized_modules)
        if any(getattr(adapter, "ensure_weight_tying", False) for adapter in adapters.values()):
            return
        if hasattr(model, "untie_adapted_weights"):
            model.untie_adapted_weights()
        else:
            untie_adapted_embeddings(model)

    def __delete__(self, model: Any) -> None:
        model.__dict__.pop("peft_config", None)


def newly_initialized_modules(model: nn.Module, missing: Collection[str]) -> tuple[str, ...]:
    """Names of the outermost modules that a checkpoint has no parameters of.

    Args:
        model: The loaded model.
        missing: Names of the parameters that the checkpoint lacks.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in names)
        if not name or is_inner or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        parameters = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if parameters and all(parameter in missing for parameter in parameters):
            names.append(name)
    return tuple(names)


def save_new_modules_with_adapters(model: nn.Module, adapters: Mapping[str, Any], names: Collection[str]) -> None:
    """Add newly initialised modules to the adapters' `modules_to_save`: their random weights would be lost otherwise.

    PEFT itself adds only modules named `classifier`, `score` and `qa_outputs`, for the tasks of these heads.

    Args:
        model: The adapted model.
        adapters: PEFT's configurations by adapter.
        names: The newly initialised modules.

    Raises:
        CtxError: An adapter is inside a newly initialised module.
    """
    for adapter in adapters.values():
        saved = getattr(adapter, "modules_to_save", None) or []
        unsaved = [name for name in names if not any(name.endswith(module) for module in saved)]
        if adapter.task_type not in _TASKS_WITH_HEADS or adapter.inference_mode or not unsaved:
            continue
        for name in unsaved:
            if any(hasattr(module, "base_layer") for module in model.get_submodule(name).modules()):
                raise CtxError(
                    f"The adapter targets a layer in {name!r}, which is newly initialised: its random weights are not "
                    "in the checkpoint, and would not be saved.",
                    hint=f"set modules_to_save={unsaved!r} in the adapter's configuration.",
                )
        adapter.modules_to_save = [*saved, *unsaved]


def untie_adapted_embeddings(model: Any) -> bool:
    """Untie output layers from the embeddings if one of them is adapted, or the embeddings are.

    Merging adds to the adapted weight in place, which would change the tied weights too.

    Args:
        model: A model with embeddings.

    Returns:
        Whether a layer was tied.
    """
    embeddings = model.get_input_embeddings()
    weight = getattr(getattr(embeddings, "base_layer", embeddings), "weight", None)
    adapted_layers = [module.base_layer for module in model.modules() if hasattr(module, "base_layer")]
    tied_layers = [module for module in model.modules() if type(module) is nn.Linear and module.weight is weight]
    if not tied_layers or not any(getattr(layer, "weight", None) is weight for layer in adapted_layers):
        return False
    for layer in tied_layers:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    model.config.tie_word_embeddings = False
    return True
