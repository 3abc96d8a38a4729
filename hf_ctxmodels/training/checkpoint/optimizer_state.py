"""Saving of optimizer moments and random states without pickle: tensors as safetensors, the rest as JSON."""

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, gathered if sharded; tied weights stay tied. A collective call."""
    gathered: dict[int, torch.Tensor] = {}
    weights = {}
    # tied weights are one parameter; memory addresses do not tell, since shards may be empty
    for name, value in model.state_dict(keep_vars=True).items():
        whole = value.detach()
        if isinstance(whole, DTensor):
            if id(value) not in gathered:
                gathered[id(value)] = whole.full_tensor().cpu()
            whole = gathered[id(value)]
        weights[name] = whole
    return weights


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `{"<parameter name>|<moment>": tensor}` on the CPU, gathered if sharded. A collective
    call."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)  # or a step number
            tensors[f"{name}|{key}"] = whole.detach().to("cpu").contiguous()
    return tensors


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Restore `optimizer_tensors`, sharded as the parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for full_name, tensor in load_file(file).items():
        name, key = full_name.rsplit("|", 1)
        by_parameter.setdefault(name, {})[key] = tensor
    state, parameters = {}, [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        values = by_parameter.get(names[parameter])
        if values is None:
            continue
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            values = {
                key: distribute_tensor(value.to(mesh.device_type), mesh, placements) if value.ndim else value
                for key, value in values.items()
            }
        state[index] = values
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def save_random_state(file: Path) -> None:
    """Write this process's states of Python's, NumPy's and torch's global generators (CPU and CUDA)."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast("tuple", np.random.get_state(legacy=True))
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    file.write_text(json.dumps(state), encoding="utf-8")


def load_random_state(file: Path) -> None:
    """Restore the states of `save_random_state`."""
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_from_hex(cuda_state) for cuda_state in state["cuda"]])


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
