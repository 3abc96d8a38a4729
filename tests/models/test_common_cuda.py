"""Losses and gradients on a CUDA device equal those on the CPU."""

import pytest
import torch
from zoo import Case, make_batch, make_targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)],  # float32 uses padded attention, bfloat16 the varlen kernel
    ids=["float32", "bfloat16"],
)
def test_loss_and_gradients(archetype_case: Case, dtype: torch.dtype, tolerance: float) -> None:
    batch = make_batch(archetype_case)
    batch |= make_targets(archetype_case, batch)
    model = archetype_case.model()
    expected = model(**batch).loss
    expected.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    model.to("cuda", dtype)
    moved = {name: tensor.to("cuda") for name, tensor in batch.items()}
    loss = model(**moved).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    got = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).float().cpu()
    assert (got - gradient).norm() < tolerance * gradient.norm()
