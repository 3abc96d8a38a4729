"""The adapters of a model: configurations, active stack, and what is saved with the model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.adapter_files import ADAPTERS_FOLDER, is_adapter_parameter
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import remove_folders
from hf_ctxmodels.downstream.adapters.configuration import BottleneckConfig, FusionConfig
from hf_ctxmodels.downstream.adapters.insertion import get_encoder, list_sublayer_adapters
from hf_ctxmodels.downstream.adapters.modules import AdapterFusion, StackItem
from hf_ctxmodels.downstream.adapters.saving import write_adapter, write_fusion, write_stack

_TRAINING_CHECKPOINT = re.compile(r"checkpoint-\d+(\.writing)?")  # Trainer and the training loop resume from these


@dataclass
class AdapterSet:
    """The adapters of a base model, stored as its attribute `adapter_set`.

    Attributes:
        base: The base model.
        configs: Name -> configuration.
        fusions: Names joined by commas -> configuration.
        active: The applied adapters and fusions, from the lowest up.
        deleted: Names of deleted adapters and fusions, whose files the next `save_pretrained` removes.
    """

    base: CtxPreTrainedModel
    configs: dict[str, BottleneckConfig] = field(default_factory=dict)
    fusions: dict[str, FusionConfig] = field(default_factory=dict)
    active: tuple[StackItem, ...] = ()
    deleted: set[str] = field(default_factory=set)

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
        """Write every adapter to `directory/adapters/NAME`; a save hook of `CtxPreTrainedModel.save_pretrained`.

        Args:
            model: The base model, or the base model with a head.
            directory: The directory of the model.
            state_dict: The model's weights, gathered if it is sharded; None for `model.state_dict()`.
            is_main_process: Whether this process writes files.

        Returns:
            The weights for the model's file, without adapters, so that transformers opens it. In a training
            checkpoint, `checkpoint-<step>`, with them: Trainer resumes from this file alone.
        """
        folder = directory / ADAPTERS_FOLDER
        if is_main_process:
            remove_folders(folder, self.deleted)
        if not self.configs:
            return state_dict
        weights = model.state_dict() if state_dict is None else state_dict
        if is_main_process:
            self._write(model, folder, weights)
        if _TRAINING_CHECKPOINT.fullmatch(directory.name):
            return weights
        return {name: weight for name, weight in weights.items() if not is_adapter_parameter(name)}

    def _write(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor]) -> None:
        values = {id(parameter): weights[name] for name, parameter in model.named_parameters() if name in weights}
        for name, config in self.configs.items():
            write_adapter(self.base, name, config, folder / name, values=values)
        for names, fusion_config in self.fusions.items():
            write_fusion(self.base, names, fusion_config, folder / names, values=values)
        write_stack(folder, self.active)


def get_adapter_set(model: nn.Module) -> AdapterSet:
    """The adapters of a model; created and connected to the base model at the first call.

    Raises:
        CtxError: The model has no Transformer layers.
    """
    base = get_encoder(model)
    adapter_set = getattr(base, "adapter_set", None)
    if adapter_set is None:
        adapter_set = AdapterSet(base)
        base.adapter_set = adapter_set  # type: ignore[assignment]
        base.save_hooks = [*base.save_hooks, adapter_set.save_with_model]
        base.regularizers = [*base.regularizers, adapter_set.regularization_loss]
    return adapter_set


def has_adapters(model: nn.Module) -> bool:
    """Whether a model, of any class, has adapters."""
    adapter_set = getattr(getattr(model, "base_model", model), "adapter_set", None)
    return adapter_set is not None and bool(adapter_set.configs)
