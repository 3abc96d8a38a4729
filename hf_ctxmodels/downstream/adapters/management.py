"""Adding, activating, training and deleting the adapters of a model.

These are functions, since the methods `add_adapter`, `load_adapter`, `active_adapters`, `set_adapter` and
`delete_adapter` of a `PreTrainedModel` belong to PEFT.
"""

import re
from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_files import is_adapter_parameter
from hf_ctxmodels.core.config_validation import is_valid_module_name
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.downstream.adapters.adapter_set import AdapterSet, get_adapter_set
from hf_ctxmodels.downstream.adapters.configuration import BottleneckConfig, FusionConfig, resolve_config
from hf_ctxmodels.downstream.adapters.insertion import (
    attach_to_output_layers,
    get_invertible_adapters,
    insert_adapter,
    list_sublayer_adapters,
    match_module,
    remove_all_adapters,
)
from hf_ctxmodels.downstream.adapters.modules import AdapterFusion, StackItem

_NAME = re.compile(r"[^.,/\\\s]+")
AdapterStack = str | Sequence[str | Sequence[str]] | None
"""Names from the lowest adapter up; a sequence of names within it is a fusion."""


def get_adapter_config(model: nn.Module, name: str) -> BottleneckConfig:
    """The configuration of an adapter; raises CtxError if the model has no adapter of this name."""
    adapter_set = get_adapter_set(model)
    _check_names(adapter_set, [name])
    return adapter_set.configs[name]


def add_adapter(model: PreTrainedModel, name: str, config: str | BottleneckConfig = "pfeiffer") -> None:
    """Add a new adapter, which is not active yet.

    Args:
        model: A model of any family with Transformer layers, with or without a head. Pass the model with its head: the
            inverse of an invertible adapter is hooked to the head's output layers.
        name: Name without dots, commas, slashes and spaces.
        config: One of `ADAPTER_CONFIGS`, or a configuration.

    Raises:
        CtxError: The name is in use or invalid, there is no such configuration, or the model has no sub-layer for it.

    Example:
        >>> add_adapter(model, "de", "madx-language")  # doctest: +SKIP
        >>> train_adapter(model, "de")  # doctest: +SKIP
    """
    adapter_set, config = get_adapter_set(model), resolve_config(config)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not is_valid_module_name(name):
        raise CtxError(
            f"{name!r} is not a valid name of an adapter.",
            hint="use no dots, commas, slashes and spaces, and no name of a method such as train; for example ner. "
            "load_adapter takes a name that replaces the file's.",
        )
    if name in adapter_set.configs:
        raise CtxError(
            f"The model already has an adapter {name!r}.", hint="use another name, or call delete_adapter first."
        )
    try:
        insert_adapter(model, adapter_set.base, name, config)
    except CtxError:
        _remove_modules(adapter_set, name)
        raise
    adapter_set.configs[name] = config
    adapter_set.deleted.discard(name)


def add_fusion(model: PreTrainedModel, names: Sequence[str], config: FusionConfig | None = None) -> None:
    """Add an AdapterFusion of adapters that the model has.

    Args:
        model: As in `add_adapter`.
        names: Two or more adapters, which are inserted after the same sub-layers.
        config: Its configuration; None for the paper's.

    Raises:
        CtxError: An adapter is missing, parallel or invertible, or the adapters are not after the same sub-layers.
    """
    adapter_set, config = get_adapter_set(model), config or FusionConfig()
    _check_names(adapter_set, names)
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise CtxError(f"A fusion needs two or more adapters, got {list(names)}.", hint="name each adapter once.")
    for name in names:
        adapter_config = adapter_set.configs[name]
        if adapter_config.is_parallel or adapter_config.inv_adapter:
            reason = "parallel" if adapter_config.is_parallel else "invertible"
            raise CtxError(f"The adapter {name!r} is {reason}, and cannot be fused.", hint="fuse sequential adapters.")
    sublayers = {name: _adapted_sublayers(adapter_set, name) for name in names}
    if len(set(sublayers.values())) > 1:
        raise CtxError(
            f"The adapters {_join(names)} are not after the same sub-layers.",
            hint="fuse adapters with the same mh_adapter, output_adapter, cross_adapter and leave_out.",
        )
    fusion_name = ",".join(names)
    for block, _, adapters in list_sublayer_adapters(adapter_set.base):
        if names[0] in adapters.members:
            adapters.fusions[fusion_name] = AdapterFusion(block.hidden_size, config)
            match_module(adapters.fusions[fusion_name], block.module.feed_forward_norm)
    adapter_set.fusions[fusion_name] = config
    adapter_set.deleted.discard(fusion_name)


def set_active_adapters(model: PreTrainedModel, stack: AdapterStack) -> None:
    """Set the adapters that are applied, from the lowest up; None for none.

    Args:
        model: As in `add_adapter`.
        stack: A name, or a sequence of names; a sequence within it is a fusion: `["de", ["ner", "pos"]]`.

    Raises:
        CtxError: The model has no such adapter or fusion, or an invertible adapter is not the lowest.
    """
    adapter_set = get_adapter_set(model)
    items = [stack] if isinstance(stack, str) else list(stack or [])
    active: tuple[StackItem, ...] = tuple(item if isinstance(item, str) else tuple(item) for item in items)
    for item in active:
        _check_names(adapter_set, [item] if isinstance(item, str) else item)
        if not isinstance(item, str) and ",".join(item) not in adapter_set.fusions:
            raise CtxError(
                f"The model has no fusion of {_join(item)}.",
                hint=f"call add_fusion first; the model has {_join(adapter_set.fusions)}.",
            )
    names = [name for item in active for name in ([item] if isinstance(item, str) else item)]
    if len(set(names)) < len(names):
        raise CtxError(f"An adapter occurs twice in {names}.", hint="name each adapter once.")
    misplaced = [name for name in names[1:] if adapter_set.configs[name].inv_adapter]
    if misplaced:
        raise CtxError(
            f"The adapter {misplaced[0]!r} is invertible, and not the lowest of the stack {names}.",
            hint="put it first: a language adapter below the task adapter.",
        )
    adapter_set.active = active
    attach_to_output_layers(model, adapter_set.base)
    _activate(adapter_set)


def get_active_adapters(model: PreTrainedModel) -> tuple[StackItem, ...]:
    """The applied adapters from the lowest up: names, and tuples of names for fusions."""
    return get_adapter_set(model).active


def train_adapter(
    model: PreTrainedModel, name: str, below: Sequence[str | Sequence[str]] = (), *, freeze_head: bool = False
) -> None:
    """Activate an adapter for training, and freeze everything else except the head and a pooler.

    Args:
        model: As in `add_adapter`.
        name: The adapter to train.
        below: Frozen adapters below it, from the lowest up.
        freeze_head: Freeze the head too, for example for a language adapter under a pretrained masked-LM head.

    Raises:
        CtxError: As `set_active_adapters`, or the model is quantized.
    """
    set_active_adapters(model, [*below, name])
    base = get_adapter_set(model).base
    modules = [adapters.members[name] for _, _, adapters in list_sublayer_adapters(base) if name in adapters.members]
    invertible_adapters = get_invertible_adapters(base)
    if invertible_adapters is not None and name in invertible_adapters.members:
        modules.append(invertible_adapters.members[name])
    _freeze_all_but(model, base, modules, freeze_head)


def train_fusion(model: PreTrainedModel, names: Sequence[str], below: Sequence[str] = ()) -> None:
    """Activate a fusion for training, like `train_adapter`; the fused adapters are frozen.

    Raises:
        CtxError: As `set_active_adapters`.
    """
    set_active_adapters(model, [*below, tuple(names)])
    base, fusion_name = get_adapter_set(model).base, ",".join(names)
    modules = [
        adapters.fusions[fusion_name]
        for _, _, adapters in list_sublayer_adapters(base)
        if fusion_name in adapters.fusions
    ]
    _freeze_all_but(model, base, modules, False)


def delete_adapter(model: PreTrainedModel, name: str) -> None:
    """Delete an adapter, and the fusions that contain it. Deleting the last adapter restores the original model.

    Raises:
        CtxError: The model has no such adapter.
    """
    adapter_set = get_adapter_set(model)
    _check_names(adapter_set, [name])
    fusions = [fusion for fusion in adapter_set.fusions if name in fusion.split(",")]
    adapter_set.active = tuple(
        item for item in adapter_set.active if name not in ([item] if isinstance(item, str) else item)
    )
    _activate(adapter_set)
    del adapter_set.configs[name]
    for fusion in fusions:
        del adapter_set.fusions[fusion]
    _remove_modules(adapter_set, name, fusions)
    adapter_set.deleted |= {name, *fusions}


def _remove_modules(adapter_set: AdapterSet, name: str, fusions: Iterable[str] = ()) -> None:
    """Remove the modules of an adapter and of fusions; after the last adapter, all adapter modules and hooks."""
    for _, _, adapters in list_sublayer_adapters(adapter_set.base):
        for modules, key in [(adapters.members, name), *((adapters.fusions, fusion) for fusion in fusions)]:
            if key in modules:
                del modules[key]
    invertible_adapters = get_invertible_adapters(adapter_set.base)
    if invertible_adapters is not None and name in invertible_adapters.members:
        del invertible_adapters.members[name]
    if not adapter_set.configs:
        remove_all_adapters(adapter_set.base)


def _activate(adapter_set: AdapterSet) -> None:
    for _, _, adapters in list_sublayer_adapters(adapter_set.base):
        adapters.active = adapter_set.active
    invertible_adapters = get_invertible_adapters(adapter_set.base)
    if invertible_adapters is not None:
        lowest = adapter_set.active[0] if adapter_set.active else None
        is_invertible = isinstance(lowest, str) and lowest in invertible_adapters.members
        invertible_adapters.active = lowest if is_invertible else None  # type: ignore[assignment]


def _freeze_all_but(model: nn.Module, base: nn.Module, modules: Sequence[nn.Module], freeze_head: bool) -> None:
    if is_quantized(model):
        raise CtxError(
            "A quantized model has no gradients, so an adapter in it cannot be trained.",
            hint="train the adapter in the float32 model, and load it into the quantized model.",
        )
    trained = {id(parameter) for module in modules for parameter in module.parameters()}
    encoder = {
        id(parameter)
        for name, parameter in base.named_parameters()
        if is_adapter_parameter(name) or not name.startswith("pooler.")
    }
    for parameter in model.parameters():
        is_frozen = freeze_head or id(parameter) in encoder
        parameter.requires_grad_(id(parameter) in trained or not is_frozen)


def _adapted_sublayers(adapter_set: AdapterSet, name: str) -> frozenset[tuple[str, str]]:
    return frozenset(
        (block.name, sublayer)
        for block, sublayer, adapters in list_sublayer_adapters(adapter_set.base)
        if name in adapters.members
    )


def _check_names(adapter_set: AdapterSet, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise CtxError(
                f"{name!r} is not a valid name of an adapter.",
                hint='use names from the lowest up, and fused names as a sequence: ["de", ["ner", "pos"]].',
            )
        if name not in adapter_set.configs:
            raise CtxError(
                f"The model has no adapter {name!r}.",
                hint=f"use one of: {_join(adapter_set.configs)}; or call add_adapter or load_adapter first.",
            )


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
