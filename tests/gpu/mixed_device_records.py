"""Combine tensors on the simulated device with CPU tensors, and print which combinations raise, as JSON."""

import json
from collections.abc import Callable

import simulated_device as gpu  # before torch
import torch
from torch import Tensor

COMBINATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda tensor, cpu_tensor: tensor + cpu_tensor,
    "product": lambda tensor, cpu_tensor: tensor @ cpu_tensor,
    "attention mask": lambda tensor, cpu_tensor: torch.nn.functional.scaled_dot_product_attention(
        *[tensor[None, None]] * 3, attn_mask=cpu_tensor
    ),
    "index of a CPU tensor": lambda tensor, cpu_tensor: cpu_tensor[tensor.long()],
    "scalar": lambda tensor, cpu_tensor: tensor * cpu_tensor.sum(),
    "index": lambda tensor, cpu_tensor: tensor[cpu_tensor.long()],
}

for name, combine in COMBINATIONS.items():
    with gpu.simulated_device():
        try:
            combine(torch.zeros(2, 2).to("cuda"), torch.zeros(2, 2))
        except RuntimeError:
            print(json.dumps({"combination": name, "raises": True}))
        else:
            print(json.dumps({"combination": name, "raises": False}))
