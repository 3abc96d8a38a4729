"""Everything besides weights and data that decides how a run goes on: optimizer moments and random generators.

Both are stored without pickle: tensors as safetensors under the parameters' names, the rest as JSON.
"""

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, gathered where it is sharded; tied weights stay tied. Every process must call this."""
    gathered: dict[int, torch.Tensor] = {}
    weights = {}
    # Tied weights are one parameter. Their memory would not tell: a process may hold no row of several small ones.
    for name, value in model.state_dict(keep_vars=True).items():
        whole = value.detach()
        if isinstance(whole, DTensor):
            if id(value) not in gathered:
                gathered[id(value)] = whole.full_tensor().cpu()
            whole = gathered[id(value)]
        weights[name] = whole
    return weights


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `{"<parameter name>|<moment>": tensor}` on the CPU.

    Sharded state is gathered, so the file does not depend on the number of processes; every process must call this.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            tensors[f"{name}|{key}"] = whole.detach().to("cpu").contiguous()
    return tensors


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Put what `optimizer_tensors` gave back into the optimizer, sharded as its parameters are."""
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
    """Write the states of Python's, NumPy's and torch's global generators (CPU and CUDA) of this process."""
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
    """Restore what `save_random_state` wrote."""
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
