"""The states of the global random generators of a process."""

import random
from typing import Any, cast

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch (CPU and CUDA), as JSON values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast("tuple", np.random.get_state(legacy=True))
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [cuda_state.numpy().tobytes().hex() for cuda_state in cuda_states],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch_state, *cuda_states = (
        torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in (state["torch"], *state["cuda"])
    )
    torch.set_rng_state(torch_state)
    if cuda_states and len(cuda_states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda_states)
