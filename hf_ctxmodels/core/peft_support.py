"""What PEFT needs to know of the models: which maps it adapts by default, and which modules are new.

Nothing here imports PEFT. Its tables are filled when it reads a configuration, so that either package may be imported
first; it hands its own configuration to the model it has adapted, which adds there what must be saved with an adapter.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hf_ctxmodels.core.errors import CtxError

_TABLES = "TRANSFORMERS_MODELS_TO_"  # of PEFT: method -> model type -> names of modules
_WHOLE_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # tasks whose head PEFT trains and saves beside the adapter
_FEED_FORWARD = "feed_forward.down_proj"


def register_peft_targets(model_type: str, maps: Collection[str]) -> None:
    """Tell PEFT, if it is imported, what to adapt in models of this type.

    Methods that adapt BERT's query and value by default (LoRA and its relatives) adapt `maps`; IA3 the output of the
    feed-forward layers as well.

    Args:
        model_type: The configuration's.
        maps: Names of linear maps; without any, nothing is registered.
    """
    constants = sys.modules.get("peft.utils.constants")
    if constants is None or not maps:
        return
    tables = vars(constants)
    for name, table in tables.items():
        if name.startswith(_TABLES) and isinstance(table, dict) and table.get("bert") == ["query", "value"]:
            table.setdefault(model_type, list(maps))
    tables.get(f"{_TABLES}IA3_TARGET_MODULES_MAPPING", {}).setdefault(model_type, [*maps, _FEED_FORWARD])
    tables.get(f"{_TABLES}IA3_FEEDFORWARD_MODULES_MAPPING", {}).setdefault(model_type, [_FEED_FORWARD])


def newly_initialized_modules(model: nn.Module, missing: Collection[str]) -> tuple[str, ...]:
    """Names of the modules that a checkpoint holds nothing of, the outermost that are called.

    Args:
        model: The model it was opened with.
        missing: Names of the parameters that it lacks.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        parameters = [f"{name}.{each}" for each, _ in module.named_parameters()]
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found += [name] if parameters and all(each in missing for each in parameters) else []
    return tuple(found)


def save_new_modules_with_adapters(model: nn.Module, adapters: Mapping[str, Any], names: Collection[str]) -> None:
    """Name new modules in the adapters' `modules_to_save`: a random module that is not saved is another one later.

    PEFT itself names those called `classifier`, `score` and `qa_outputs`, and only for the tasks of these heads.

    Args:
        model: The adapted model.
        adapters: PEFT's configurations by adapter.
        names: The new modules.

    Raises:
        CtxError: An adapter stands inside a new module.
    """
    for adapter in adapters.values():
        saved = getattr(adapter, "modules_to_save", None) or []
        left = [name for name in names if not any(name.endswith(known) for known in saved)]
        if adapter.task_type not in _WHOLE_TASKS or adapter.inference_mode or not left:
            continue
        for name in left:
            if any(hasattr(module, "base_layer") for module in model.get_submodule(name).modules()):
                raise CtxError(
                    f"The adapter reaches into {name!r}, which is new: its random weights are not those of the "
                    "checkpoint, and would not be saved.",
                    hint=f"train it as a whole: modules_to_save={left!r} in the adapter's configuration.",
                )
        adapter.modules_to_save = [*saved, *left]


def untie_adapted_embeddings(model: Any) -> bool:
    """Give output layers that are tied to the embeddings weights of their own where an adapter stands on one of them or
    on the embeddings.

    Merging adds to the adapted weight in place, which would change the others.

    Args:
        model: A model with embeddings.

    Returns:
        Whether a layer was tied.
    """
    table = model.get_input_embeddings()
    weight = getattr(getattr(table, "base_layer", table), "weight", None)
    adapted = [each.base_layer for each in model.modules() if hasattr(each, "base_layer")]
    tied = [each for each in model.modules() if type(each) is nn.Linear and each.weight is weight]
    if not tied or not any(getattr(each, "weight", None) is weight for each in adapted):
        return False
    for layer in tied:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    model.config.tie_word_embeddings = False
    return True
