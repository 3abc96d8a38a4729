"""Averaged weights, and learning rates scaled by the number of targets."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_ctxmodels import CtxError
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.optimizers import NEVER, Averaging, make_optimizer, scaled_learning_rate


def setup(optimizer: str, patience: int = 0, **more: Any) -> tuple[nn.Linear, torch.optim.Optimizer, Averaging]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    options = {"learning_rate": 0.1, "eval_steps": 1, **more}
    optimizer = f"{optimizer}:weight_decay=0" + (f",patience={patience}" if patience else "")
    arguments = LoopArguments(output_dir="unused", max_steps=10, optimizer=optimizer, **options)
    made = make_optimizer(model, arguments)
    return model, made, Averaging(made, arguments, True)


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int, factor: float = 1.0) -> list[torch.Tensor]:
    """The weight after each step."""
    seen = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        with scaled_learning_rate(optimizer, factor):
            optimizer.step()
        seen.append(model.weight.detach().clone())
    return seen


def test_mean_of_all_steps() -> None:
    model, optimizer, averaging = setup("asgd")
    seen = train(model, optimizer, 6)
    with averaging.applied():
        torch.testing.assert_close(model.weight.detach(), torch.stack(seen).mean(0))
        assert not torch.equal(model.weight, seen[-1])
    assert torch.equal(model.weight, seen[-1])
    averaging.swap()
    assert not torch.equal(model.weight, seen[-1])


def test_start_of_nt_asgd() -> None:
    """Algorithm 1 of Merity et al. 2017: an evaluation before the last two is better."""
    model, optimizer, averaging = setup("nt-asgd", patience=2)
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.6, 2.4], start=1):
        seen = train(model, optimizer, 1)
        averaging.observe(step, {"eval_loss": loss})
        assert averaging.state_dict()["begun"] == (NEVER if step < 5 else 4)
        with averaging.applied():
            assert torch.equal(model.weight, seen[-1]), "averages before their time"
    seen = train(model, optimizer, 4)
    averaging.observe(9, {"eval_loss": 9.0})
    assert averaging.state_dict()["begun"] == 4
    averaging.swap()
    torch.testing.assert_close(model.weight.detach(), torch.stack(seen).mean(0))


def test_state_dict() -> None:
    _, _, averaging = setup("nt-asgd", patience=1)
    for step, loss in enumerate([2.0, 3.0, 3.0], start=1):
        averaging.observe(step, {"eval_loss": loss})
    _, optimizer, again = setup("nt-asgd", patience=1)
    again.load_state_dict(averaging.state_dict())
    assert again.state_dict() == averaging.state_dict()
    assert optimizer.param_groups[0]["t0"] == 2
    again.observe(5, {"eval_loss": 9.0})
    assert optimizer.param_groups[0]["t0"] == 2


@pytest.mark.parametrize("optimizer", ["sgd", "asgd", "nt-asgd"])
def test_scaled_learning_rate(optimizer: str) -> None:
    """Half the targets, half the step; also in the second step, where ASGD would use the rate of the first."""
    for factors in ((1.0, 0.5), (0.5, 1.0)):
        model, made, _ = setup(optimizer)
        plain, plain_optimizer, _ = setup("sgd")
        for factor in factors:
            torch.manual_seed(int(10 * factor))
            train(model, made, 1, factor)
            plain_optimizer.param_groups[0]["lr"] = plain_optimizer.param_groups[1]["lr"] = 0.1 * factor
            torch.manual_seed(int(10 * factor))
            train(plain, plain_optimizer, 1)
            torch.testing.assert_close(model.weight, plain.weight)
        assert made.param_groups[0]["lr"] == 0.1


def test_errors() -> None:
    with pytest.raises(CtxError, match="eval_steps"):
        setup("nt-asgd", eval_steps=0)
    _, optimizer, _ = setup("nt-asgd")
    arguments = LoopArguments(output_dir="unused", max_steps=1, optimizer="nt-asgd", eval_steps=1)
    with pytest.raises(CtxError, match="no validation data"):
        Averaging(optimizer, arguments, False)
    assert math.isfinite(NEVER)
