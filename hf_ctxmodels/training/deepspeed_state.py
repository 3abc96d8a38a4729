"""The weights and the optimizer's state of a DeepSpeed engine by parameter name, as checkpoints contain them.

ZeRO (Rajbhandari et al. 2020, stages 1 and 2) concatenates the parameters of a group into one float32 tensor, also if
the model computes in half precision, and each process optimizes a part of it. `deepspeed.utils` gathers one parameter
at a time; of each, a process keeps a slice of the first dimension, as under FSDP.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.sharded_checkpoints import MOMENT_SEPARATOR

_UNCONVERTED_VALUES = "_unconverted_values"
_LOSS_SCALE_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def require_zero_stage(accelerator: Accelerator) -> None:
    """Raise CtxError for a DeepSpeed configuration other than ZeRO stage 1 or 2."""
    stage = accelerator.state.deepspeed_plugin.zero_stage
    if stage not in (1, 2):
        alternative = "fsdp2.yaml, which also shards the weights" if stage == 3 else "ddp_cpu.yaml, without sharding"
        raise CtxError(
            f"DeepSpeed is configured with ZeRO stage {stage}, expected 1 or 2.",
            location="accelerate launch",
            hint=f"launch with deepspeed_zero2.yaml, or with {alternative}.",
        )


def is_optimized_by_deepspeed(parameter: Tensor) -> bool:
    """Whether a DeepSpeed engine holds a float32 copy of the parameter."""
    return hasattr(parameter, "_hp_mapping")


def full_weight(parameter: Tensor) -> Tensor:
    """The values of a parameter or buffer, in the data type that it had before a DeepSpeed engine converted it; a
    collective call."""
    if is_optimized_by_deepspeed(parameter):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    values = parameter.detach()
    unconverted = getattr(parameter, _UNCONVERTED_VALUES, values)
    return unconverted if torch.equal(unconverted.to(values), values) else values  # a buffer may have changed


class EngineState:
    """Saves and restores the state of a prepared DeepSpeed engine with ZeRO stage 1 or 2.

    All methods are collective calls. Sharded tensors are `DTensor`s, of which a process has a slice of the first
    dimension; scalars are not sharded.

    Args:
        engine: The prepared engine.
        weights: The model's state dict before the engine converted it to its data type; these values replace the
            converted ones.
    """

    def __init__(self, engine: Any, weights: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        self._model, self._zero_optimizer = engine.module, engine.optimizer
        self._mesh = init_device_mesh(engine.device.type, (torch.distributed.get_world_size(),))
        for name, weight in self._model.state_dict(keep_vars=True).items():
            if is_optimized_by_deepspeed(weight):
                safe_set_full_fp32_param(weight, weights[name].to(weight.device))
            elif weight.dtype != weights[name].dtype:
                setattr(weight, _UNCONVERTED_VALUES, weights[name])

    def sharded_parameters(self) -> dict[str, Tensor]:
        """The parameters in the model's data type, sharded."""
        return {name: self._shard(parameter) for name, parameter in self._model.named_parameters()}

    def sharded_weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Entries of the model's state dict, sharded, see `full_weight`."""
        entries = self._model.state_dict(keep_vars=True)
        return {name: self._shard(full_weight(entries[name])) for name in names}

    def sharded_moments(self) -> dict[str, Tensor]:
        """The optimizer's state by `<parameter name>|<moment>`, sharded."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_moments()
        optimizer = self._zero_optimizer.optimizer
        flat_moments = optimizer.state[optimizer.param_groups[0]["params"][0]]
        moments = {}
        for name, parameter in self._model.named_parameters():
            if is_optimized_by_deepspeed(parameter):
                for key, value in flat_moments.items():
                    value = torch.as_tensor(value)
                    moment = safe_get_full_optimizer_state(parameter, key) if value.ndim else value.clone()
                    moments[f"{name}{MOMENT_SEPARATOR}{key}"] = self._shard(moment)
        return moments

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore `sharded_moments`, as parameter name -> moment -> tensor."""
        from deepspeed.utils import safe_set_full_optimizer_state

        self._make_moments({key: moment for state in moments.values() for key, moment in state.items()})
        parameters = dict(self._model.named_parameters())
        for name, state in moments.items():
            for key, moment in state.items():
                if isinstance(moment, DTensor) and is_optimized_by_deepspeed(parameters[name]):
                    safe_set_full_optimizer_state(parameters[name], moment.full_tensor(), key)

    def loss_scale(self) -> dict[str, float]:
        """The state of the dynamic loss scale for float16."""
        scaler = self._zero_optimizer.loss_scaler
        return {name: getattr(scaler, name) for name in _LOSS_SCALE_FIELDS if hasattr(scaler, name)}

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """Restore `loss_scale`."""
        for name, value in state.items():
            setattr(self._zero_optimizer.loss_scaler, name, value)

    def _make_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Set the optimizer's state, which its first step makes, to zeros, and to the scalars among the `moments` of a
        parameter, which are equal for all parameters."""
        optimizer = self._zero_optimizer.optimizer
        flat_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {
            index: {key: torch.zeros_like(flat) if moment.ndim else moment.clone() for key, moment in moments.items()}
            for index, flat in enumerate(flat_parameters)
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self._link_moments()

    def _link_moments(self) -> None:
        """Let `deepspeed.utils` find the optimizer's state; DeepSpeed does so once, before all groups have theirs."""
        self._zero_optimizer._hp_optimizer_states_linked = False
        self._zero_optimizer._lazy_init_hp_params_optimizer_state()

    def _shard(self, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return distribute_tensor(tensor.detach(), self._mesh, [Shard(0)], src_data_rank=None)
