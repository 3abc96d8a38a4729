"""Flags of the commands that train adapters."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.core.flags import REQUIRED, ParsedChoices, flag, select_fields
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_adapter
from hf_ctxmodels.downstream.adapters.configuration import ADAPTER_CONFIGS, BottleneckConfig, FusionConfig
from hf_ctxmodels.downstream.adapters.management import (
    add_adapter,
    add_fusion,
    get_adapter_set,
    has_adapters,
    set_active_adapters,
    train_adapter,
    train_fusion,
)


@dataclass(frozen=True)
class AdapterOptions(BottleneckConfig):
    """A bottleneck adapter to train; all fields of `BottleneckConfig` are options."""

    name: str = flag("adapter", "Name of the adapter.")
    frozen_adapters: tuple[str, ...] = field(
        default=(), metadata={"help": "Frozen adapters below it, from the lowest up: directories or Hub ids."}
    )

    @property
    def config(self) -> BottleneckConfig:
        """The configuration of the adapter itself."""
        return select_fields(BottleneckConfig, self)


@dataclass(frozen=True, kw_only=True)
class FusionOptions(FusionConfig):
    """An AdapterFusion to train; all fields of `FusionConfig` are options."""

    adapters: tuple[str, ...] = flag(REQUIRED, "Frozen adapters to fuse, two or more: directories or Hub ids.")
    frozen_adapters: tuple[str, ...] = field(
        default=(), metadata={"help": "Frozen adapters below the fusion, from the lowest up: directories or Hub ids."}
    )

    @property
    def config(self) -> FusionConfig:
        """The configuration of the fusion itself."""
        return select_fields(FusionConfig, self)


@dataclass
class AdapterArguments(ParsedChoices):
    """Adapters."""

    adapter: AdapterOptions | FusionOptions | None = flag(
        None,
        "Freeze the model, and train a bottleneck adapter or a fusion of trained adapters; in fine-tuning also the "
        "head.",
        {**{name: AdapterOptions(**vars(config)) for name, config in ADAPTER_CONFIGS.items()}, "fusion": FusionOptions},
        conflicts=("freeze", "anchor", "train_only"),
    )

    def apply(self, model: PreTrainedModel, *, freeze_head: bool = False) -> None:
        """Add the adapter and the frozen adapters below it to a model, and freeze its other weights, except the head
        unless `freeze_head`."""
        if self.adapter is None:
            return
        frozen = [load_adapter(model, source.strip()) for source in self.adapter.frozen_adapters]
        if isinstance(self.adapter, FusionOptions):
            names = [load_adapter(model, source.strip(), with_head=False) for source in self.adapter.adapters]
            add_fusion(model, names, self.adapter.config)
            train_fusion(model, names, frozen, freeze_head=freeze_head)
            return
        add_adapter(model, self.adapter.name, self.adapter.config)
        train_adapter(model, self.adapter.name, frozen, freeze_head=freeze_head)

    def apply_for_pretraining(self, model: PreTrainedModel) -> dict[str, Any]:
        """`apply` with a frozen head; returns the `identity`."""
        self.apply(model, freeze_head=True)
        return self.identity(model)

    def identity(self, model: PreTrainedModel) -> dict[str, Any]:
        """Values of the model's adapters that must be equal when a run is resumed."""
        if not has_adapters(model):
            return {}
        adapters = get_adapter_set(model)
        configs: dict[str, BottleneckConfig | FusionConfig] = {**adapters.configs, **adapters.fusions}
        return {
            "adapters": {name: asdict(config) for name, config in configs.items()},
            "adapters_active": [item if isinstance(item, str) else list(item) for item in adapters.active],
        }


def check_adapters(config: PreTrainedConfig, folders: Mapping[str, str]) -> None:
    """Load the adapter of each language into a model without weights, to find errors before any training."""
    if folders:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
            for language, folder in folders.items():
                load_adapter(model, folder, f"language_{language}", with_head=False)


def replace_lowest_adapter(model: PreTrainedModel, name: str, source: str) -> None:
    """Replace the lowest active adapter, for example by the adapter of another language (MAD-X), which is loaded from
    `source` unless the model has an adapter of this name."""
    adapters = get_adapter_set(model)
    if name not in adapters.configs:
        load_adapter(model, source, name, with_head=False)
    set_active_adapters(model, [name, *adapters.active[1:]])
