"""Weights sharded by FSDP2 (torch's `fully_shard`): the loss and the gradients are those of the whole model.

One process suffices: its weights are `DTensor`s as those of many are.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from zoo import REPRESENTATIVES, Case, assert_same_gradients, gradients, make_batch, make_targets, scalar_loss

FINELY = ["bert", "elmo", "seqae", "cove", "infersent", "gensen", "cvt"]  # families without tables outside of modules


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def whole_gradients(model: PreTrainedModel, number: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    number.backward()
    whole = {name: each.grad for name, each in model.named_parameters()}
    return {name: None if grad is None else grad.full_tensor() for name, grad in whole.items()}


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, finely: bool) -> int:
    """Shard each Transformer layer, or every module with weights, and the rest; returns the number of modules."""
    inner = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if finely:
        lists = (nn.ModuleList, nn.ModuleDict)
        inner = [module for module in model.modules() if any(True for _ in module.parameters())]
        inner = [module for module in inner if module is not model and not isinstance(module, lists)]
    for module in reversed(inner):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return len(inner)


def check(case: Case, mesh: DeviceMesh, *, finely: bool) -> None:
    model, batch = case.model(), make_batch(case)
    batch |= make_targets(case, batch)
    expected = gradients(model, loss := scalar_loss(case, model, batch))
    sharded = case.model()
    count = shard(sharded, mesh, finely=finely)
    assert all(type(each).__name__ == "DTensor" for each in sharded.parameters())
    found = scalar_loss(case, sharded, batch)
    torch.testing.assert_close(found, loss, msg=lambda message: f"{case}, {count} modules sharded: {message}")
    grads = whole_gradients(sharded, found)
    assert_same_gradients({name: expected[name] * 0 if g is None else g for name, g in grads.items()}, expected)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
def test_every_kind_of_head(mesh: DeviceMesh) -> None:
    for case in REPRESENTATIVES:
        check(case, mesh, finely=False)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
def test_every_module_by_itself(mesh: DeviceMesh) -> None:
    """Heads whose weights are not tied: maps, recurrent cells and decoders are sharded separately."""
    for case in REPRESENTATIVES:
        if case.family.name in FINELY and not case.model_class._tied_weights_keys:
            check(case, mesh, finely=True)
