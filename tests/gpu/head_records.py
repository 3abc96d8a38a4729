"""Run heads on the simulated device and on the CPU, and print a JSON record for each.

Usage: PYTHONPATH=tests:tests/gpu python tests/gpu/head_records.py CAPABILITY CONDITIONS [CASE ...]

CONDITIONS are comma-separated combinations of packed or padded, float32 or autocast, and collated (CollatedBatch) or
plain (new tensors), for example packed-autocast-collated,padded-float32-plain. The cases are by default all heads and
base models of all families.
"""

import contextlib
import json
import sys
from collections import Counter
from typing import Any

import simulated_device as gpu  # before torch
import torch
from zoo import CASES, Case, make_batch, make_targets

from hf_ctxmodels.core.host_copies import CollatedBatch


def run(case: Case, conditions: str) -> dict[str, Any]:
    """Compare a training step without dropout, or the forward pass of a base model, with the CPU."""
    layout, dtype, source = conditions.split("-")
    batch = make_batch(case)
    batch |= make_targets(case, batch)
    model = case.model(unpad=layout == "packed")
    model.train(not case.is_base)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(0)
    expected = model(**batch)
    if not case.is_base:
        expected.loss.backward()
    expected_gradients = gradients(model)
    model.zero_grad(set_to_none=True)
    with gpu.simulated_device(tuple(map(int, sys.argv[1].split(".")))):
        gpu.to_device(model)
        device_batch: dict[str, Any] = CollatedBatch(batch).to("cuda")
        if source == "plain":
            device_batch = {name: tensor.clone() for name, tensor in device_batch.items()}
        torch.manual_seed(0)
        autocast = torch.autocast("cuda", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext()
        with gpu.recording() as record:
            with autocast:
                output = model(**device_batch)
            if not case.is_base:
                output.loss.backward()
        pairs = [(expected[0], output[0])] if case.is_base else [(expected.loss, output.loss)]
        device_gradients = gradients(model)
        gradient_pairs = [(gradient, device_gradients.get(name)) for name, gradient in expected_gradients.items()]
        return {
            "waits": Counter(record.waits),
            "launches": record.launches.total(),
            "views": record.views,
            "attention": record.attention,
            "error": relative_error(pairs),
            "gradient_error": relative_error(gradient_pairs),
        }


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative_error(pairs: list[tuple[torch.Tensor, Any]]) -> float:
    """Norm of the differences relative to the norm of the expected tensors; infinite if one is not on the device."""
    if not all(isinstance(actual, gpu.DeviceTensor) for _, actual in pairs):
        return float("inf")
    difference = norm = 0.0
    for expected, actual in pairs:
        dense = expected.detach().to_dense()
        difference += float((actual.values.detach().to_dense().float() - dense).square().sum())
        norm += float(dense.square().sum())
    return (difference / norm) ** 0.5 if norm else 0.0


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, _, all_conditions, *names = sys.argv
    for case in CASES:
        for conditions in all_conditions.split(","):
            if names and str(case) not in names:
                continue
            try:
                record = run(case, conditions)
            except Exception as error:  # reported by the test
                record = {"exception": f"{type(error).__name__}: {error}"}
            print(json.dumps({"case": str(case), "conditions": conditions, **record}), flush=True)
