"""Change device tensors that have host copies, and print whether `host_copy` still returns their values, as JSON."""

import copy
import json
from collections.abc import Callable

import simulated_device as gpu  # before torch
import torch
from torch import Tensor

from hf_ctxmodels.core.host_copies import CollatedBatch, host_copies_of_inputs, host_copy, select_true

CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}


def change(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Register a function of a CPU tensor and its device tensor that returns the device tensor to read."""
    CHANGES[function.__name__] = function
    return function


@change
def none(source: Tensor, tensor: Tensor) -> Tensor:
    return tensor


@change
def in_place(source: Tensor, tensor: Tensor) -> Tensor:
    tensor[0] = 7
    return tensor


@change
def of_the_source(source: Tensor, tensor: Tensor) -> Tensor:
    source[0] = 7
    return tensor


@change
def of_a_copy(source: Tensor, tensor: Tensor) -> Tensor:
    tensor[0] = 7
    duplicate = copy.deepcopy(tensor)
    duplicate[1] = 8
    return duplicate


@change
def in_inference_mode(source: Tensor, tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        created = torch.zeros(3, dtype=torch.long, device="cuda")
        with host_copies_of_inputs([created]):
            host_copy(created)
        created += 1
        return created


def main() -> None:
    with gpu.simulated_device():
        for name, function in CHANGES.items():
            source = torch.tensor([1, 2, 3])
            tensor = function(source, CollatedBatch({"ids": source}).to("cuda")["ids"])
            with gpu.recording() as record:
                values = host_copy(tensor).tolist()
            print(json.dumps({"change": name, "equal": values == tensor.values.tolist(), "reads": len(record.reads)}))
        batch = CollatedBatch({"ids": torch.arange(3)}).to("cuda")
        is_on_cpu = not isinstance(batch.to("cpu")["ids"], gpu.DeviceTensor)
        print(json.dumps({"change": "back to the CPU", "equal": is_on_cpu}))
        try:
            select_true(batch["ids"], torch.ones(2, dtype=torch.bool).to("cuda"))
        except IndexError:
            print(json.dumps({"change": "mask of another shape", "equal": True}))


main()
