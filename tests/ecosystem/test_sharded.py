"""Weights sharded with FSDP2 (`fully_shard`) in one process: losses and gradients equal the unsharded model."""

from collections.abc import Iterator

import pytest
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from zoo import (
    REPRESENTATIVES,
    Case,
    as_subtests,
    assert_close,
    assert_same_gradients,
    gradients,
    labeled_batch,
    scalar_loss,
)

from hf_ctxmodels import CtxError
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.optimizers import make_optimizer, require_sharded_updates

FINE_GRAINED = ["bert", "elmo", "seqae", "cove", "infersent", "gensen", "cvt"]  # all embeddings are modules


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, per_module: bool) -> int:
    """Shard each layer, or each module with weights, and the model; return the number of inner modules."""
    inner = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if per_module:
        lists = (nn.ModuleList, nn.ModuleDict)
        inner = [module for module in model.modules() if any(True for _ in module.parameters())]
        inner = [module for module in inner if module is not model and not isinstance(module, lists)]
    for module in reversed(inner):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return len(inner)


def check_sharded(case: Case, mesh: DeviceMesh, *, per_module: bool) -> None:
    model, batch = case.model(), labeled_batch(case)
    expected = gradients(model, expected_loss := scalar_loss(case, model, batch))
    sharded = case.model()
    count = shard(sharded, mesh, per_module=per_module)
    assert all(type(weight).__name__ == "DTensor" for weight in sharded.parameters())
    loss = scalar_loss(case, sharded, batch)
    assert_close(loss, expected_loss, f"{case}, {count} modules sharded")
    loss.backward()
    grads = {name: weight.grad for name, weight in sharded.named_parameters()}
    full_gradients = {name: expected[name] * 0 if grad is None else grad.full_tensor() for name, grad in grads.items()}
    assert_same_gradients(full_gradients, expected)


@pytest.mark.fast_families("bert", "t5", "elmo")
@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@as_subtests(REPRESENTATIVES)
def test_losses_and_gradients_with_sharded_layers(case: Case, mesh: DeviceMesh) -> None:
    check_sharded(case, mesh, per_module=False)


@pytest.mark.parametrize("optimizer", ["adamw:scale_by_size=true", "sgd", "asgd", "adagrad"])
def test_optimizers_of_sharded_weights(optimizer: str, mesh: DeviceMesh) -> None:
    """Three steps; adafactor and lamb do not support sharded weights and raise."""
    case = next(case for case in REPRESENTATIVES if case.family.name == "bert")
    options = LoopArguments(output_dir="none", learning_rate=0.01, max_steps=3, optimizer=optimizer)
    results = []
    for is_sharded in (False, True):
        model = case.model()
        if is_sharded:
            shard(model, mesh, per_module=False)
        updates = make_optimizer(model, options)
        for _ in range(3):
            scalar_loss(case, model, labeled_batch(case)).backward()
            updates.step()
            updates.zero_grad()
        weights = model.named_parameters()
        results.append({name: weight.full_tensor() if is_sharded else weight.detach() for name, weight in weights})
    for name, weight in results[0].items():
        assert_close(results[1][name], weight, name)
    for name in ("adafactor", "lamb", "muon"):
        with pytest.raises(CtxError, match=f"{name} cannot update weights that are sharded"):
            require_sharded_updates(LoopArguments(output_dir="none", optimizer=name).optimizer)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@as_subtests([c for c in REPRESENTATIVES if c.family.name in FINE_GRAINED and not c.model_class._tied_weights_keys])
def test_losses_and_gradients_with_sharded_modules(case: Case, mesh: DeviceMesh) -> None:
    check_sharded(case, mesh, per_module=True)
