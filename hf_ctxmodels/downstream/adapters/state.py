"""What adapters a model has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.adapters.insertion import slots
from hf_ctxmodels.downstream.adapters.saving import write_adapter, write_fusion, write_stack
from hf_ctxmodels.layers.adapter_slots import Item, is_adapter_parameter
from hf_ctxmodels.layers.adapters import BottleneckConfig, FusionConfig


@dataclass
class AdapterSet:
    """What adapters a base model has: its attribute `bottleneck_adapters`.

    Attributes:
        base: The base model.
        configs: Name -> form.
        fusions: Names with commas -> form.
        active: What is applied.
    """

    base: CtxPreTrainedModel
    configs: dict[str, BottleneckConfig] = field(default_factory=dict)
    fusions: dict[str, FusionConfig] = field(default_factory=dict)
    active: tuple[Item, ...] = ()

    def penalty(self) -> Tensor | None:
        """The regularization of active fusions that are trained (Pfeiffer et al. 2021, appendix); None without any."""
        names = [",".join(item) for item in self.active if isinstance(item, tuple)]
        found = [slot.fusions[each] for _, _, slot in slots(self.base) for each in names if each in slot.fusions]
        terms = [fusion.penalty() for fusion in found if _is_trained(fusion)]  # type: ignore[operator]
        given = [term for term in terms if term is not None]
        return torch.stack(given).sum() if given else None

    def plain(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a model by name, without those of adapters."""
        return {name: value for name, value in weights.items() if not is_adapter_parameter(name)}

    def save_all(self, model: nn.Module, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write every adapter and fusion in a folder of its own, `directory/NAME`, and what is active.

        Args:
            model: The base model, or the head on it.
            directory: Made if needed.
            weights: Those of the model, gathered if it is sharded.
        """
        values = {id(parameter): weights[name] for name, parameter in model.named_parameters() if name in weights}
        for name, config in self.configs.items():
            write_adapter(self.base, name, config, directory / name, values=values)
        for names, fusion in self.fusions.items():
            write_fusion(self.base, names, fusion, directory / names, values=values)
        write_stack(directory, self.active)


def _is_trained(fusion: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in fusion.parameters())
