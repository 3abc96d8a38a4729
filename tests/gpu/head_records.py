"""Run heads on the pretended device and on the CPU, and print one JSON record for each.

Usage: python head_records.py CAPABILITY CASE... (for example 9.0 bert-AutoModelForMaskedLM; no case for all)
"""

import contextlib
import json
import sys
from collections import Counter
from typing import Any

import pretended_device as gpu  # before torch
import torch
from zoo import CASES, Case, make_batch, make_targets

from hf_ctxmodels.core.host_copies import CollatedBatch

torch.set_num_threads(1)


def run(case: Case, *, packed: bool, autocast: bool, collated: bool) -> dict[str, Any]:
    """Forward and backward of a training step without dropout; of a base model the forward."""
    batch = make_batch(case)
    batch |= make_targets(case, batch)
    model = case.model(unpad=packed)
    model.train(not case.is_base)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(0)
    expected = model(**batch)
    if not case.is_base:
        expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    record: dict[str, Any] = {"case": str(case), "packed": packed, "autocast": autocast, "collated": collated}
    with gpu.pretended_device(tuple(map(int, sys.argv[1].split(".")))):
        gpu.to_device(model)
        moved = CollatedBatch(batch).to("cuda")
        if not collated:  # new tensors have no host copies
            moved = {name: tensor.clone() for name, tensor in moved.items()}
        torch.manual_seed(0)
        context = torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext()
        with gpu.recording() as operations:
            with context:
                output = model(**moved)
            if not case.is_base:
                output.loss.backward()
        record |= {"waits": Counter(operations.waits), "launches": operations.launches.total()}
        record |= {"attention": operations.attention, "views": operations.views}
        if case.is_base:
            record["error"] = relative_error(expected[0], output[0])
        else:
            record["error"] = relative_error(expected.loss, output.loss)
            moved_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            record["gradient_error"] = max(
                (relative_error(gradients[name], moved_gradients[name]) for name in gradients), default=0.0
            )
    return record


def relative_error(expected: torch.Tensor, actual: Any) -> float:
    """Largest difference relative to the largest value; infinite for a tensor that is not on the device."""
    if not isinstance(actual, gpu.DeviceTensor):
        return float("inf")
    difference = actual.values.detach().float().to_dense() - expected.detach().to_dense()
    return float(difference.abs().max() / expected.detach().to_dense().abs().max().clamp(min=1e-3))


if __name__ == "__main__":
    names = sys.argv[2:]
    names_of_options = ("packed", "autocast", "collated")
    combinations = [dict(zip(names_of_options, values)) for values in [(True, True, True), (False, False, False)]]
    for case in CASES:
        if names and str(case) not in names:
            continue
        for options in combinations:
            try:
                record = run(case, **options)
            except Exception as error:
                record = {"case": str(case), **options, "exception": f"{type(error).__name__}: {error}"}
            print(json.dumps(record), flush=True)
