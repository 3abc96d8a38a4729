"""The adapters of a model: adding, activating, training, merging, deleting them, and saving them with the model.

These are functions, since the methods `add_adapter`, `load_adapter`, `active_adapters`, `set_adapter` and
`delete_adapter` of a `PreTrainedModel` belong to PEFT.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER, STACK_FILE, is_adapter_parameter
from hf_ctxmodels.core.config import is_valid_module_name
from hf_ctxmodels.core.devices import to_float64
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import remove_folders, write_text_file
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.downstream.adapters.adapter_files import write_adapter
from hf_ctxmodels.downstream.adapters.configuration import BottleneckConfig, FusionConfig, resolve_config
from hf_ctxmodels.downstream.adapters.insertion import (
    attach_to_output_layers,
    get_adaptable_model,
    get_invertible_adapters,
    insert_adapter,
    list_sublayer_adapters,
    match_module,
    remove_all_adapters,
)
from hf_ctxmodels.downstream.adapters.modules import AdapterFusion, StackItem, adapter_names
from hf_ctxmodels.layers.cpu.linear import is_plain_linear

_TRAINING_CHECKPOINT = re.compile(r"checkpoint-\d+(\.writing)?")  # Trainer and the training loop resume from these
_NAME = re.compile(r"[^.,/\\\s]+")
_OUTPUT_PROJECTIONS = {"attention": "out_proj", "cross_attention": "out_proj", "feed_forward": "down_proj"}
AdapterStack = str | Sequence[str | Sequence[str]] | None
"""Names from the lowest adapter up; a sequence of names within it is a fusion."""


@dataclass
class AdapterSet:
    """The adapters of a base model, stored as its attribute `adapter_set`.

    Attributes:
        base: The base model.
        configs, fusions: Configuration of each adapter, and of each fusion by its names joined by commas.
        active: The applied adapters and fusions, from the lowest up.
        deleted: Names of deleted adapters and fusions, whose files the next `save_pretrained` removes.
    """

    base: CtxPreTrainedModel
    configs: dict[str, BottleneckConfig] = field(default_factory=dict)
    fusions: dict[str, FusionConfig] = field(default_factory=dict)
    active: tuple[StackItem, ...] = ()
    deleted: set[str] = field(default_factory=set)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise CtxError if there is no adapter of one of the names."""
        for name in names:
            if not isinstance(name, str):
                raise CtxError(
                    f"{name!r} is not a valid name of an adapter.",
                    hint='use names from the lowest up, and fused names as a sequence: ["de", ["ner", "pos"]].',
                )
            if name not in self.configs:
                raise CtxError(
                    f"The model has no adapter {name!r}.",
                    hint=f"use one of: {_join(self.configs)}; or call add_adapter or load_adapter first.",
                )

    def activate(self) -> None:
        """Let the modules apply the active adapters."""
        for _, _, adapters in list_sublayer_adapters(self.base):
            adapters.active = self.active
        invertible_adapters = get_invertible_adapters(self.base)
        if invertible_adapters is not None:
            lowest = self.active[0] if self.active else None
            is_invertible = isinstance(lowest, str) and lowest in invertible_adapters.members
            invertible_adapters.active = lowest if is_invertible else None  # type: ignore[assignment]

    def regularization_loss(self) -> Tensor | None:
        """Sum over the active fusions in training (Pfeiffer et al. 2021, appendix); None without any."""
        names = [",".join(item) for item in self.active if isinstance(item, tuple)]
        losses = []
        for _, _, adapters in list_sublayer_adapters(self.base):
            for name in names:
                fusion = adapters.fusions._modules.get(name)
                if isinstance(fusion, AdapterFusion) and any(p.requires_grad for p in fusion.parameters()):
                    losses.append(fusion.regularization_loss())
        tensors = [loss for loss in losses if loss is not None]
        return torch.stack(tensors).sum() if tensors else None

    def save_with_model(
        self, model: nn.Module, directory: Path, state_dict: dict[str, Tensor] | None, is_main_process: bool
    ) -> dict[str, Tensor] | None:
        """Write every adapter to `directory/adapters/NAME`; a hook of `CtxPreTrainedModel.save_pretrained`.

        Returns `state_dict` (None for the model's) without adapters, so that transformers opens it; with adapters in a
        training checkpoint, `checkpoint-<step>`, since Trainer resumes from this file alone.
        """
        folder = directory / ADAPTERS_FOLDER
        if is_main_process:
            remove_folders(folder, self.deleted)
        if not self.configs:
            return state_dict
        weights = model.state_dict() if state_dict is None else state_dict
        if is_main_process:
            values = {id(parameter): weights[name] for name, parameter in model.named_parameters() if name in weights}
            configs: dict[str, BottleneckConfig | FusionConfig] = {**self.configs, **self.fusions}
            for name, config in configs.items():
                write_adapter(self.base, name, config, folder / name, values=values)
            write_text_file(folder / STACK_FILE, json.dumps({"active": self.active}, indent=2) + "\n")
        if _TRAINING_CHECKPOINT.fullmatch(directory.name):
            return weights
        return {name: weight for name, weight in weights.items() if not is_adapter_parameter(name)}


def get_adapter_set(model: nn.Module) -> AdapterSet:
    """The adapters of a model, created at the first call; raises CtxError if it has no Transformer layers."""
    base = get_adaptable_model(model)
    adapter_set = getattr(base, "adapter_set", None)
    if adapter_set is None:
        adapter_set = AdapterSet(base)
        base.adapter_set = adapter_set  # type: ignore[assignment]
        base.save_hooks = {**base.save_hooks, ADAPTERS_FOLDER: adapter_set.save_with_model}
        base.regularizers = [*base.regularizers, adapter_set.regularization_loss]
    return adapter_set


def has_adapters(model: nn.Module) -> bool:
    """Whether a model, of any class, has adapters."""
    adapter_set = getattr(getattr(model, "base_model", model), "adapter_set", None)
    return adapter_set is not None and bool(adapter_set.configs)


def add_adapter(model: PreTrainedModel, name: str, config: str | BottleneckConfig = "pfeiffer") -> None:
    """Add a new adapter, which is not active yet.

    Args:
        model: A model with Transformer layers, and with its head if it has one: the inverse of an invertible adapter is
            hooked to the head's output layers.
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
    """Add an AdapterFusion of sequential adapters after the same sub-layers, by default with the paper's configuration;
    raises CtxError for other adapters."""
    adapter_set, config = get_adapter_set(model), config or FusionConfig()
    adapter_set.check_names(names)
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise CtxError(f"A fusion needs two or more adapters, got {list(names)}.", hint="name each adapter once.")
    for name in names:
        adapter_config = adapter_set.configs[name]
        if adapter_config.is_parallel or adapter_config.inv_adapter:
            reason = "parallel" if adapter_config.is_parallel else "invertible"
            raise CtxError(f"The adapter {name!r} is {reason}, and cannot be fused.", hint="fuse sequential adapters.")
    sublayer_adapters = list(list_sublayer_adapters(adapter_set.base))
    if any(len({name in adapters.members for name in names}) > 1 for _, _, adapters in sublayer_adapters):
        raise CtxError(
            f"The adapters {_join(names)} are not after the same sub-layers.",
            hint="fuse adapters with the same mh_adapter, output_adapter, cross_adapter and leave_out.",
        )
    fusion_name = ",".join(names)
    for block, _, adapters in sublayer_adapters:
        if names[0] in adapters.members:
            adapters.fusions[fusion_name] = AdapterFusion(block.hidden_size, config)
            match_module(adapters.fusions[fusion_name], block.module.feed_forward_norm)
    adapter_set.fusions[fusion_name] = config
    adapter_set.deleted.discard(fusion_name)


def set_active_adapters(model: PreTrainedModel, stack: AdapterStack) -> None:
    """Set the adapters that are applied: a name, names from the lowest up, or None for none; a sequence within `stack`
    is a fusion: `["de", ["ner", "pos"]]`.

    Raises:
        CtxError: The model has no such adapter or fusion, or an invertible adapter is not the lowest.
    """
    adapter_set = get_adapter_set(model)
    items = [stack] if isinstance(stack, str) else list(stack or [])
    active: tuple[StackItem, ...] = tuple(item if isinstance(item, str) else tuple(item) for item in items)
    for item in active:
        adapter_set.check_names(adapter_names(item))
        if not isinstance(item, str) and ",".join(item) not in adapter_set.fusions:
            raise CtxError(
                f"The model has no fusion of {_join(item)}.",
                hint=f"call add_fusion first; the model has {_join(adapter_set.fusions)}.",
            )
    names = adapter_names(*active)
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
    adapter_set.activate()


def get_active_adapters(model: PreTrainedModel) -> tuple[StackItem, ...]:
    """The applied adapters from the lowest up: names, and tuples of names for fusions."""
    return get_adapter_set(model).active


def train_adapter(
    model: PreTrainedModel, name: str, below: Sequence[str | Sequence[str]] = (), *, freeze_head: bool = False
) -> None:
    """Activate an adapter for training above the frozen adapters `below` it, from the lowest up.

    All other weights are frozen, except a pooler and, unless `freeze_head`, the head.

    Raises:
        CtxError: As `set_active_adapters`, or the model is quantized.
    """
    set_active_adapters(model, [*below, name])
    freeze_all_but(model, [name], freeze_head)


def train_fusion(
    model: PreTrainedModel, names: Sequence[str], below: Sequence[str] = (), *, freeze_head: bool = False
) -> None:
    """Activate a fusion for training, like `train_adapter`; the fused adapters are frozen."""
    set_active_adapters(model, [*below, tuple(names)])
    freeze_all_but(model, [",".join(names)], freeze_head)


def delete_adapter(model: PreTrainedModel, name: str) -> None:
    """Delete an adapter, and the fusions that contain it; deleting the last adapter restores the original model."""
    adapter_set = get_adapter_set(model)
    adapter_set.check_names([name])
    fusions = [fusion for fusion in adapter_set.fusions if name in fusion.split(",")]
    adapter_set.active = tuple(item for item in adapter_set.active if name not in adapter_names(item))
    adapter_set.activate()
    del adapter_set.configs[name]
    for fusion in fusions:
        del adapter_set.fusions[fusion]
    _remove_modules(adapter_set, name, *fusions)
    adapter_set.deleted |= {name, *fusions}


def remove_fusion(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Remove a fusion that is not active; its files of an earlier `save_pretrained` remain."""
    adapter_set, fusion = get_adapter_set(model), ",".join(names)
    del adapter_set.fusions[fusion]
    _remove_modules(adapter_set, fusion)


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, name: str) -> None:
    """Merge an adapter into the weights before it, and delete it; outputs in evaluation mode stay equal.

    The adapter must be a linear function of the sub-layer's output, for example
    `BottleneckConfig(original_ln_before=False, non_linearity="linear")`. With its projections D and U, their biases d
    and u and its scale s, the merged weight is (I + s U D) W and the merged bias is (I + s U D) b + s (U d + u).

    Raises:
        CtxError: The adapter is not the only active one, or not linear; or a linear layer is wrapped, quantized or
            without a bias.
    """
    adapter_set = get_adapter_set(model)
    if name not in adapter_set.configs or adapter_set.active != (name,):
        raise CtxError(
            f"Only the single active adapter can be merged; active are {list(adapter_set.active) or 'none'}.",
            hint=f"call set_active_adapters(model, NAME) with one of {_join(adapter_set.configs)}.",
        )
    config = adapter_set.configs[name]
    pairs: list[tuple[Any, Any]] = [
        (getattr(getattr(block.module, sublayer), _OUTPUT_PROJECTIONS[sublayer]), adapters.members[name])
        for block, sublayer, adapters in list_sublayer_adapters(adapter_set.base)
        if name in adapters.members
    ]
    obstacles = {
        f"its non-linearity is {config.non_linearity}": config.non_linearity.lower() not in ("linear", "identity"),
        "it reads the layer's norm (original_ln_before)": config.original_ln_before,
        "it reads the sub-layer's input (is_parallel)": config.is_parallel,
        "it has its own norm (ln_before, ln_after)": config.ln_before or config.ln_after,
        "the layer's sum does not follow it (original_ln_after)": not config.original_ln_after,
        "it is invertible (inv_adapter)": config.inv_adapter is not None,
    }
    model_obstacles = {
        "a shared layer has an adapter for each depth": any(isinstance(adapter, nn.ModuleDict) for _, adapter in pairs),
        "the linear layer before it is wrapped or quantized": not all(is_plain_linear(linear) for linear, _ in pairs),
        "the linear layer before it has no bias": any(getattr(linear, "bias", None) is None for linear, _ in pairs),
    }
    hints = {
        'train an adapter with BottleneckConfig(original_ln_before=False, non_linearity="linear").': obstacles,
        "keep the adapter, or merge it in a float model whose layers have biases and are not shared.": model_obstacles,
    }
    for hint, conditions in hints.items():
        for obstacle, applies in conditions.items():
            if applies:
                raise CtxError(f"The adapter cannot be merged: {obstacle}.", hint=hint)
    for linear, adapter in pairs:
        down, up = adapter.linear_down, adapter.adapter_up
        scale = to_float64(torch.as_tensor(adapter.scaling, device=up.weight.device)).reshape(-1, 1)
        up_weight, up_bias = to_float64(up.weight), to_float64(up.bias)
        product = scale * (up_weight @ to_float64(down.weight))
        offset = scale[:, 0] * (up_weight @ to_float64(down.bias) + up_bias)
        weight, bias = to_float64(linear.weight), to_float64(linear.bias)
        linear.weight.copy_(weight + product @ weight)
        linear.bias.copy_(bias + product @ bias + offset)
    delete_adapter(model, name)


def _containers(base: nn.Module, name: str) -> list[nn.ModuleDict]:
    """The dictionaries that hold a module of an adapter or fusion of this name."""
    containers = [
        modules for _, _, adapters in list_sublayer_adapters(base) for modules in (adapters.members, adapters.fusions)
    ]
    invertible_adapters = get_invertible_adapters(base)
    if invertible_adapters is not None:
        containers.append(invertible_adapters.members)
    return [modules for modules in containers if name in modules]


def _remove_modules(adapter_set: AdapterSet, *names: str) -> None:
    """Remove the modules of adapters and fusions; after the last adapter, all adapter modules and hooks."""
    for name in names:
        for modules in _containers(adapter_set.base, name):
            del modules[name]
    if not adapter_set.configs:
        remove_all_adapters(adapter_set.base)


def freeze_all_but(model: nn.Module, names: Iterable[str], freeze_head: bool = False) -> None:
    """Freeze everything but adapters or fusions, the pooler and, unless `freeze_head`, the head; raises CtxError if the
    model is quantized."""
    if is_quantized(model):
        raise CtxError(
            "A quantized model has no gradients, so an adapter in it cannot be trained.",
            hint="train the adapter in the float32 model, and load it into the quantized model.",
        )
    base = get_adapter_set(model).base
    trained = {
        id(parameter)
        for name in names
        for modules in _containers(base, name)
        for parameter in modules[name].parameters()
    }
    encoder = {
        id(parameter)
        for name, parameter in base.named_parameters()
        if is_adapter_parameter(name) or not name.startswith("pooler.")
    }
    for parameter in model.parameters():
        is_frozen = freeze_head or id(parameter) in encoder
        parameter.requires_grad_(id(parameter) in trained or not is_frozen)


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
