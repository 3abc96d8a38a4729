"""Adapters of a model: adding, choosing, training, merging and deleting them.

The functions are no methods: `add_adapter`, `load_adapter`, `active_adapters`, `set_adapter` and `delete_adapter` of a
`PreTrainedModel` are PEFT's, and stay so.
"""

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.config_validation import is_valid_module_name
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.downstream.adapters.configuration import resolve_config
from hf_ctxmodels.downstream.adapters.insertion import (
    encoder_of,
    invertible_slot,
    like,
    place_adapter,
    remove_slots,
    slots,
)
from hf_ctxmodels.downstream.adapters.state import AdapterSet
from hf_ctxmodels.layers.adapter_slots import Item, is_adapter_parameter
from hf_ctxmodels.layers.adapters import AdapterFusion, BottleneckConfig, FusionConfig

_NAME = re.compile(r"[^.,/\\\s]+")
Setup = str | Sequence[str | Sequence[str]] | None
"""Names from the lowest adapter up; a sequence within it is a fusion."""


def get_adapter_set(model: nn.Module) -> AdapterSet:
    """The adapters of a model.

    Raises:
        CtxError: It has no Transformer layers.
    """
    base = encoder_of(model)
    return base.bottleneck_adapters or AdapterSet(base)


def named_adapter(model: nn.Module, name: str) -> BottleneckConfig:
    """The form of an adapter.

    Raises:
        CtxError: The model has none of this name.
    """
    known = get_adapter_set(model)
    _check_known(known, [name])
    return known.configs[name]


def add_adapter(model: PreTrainedModel, name: str, config: str | BottleneckConfig = "pfeiffer") -> None:
    """Add a new adapter, which is not active yet.

    Args:
        model: Of any family with Transformer layers, with or without a head.
        name: Without dots, commas, slashes and spaces.
        config: One of `ADAPTER_CONFIGS`, or a form of its own.

    Raises:
        CtxError: The name is taken or no name, there is no such kind, or the model has no place for it.

    Example:
        >>> add_adapter(model, "de", "madx-language")  # doctest: +SKIP
        >>> train_adapter(model, "de")  # doctest: +SKIP
    """
    known, form = get_adapter_set(model), resolve_config(config)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not is_valid_module_name(name):
        raise CtxError(
            f"{name!r} is no name of an adapter.",
            hint="leave out dots, commas, slashes and spaces, and names of methods such as train; ner, for example. "
            "load_adapter takes a name in place of the file's.",
        )
    if name in known.configs:
        raise CtxError(
            f"The model already has an adapter {name!r}.", hint="give another name, or delete_adapter first."
        )
    try:
        place_adapter(known.base, name, form)
    except CtxError:
        _take_out(known, name)
        raise
    known.configs[name] = form
    known.base.bottleneck_adapters = known
    known.base.deleted_adapters -= {name}


def add_fusion(model: PreTrainedModel, names: Sequence[str], config: FusionConfig | None = None) -> None:
    """Add an AdapterFusion of adapters that the model has.

    Args:
        model: As in `add_adapter`.
        names: Of two or more adapters, which stand in the same places.
        config: Its form; None for that of the paper.

    Raises:
        CtxError: An adapter is missing, parallel or invertible, or they do not stand in the same places.
    """
    known, form = get_adapter_set(model), config or FusionConfig()
    _check_known(known, names)
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise CtxError(f"A fusion is of two or more adapters, not of {list(names)}.", hint="name each of them once.")
    for name in names:
        if known.configs[name].is_parallel or known.configs[name].inv_adapter:
            kind = "parallel" if known.configs[name].is_parallel else "invertible"
            raise CtxError(f"The adapter {name!r} is {kind}, and cannot be fused.", hint="fuse sequential adapters.")
    places = {name: _places(known, name) for name in names}
    if len({frozenset(each) for each in places.values()}) > 1:
        raise CtxError(
            f"The adapters do not stand in the same places: {_listed(places)}.",
            hint="fuse adapters with the same mh_adapter, output_adapter, cross_adapter and leave_out.",
        )
    joined = ",".join(names)
    known.base.deleted_adapters -= {joined}
    for block, _, slot in slots(known.base):
        if names[0] in slot.members:
            slot.fusions[joined] = AdapterFusion(block.module.feed_forward_norm.normalized_shape[0], form)
            like(slot.fusions[joined], block.module.feed_forward_norm)
    known.fusions[joined] = form


def set_active_adapters(model: PreTrainedModel, setup: Setup) -> None:
    """Choose the adapters that are applied, from the lowest up; None for none.

    Args:
        model: As in `add_adapter`.
        setup: A name, or a stack of names; a list of names within it is a fusion: `["de", ["ner", "pos"]]`.

    Raises:
        CtxError: The model has no such adapter or fusion, or one is invertible and not the lowest.
    """
    known = get_adapter_set(model)
    items = [setup] if isinstance(setup, str) else list(setup or [])
    stack: tuple[Item, ...] = tuple(item if isinstance(item, str) else tuple(item) for item in items)
    for item in stack:
        _check_known(known, [item] if isinstance(item, str) else item)
        if not isinstance(item, str) and ",".join(item) not in known.fusions:
            raise CtxError(
                f"The model has no fusion of {', '.join(item)}.",
                hint=f"add_fusion first; it has {_listed(known.fusions)}.",
            )
    names = [name for item in stack for name in ([item] if isinstance(item, str) else item)]
    if len(set(names)) < len(names):
        raise CtxError(f"An adapter stands twice in {names}.", hint="name each once.")
    later = [name for name in names[1:] if known.configs[name].inv_adapter]
    if later:
        raise CtxError(
            f"The adapter {later[0]!r} is invertible, and not the lowest of the stack {names}.",
            hint="put it first: a language adapter below the task's.",
        )
    known.active = stack
    _apply(known)


def get_active_adapters(model: PreTrainedModel) -> tuple[Item, ...]:
    """What is applied, from the lowest up: names, and tuples of names for fusions."""
    return get_adapter_set(model).active


def train_adapter(
    model: PreTrainedModel, name: str, below: Sequence[str | Sequence[str]] = (), *, freeze_head: bool = False
) -> None:
    """Train one adapter: it is active, and everything else is frozen but the head and a pooler.

    Args:
        model: As in `add_adapter`.
        name: The adapter to train.
        below: Frozen adapters that it stands on, from the lowest up.
        freeze_head: Freeze the head too, as for a language adapter under a pretrained masked-LM head.

    Raises:
        CtxError: As `set_active_adapters`, or the model is quantized.
    """
    set_active_adapters(model, [*below, name])
    known = get_adapter_set(model)
    trained = [slot.members[name] for _, _, slot in slots(known.base) if name in slot.members]
    invertible = invertible_slot(known.base)
    if invertible is not None and name in invertible.members:
        trained.append(invertible.members[name])
    _freeze_all_but(model, known.base, trained, freeze_head)


def train_fusion(model: PreTrainedModel, names: Sequence[str], below: Sequence[str] = ()) -> None:
    """Train a fusion, as `train_adapter` an adapter: the fused adapters are frozen.

    Raises:
        CtxError: As `set_active_adapters`.
    """
    set_active_adapters(model, [*below, tuple(names)])
    base, joined = get_adapter_set(model).base, ",".join(names)
    trained = [slot.fusions[joined] for _, _, slot in slots(base) if joined in slot.fusions]
    _freeze_all_but(model, base, trained, False)


def delete_adapter(model: PreTrainedModel, name: str) -> None:
    """Remove an adapter, and the fusions it is part of. After the last one the model is as it was before the first.

    Raises:
        CtxError: The model has no such adapter.
    """
    known = get_adapter_set(model)
    _check_known(known, [name])
    gone = [each for each in known.fusions if name in each.split(",")]
    known.active = tuple(item for item in known.active if name not in ([item] if isinstance(item, str) else item))
    _apply(known)
    del known.configs[name]
    for each in gone:
        del known.fusions[each]
    _take_out(known, name, gone)
    known.base.deleted_adapters |= {name, *gone}
    if not known.configs:
        known.base.bottleneck_adapters = None


def _take_out(known: AdapterSet, name: str, fusions: Sequence[str] = ()) -> None:
    """Remove an adapter and fusions from all places, and these after the last adapter."""
    for _, _, slot in slots(known.base):
        for module, key in [(slot.members, name), *((slot.fusions, each) for each in fusions)]:
            if key in module:
                del module[key]
    invertible = invertible_slot(known.base)
    if invertible is not None and name in invertible.members:
        del invertible.members[name]
    if not known.configs:
        remove_slots(known.base)


def _apply(known: AdapterSet) -> None:
    """Tell every place what is active."""
    for _, _, slot in slots(known.base):
        slot.active = known.active
    invertible = invertible_slot(known.base)
    if invertible is not None:
        lowest = known.active[0] if known.active else None
        invertible.active = lowest if isinstance(lowest, str) and lowest in invertible.members else None


def _freeze_all_but(model: nn.Module, base: nn.Module, trained: list[nn.Module], freeze_head: bool) -> None:
    if is_quantized(model):
        raise CtxError(
            "A quantized model has no gradients, so that no adapter in it learns.",
            hint="train the adapter in the model in single precision; it may be loaded into the quantized one.",
        )
    kept = {id(parameter) for module in trained for parameter in module.parameters()}
    inside = {
        id(parameter)
        for name, parameter in base.named_parameters()
        if is_adapter_parameter(name) or not name.startswith("pooler.")
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept or not (freeze_head or id(parameter) in inside))


def _places(known: AdapterSet, name: str) -> list[str]:
    return [f"{place} of {block.name}" for block, place, slot in slots(known.base) if name in slot.members]


def _check_known(known: AdapterSet, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise CtxError(
                f"{name!r} is no name of an adapter.",
                hint='give names from the lowest up, fused ones in a sequence: ["de", ["ner", "pos"]].',
            )
        if name not in known.configs:
            raise CtxError(
                f"The model has no adapter {name!r}.",
                hint=f"it has {_listed(known.configs)}; add_adapter or load_adapter brings one.",
            )


def _listed(names: object) -> str:
    return ", ".join(f"{name}" for name in names) or "none"  # type: ignore[attr-defined]
