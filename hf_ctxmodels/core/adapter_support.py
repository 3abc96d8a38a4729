"""Support of adapters: names of saved bottleneck adapters, PEFT's default targets, and modules saved with an adapter.

Nothing here imports PEFT, so that either package may be imported first. PEFT's tables are filled when it reads a
configuration, and PEFT assigns its configurations to `peft_config` of an adapted model.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import cached_file

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.tensor_parallel import is_tensor_parallel

ADAPTERS_FOLDER = "adapters"
"""Folder in a model's directory with one folder for each adapter."""
STACK_FILE = "stack.json"
"""File in `ADAPTERS_FOLDER` with the active adapters."""
BLOCK_ADAPTERS, INVERTIBLE_ADAPTERS = "adapters", "invertible"
"""Names of adapters as children of a block and of the embeddings; components of the keys in training checkpoints."""
ADAPTER_KEYS = rf"(^|\.)({BLOCK_ADAPTERS}|{INVERTIBLE_ADAPTERS})\."
"""Pattern of the keys that a model without adapters ignores in a training checkpoint."""

_IS_NOTICE_SUPPRESSED = ContextVar("is_adapter_notice_suppressed", default=False)


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter, module or checkpoint key of this name belongs to an adapter."""
    return not {BLOCK_ADAPTERS, INVERTIBLE_ADAPTERS}.isdisjoint(name.split("."))


@contextmanager
def suppress_adapter_notice() -> Iterator[None]:
    """Suppress the notice while the caller loads a model and then adds its saved adapters."""
    token = _IS_NOTICE_SUPPRESSED.set(True)
    try:
        yield
    finally:
        _IS_NOTICE_SUPPRESSED.reset(token)


def has_saved_adapters(source: str | Path, subfolder: str = "", **hub_options: Any) -> bool:
    """Whether a directory or Hub id has adapters that `load_saved_adapters` loads.

    Args:
        source: Directory or Hub id of a model.
        subfolder: Folder of the model in the directory or repository.
        hub_options: Arguments of `transformers.utils.cached_file`, such as `revision` and `token`.
    """
    if Path(source).exists() or Path(source).is_absolute():
        return Path(source, subfolder, ADAPTERS_FOLDER, STACK_FILE).is_file()
    try:
        file = cached_file(
            str(source),
            STACK_FILE,
            subfolder=f"{subfolder}/{ADAPTERS_FOLDER}" if subfolder else ADAPTERS_FOLDER,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub_options,
        )
    except OSError:  # no such repository, or no valid id
        return False
    return file is not None


def report_unloaded_adapters(source: Any, subfolder: str = "", **hub_options: Any) -> None:
    """Print that the adapters saved with a loaded model were not loaded: without them its outputs differ. Arguments as
    in `has_saved_adapters`; a `source` of another type has no adapters."""
    if not isinstance(source, str | Path):
        return
    folder = Path(source, subfolder, ADAPTERS_FOLDER)
    adapters = sorted(path.parent.name for path in folder.glob("*/adapter_config.json"))
    if adapters:
        is_reported = not (_IS_NOTICE_SUPPRESSED.get() and (folder / STACK_FILE).is_file())
    else:
        is_reported = not _IS_NOTICE_SUPPRESSED.get() and has_saved_adapters(source, subfolder, **hub_options)
    if is_reported:
        names = f" {', '.join(adapters)}" if adapters else ""
        print_status(f"{source}: loaded without its adapters{names}; adapters.load_saved_adapters adds them")


_TABLES = "TRANSFORMERS_MODELS_TO_"  # prefix of the names of PEFT's tables: model type -> names of modules
_TASKS_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # PEFT trains and saves the heads of these tasks
_FEED_FORWARD = "feed_forward.down_proj"


def register_peft_targets(model_type: str, target_modules: Collection[str]) -> None:
    """Register the default target modules of a model type with PEFT, which must be imported.

    Methods that adapt BERT's query and value by default (LoRA and its relatives) adapt `target_modules`, names of
    linear layers; IA3 also adapts the output of the feed-forward layers.
    """
    if not target_modules:
        return
    tables = vars(sys.modules["peft.utils.constants"])
    for name, table in tables.items():
        if name.startswith(_TABLES) and isinstance(table, dict) and table.get("bert") == ["query", "value"]:
            table.setdefault(model_type, list(target_modules))
    tables.get(f"{_TABLES}IA3_TARGET_MODULES_MAPPING", {}).setdefault(model_type, [*target_modules, _FEED_FORWARD])
    tables.get(f"{_TABLES}IA3_FEEDFORWARD_MODULES_MAPPING", {}).setdefault(model_type, [_FEED_FORWARD])


class PeftConfigAttribute:
    """The attribute `peft_config` of a model, which PEFT assigns once it has adapted the model.

    The assignment adds newly initialized modules to the adapters' `modules_to_save`, and unties adapted weights, by the
    model's method `untie_adapted_weights` if it has one. A model without adapters has no such attribute.
    """

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        if "peft_config" not in model.__dict__:
            raise AttributeError(f"{type(model).__name__} has no attribute 'peft_config'.")
        return model.__dict__["peft_config"]

    def __set__(self, model: Any, adapters: dict[str, Any]) -> None:
        if is_tensor_parallel(model):
            raise CtxError(
                "PEFT's adapters cannot be added to layers that are sharded by tensor parallelism.",
                hint="load the model without tp_plan; accelerate launch shards an adapted model by FSDP2.",
            )
        model.__dict__["peft_config"] = adapters
        if not model._hf_peft_config_loaded:  # transformers' `add_adapter` saves no head
            for adapter in adapters.values():
                saved = getattr(adapter, "modules_to_save", None) or []
                new_modules = model.newly_initialized_modules
                unsaved = [name for name in new_modules if not any(name.endswith(module) for module in saved)]
                if adapter.task_type not in _TASKS_WITH_HEADS or adapter.inference_mode or not unsaved:
                    continue
                for name in unsaved:
                    if any(hasattr(module, "base_layer") for module in model.get_submodule(name).modules()):
                        raise CtxError(
                            f"The adapter targets a layer in {name!r}, which is newly initialized: its random weights "
                            "are not in the checkpoint, and would not be saved.",
                            hint=f"set modules_to_save={unsaved!r} in the adapter's configuration.",
                        )
                adapter.modules_to_save = [*saved, *unsaved]
        if any(getattr(adapter, "ensure_weight_tying", False) for adapter in adapters.values()):
            return
        if hasattr(model, "untie_adapted_weights"):
            model.untie_adapted_weights()
        else:
            untie_adapted_embeddings(model)

    def __delete__(self, model: Any) -> None:
        model.__dict__.pop("peft_config", None)


def newly_initialized_modules(model: nn.Module, missing: Collection[str]) -> tuple[str, ...]:
    """Names of the outermost modules all of whose parameters are `missing` in a checkpoint."""
    names: list[str] = []
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in names)
        if not name or is_inner or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        parameters = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if parameters and all(parameter in missing for parameter in parameters):
            names.append(name)
    return tuple(names)


def untie_adapted_embeddings(model: Any) -> bool:
    """Untie adapted embeddings and output layers; returns whether there were any. Merging adds to the adapted weight in
    place, which would change the tied weights too."""
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
