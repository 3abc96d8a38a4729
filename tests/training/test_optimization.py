"""Optimizers and schedules against their papers' formulas, averaged weights, and scaled learning rates."""

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers.utils import ModelOutput

from hf_ctxmodels import CtxError, CtxWord2VecConfig, CtxWord2VecModel
from hf_ctxmodels.training.arguments import (
    AdafactorOptions,
    AdaGradOptions,
    AdamWOptions,
    LambOptions,
    LoopArguments,
    MuonOptions,
)
from hf_ctxmodels.training.optimizers import NEVER, Averaging, make_optimizer, make_scheduler, scaled_learning_rate
from hf_ctxmodels.training.training_step import TrainingStep


@pytest.mark.parametrize("sparse", [False, True])
def test_scaled_gradients_are_clipped_by_their_size(sparse, monkeypatch):
    """Loss scaling for float16 changes neither the norm of gradients nor the clipped update."""
    monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))
    weights, norms = [], []
    for scale in (1.0, 1024.0):
        accelerator = Accelerator(cpu=True)
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
        model = nn.Embedding(5, 3, sparse=sparse)
        nn.init.ones_(model.weight)
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=accelerator.scaler)
        accelerator._optimizers = [optimizer]
        step = TrainingStep(accelerator, model, optimizer, max_grad_norm=0.5, loss_function=SumOfVectors())
        scalars, _ = step([{"input_ids": torch.tensor([[1, 2, 2]]), "example_index": torch.tensor([0])}])
        norms.append(float(scalars["grad_norm"]))
        weights.append(model.weight.detach())
    assert norms == pytest.approx([math.sqrt(3 + 12)] * 2)
    torch.testing.assert_close(*weights)
    assert (weights[0] - 1).norm().item() == pytest.approx(0.1 * 0.5, rel=1e-4)


class SumOfVectors:
    """A loss without targets."""

    targets = ()

    def __call__(self, model, batch, num_items_in_batch):
        return ModelOutput(loss=model(batch["input_ids"]).sum())


def learning_rates(steps: int = 101, **options: object) -> list[float]:
    """The learning rates of a run of 100 steps."""
    arguments = LoopArguments(output_dir="x", max_steps=100, warmup_steps=0.1, **options)
    optimizer = make_optimizer(nn.Linear(2, 2), arguments)
    scheduler = make_scheduler(optimizer, arguments, 100)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def trained_steps(model: nn.Module, learning_rate: float, options: object) -> Iterator[int]:
    """Train an embedding for four steps; yields each step number after the step."""
    arguments = LoopArguments("x", max_steps=1, learning_rate=learning_rate, optimizer=options)
    optimizer = make_optimizer(model, arguments)
    for step in range(1, 5):
        model.zero_grad()
        model(torch.randint(model[0].num_embeddings, (16,))).square().mul(torch.randn(16, 4)).sum().backward()
        optimizer.step()
        yield step


def test_linear_schedule():
    rates = learning_rates(learning_rate=1.0)
    assert rates[:11] == pytest.approx([step / 10 for step in range(11)])
    assert [rates[55], rates[100]] == pytest.approx([0.5, 0.0])


def test_cosine_schedule():
    rates = learning_rates(learning_rate=2.0, lr_scheduler="cosine:min_rate=0.1")
    assert rates[10] == max(rates) == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.1)
    assert rates[100] == min(rates[10:]) == pytest.approx(0.2)


def test_lamb():
    """Algorithm 2 of You et al. 2020 without bias correction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3000, 64), nn.Linear(64, 4), nn.LayerNorm(4))
    nn.init.zeros_(model[1].weight)  # a norm of zero has a trust ratio of one
    rate, decay, beta1, beta2, epsilon = 0.02, 0.1, 0.9, 0.99, 1e-6
    assert model[0].weight.norm() > 10
    options = LambOptions(weight_decay=decay, beta2=beta2)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in expected.items()}
    for _ in trained_steps(model, rate, options):
        for name, parameter in model.named_parameters():
            x, g = expected[name], parameter.grad
            first, second = moments[name]
            first.copy_(beta1 * first + (1 - beta1) * g)
            second.copy_(beta2 * second + (1 - beta2) * g * g)
            update = first / (second.sqrt() + epsilon)
            if x.ndim == 2:
                update = update + decay * x
                norms = x.norm(), update.norm()
                update = update * (norms[0] / norms[1] if all(norms) else 1.0)
            x -= rate * update
            torch.testing.assert_close(parameter.detach(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_adafactor(scaled):
    """Algorithm 4 of Shazeer & Stern 2018 with the rate of the schedule, and decoupled weight decay; scaled, the rate
    is relative to the size of the parameter (section 8), as T5 was trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    rate, decay, tiny = 0.02, 0.1, 1e-30
    options = AdafactorOptions(weight_decay=decay, scale_by_size=scaled)
    expected = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    moments = {name: [torch.zeros_like(x.mean(-1)), torch.zeros_like(x.mean(0)), 0 * x] for name, x in expected.items()}
    for step in trained_steps(model, rate, options):
        for name, parameter in model.named_parameters():
            x, g = expected[name], parameter.grad.double()
            beta = 1 - step**-0.8
            means = ((g**2 + tiny).mean(-1), (g**2 + tiny).mean(0), g**2 + tiny)
            moments[name] = [beta * old + (1 - beta) * new for old, new in zip(moments[name], means, strict=True)]
            rows, columns, full = moments[name]
            second = rows[:, None] * columns / rows.mean() if x.ndim == 2 else full
            update = g / second.sqrt()
            update = update / max(1.0, float((update**2).mean().sqrt()))
            size = max(1e-3, float((x**2).mean().sqrt())) if scaled else 1.0
            x -= rate * size * (update + (decay * x if x.ndim == 2 else 0))
            torch.testing.assert_close(parameter.detach().double(), x, rtol=1e-4, atol=1e-6)


def test_scaled_adamw():
    """Algorithm 2 of Loshchilov & Hutter 2019, element by element; a parameter of zeros moves as one of size 1e-3."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    model[0].weight.data.mul_(50)
    rate, decay, beta1, beta2, epsilon = 0.02, 0.1, 0.8, 0.95, 1e-6
    options = AdamWOptions(weight_decay=decay, beta1=beta1, beta2=beta2, scale_by_size=True)
    expected = {name: parameter.detach().double().flatten().tolist() for name, parameter in model.named_parameters()}
    moments = {name: [[0.0] * len(x), [0.0] * len(x)] for name, x in expected.items()}
    assert expected["2.bias"] == [0.0] * 4
    for step in trained_steps(model, rate, options):
        for name, parameter in model.named_parameters():
            x, (first, second) = expected[name], moments[name]
            size = max(1e-3, (sum(value**2 for value in x) / len(x)) ** 0.5)
            for index, g in enumerate(parameter.grad.double().flatten().tolist()):
                first[index] = beta1 * first[index] + (1 - beta1) * g
                second[index] = beta2 * second[index] + (1 - beta2) * g * g
                update = first[index] / (1 - beta1**step) / ((second[index] / (1 - beta2**step)) ** 0.5 + epsilon)
                x[index] -= rate * (size * update + (decay * x[index] if parameter.ndim == 2 else 0))
            updated = parameter.detach().double().flatten()
            torch.testing.assert_close(updated, torch.tensor(x).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("separate_head", [False, True])
def test_muon(separate_head):
    """Equations 1 to 4 of Liu et al. 2025 for the linear layers of the stack, and AdamW for all other parameters.

    The iterations are in bfloat16, as in the released code.
    """
    torch.manual_seed(0)
    layer = nn.ModuleDict({"up": nn.Linear(4, 12), "down": nn.Linear(12, 4), "distances": nn.Embedding(3, 2)})
    base = nn.ModuleDict({"embeddings": nn.Embedding(30, 4), "layers": nn.ModuleList([layer])})
    model: Any = nn.ModuleDict({"base": base, "head": nn.Linear(4, 2)})
    model.base_model, model.base_model_prefix = base, "base"
    rate, decay, momentum, beta1, beta2, epsilon = 0.02, 0.1, 0.9, 0.8, 0.95, 1e-6
    options = MuonOptions(weight_decay=decay, momentum=momentum, beta1=beta1, beta2=beta2)
    head_rate = 0.05 if separate_head else None
    arguments = LoopArguments("x", max_steps=1, learning_rate=rate, optimizer=options, head_learning_rate=head_rate)
    optimizer = make_optimizer(model, arguments)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in expected.items()}
    matrices = ("base.layers.0.up.weight", "base.layers.0.down.weight")
    for step in range(1, 5):
        if step == 3:  # a resumed run
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            x, (first, second), g = expected[name], moments[name], parameter.grad.clone()
            step_rate = head_rate if head_rate and name.startswith("head") else rate
            x *= 1 - step_rate * decay * (x.ndim == 2)
            if name in matrices:
                first.copy_(momentum * first + (1 - momentum) * g)
                update = momentum * first + (1 - momentum) * g  # Nesterov
                is_tall = update.shape[0] > update.shape[1]
                update = update.T.bfloat16() if is_tall else update.bfloat16()
                update = update / update.norm()
                for _ in range(5):
                    a, b, c = 3.4445, -4.7750, 2.0315
                    gram = update @ update.T
                    polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
                    update = torch.addmm(update, polynomial, update, beta=a)  # a X + (b A + c A A) X, A = X X^T
                x -= step_rate * 0.2 * max(x.shape) ** 0.5 * (update.T if is_tall else update).float()
            else:
                first.copy_(beta1 * first + (1 - beta1) * g)
                second.copy_(beta2 * second + (1 - beta2) * g * g)
                x -= step_rate * first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + epsilon)
        optimizer.step()
        for name, parameter in model.named_parameters():
            tolerance = 0.02 * rate if name in matrices else 1e-6
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=tolerance)


def test_muon_without_matrices_raises():
    model = CtxWord2VecModel(CtxWord2VecConfig(vocab_size=10, hidden_size=4))
    with pytest.raises(CtxError, match=r"not support CtxWord2VecModel(.|\n)*--optimizer muon"):
        make_optimizer(model, LoopArguments("x", max_steps=1, learning_rate=1.0, optimizer="muon"))


def test_adagrad_with_initial_accumulator():
    """Duchi et al. 2011, with the sum of squares starting above 0 as in the released code of ELMo."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False)
    weight, sums = layer.weight.detach().clone(), torch.full((1, 3), 0.5)
    options = AdaGradOptions(initial_accumulator=0.5)
    optimizer = make_optimizer(layer, LoopArguments("x", max_steps=1, learning_rate=0.2, optimizer=options))
    for _ in range(3):
        gradient = torch.randn(1, 3)
        layer.weight.grad = gradient.clone()
        optimizer.step()
        sums = sums + gradient**2
        weight = weight - 0.2 * gradient / sums.sqrt()
        torch.testing.assert_close(layer.weight.detach(), weight)
    with pytest.raises(CtxError, match="initial_accumulator"):
        AdaGradOptions(initial_accumulator=-1.0)


def test_inverse_square_root_schedule():
    """The rate of T5: 1 / sqrt(max(step, 10000)), whose peak is 0.01."""
    arguments = LoopArguments("x", max_steps=1, learning_rate=0.01, warmup_steps=10_000, lr_scheduler="rsqrt")
    scheduler = make_scheduler(make_optimizer(nn.Linear(2, 2), arguments), arguments, 2**19)
    rate = scheduler.lr_lambdas[0]
    for step in (0, 1, 9_999, 10_000, 10_001, 40_000, 2**19):
        assert 0.01 * rate(step) == pytest.approx(max(step, 10_000) ** -0.5)
    for invalid in ({"warmup_steps": 0, "lr_scheduler": "rsqrt"}, {"optimizer": "lamb:scale_by_size=true"}):
        with pytest.raises(CtxError, match=r"--(lr_scheduler rsqrt|optimizer lamb)"):
            LoopArguments("x", max_steps=1, **invalid)


def test_missing_lamb_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(CtxError, match=r"pytorch_optimizer(.|\n)*--optimizer lamb(.|\n)*pip install"):
        make_optimizer(
            nn.Linear(2, 2), LoopArguments(output_dir="x", max_steps=1, optimizer="lamb", learning_rate=1e-3)
        )


def make_averaging(
    optimizer: str, patience: int = 0, **overrides: Any
) -> tuple[nn.Linear, torch.optim.Optimizer, Averaging]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    options = {"learning_rate": 0.1, "eval_steps": 1, **overrides}
    optimizer = f"{optimizer}:weight_decay=0" + (f",patience={patience}" if patience else "")
    arguments = LoopArguments(output_dir="unused", max_steps=10, optimizer=optimizer, **options)
    averaged_optimizer = make_optimizer(model, arguments)
    return model, averaged_optimizer, Averaging(averaged_optimizer, arguments, True)


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int, factor: float = 1.0) -> list[torch.Tensor]:
    """The weight after each step."""
    weights = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        with scaled_learning_rate(optimizer, factor):
            optimizer.step()
        weights.append(model.weight.detach().clone())
    return weights


def test_asgd_averages_all_steps() -> None:
    model, optimizer, averaging = make_averaging("asgd")
    weights = train(model, optimizer, 6)
    with averaging.applied():
        torch.testing.assert_close(model.weight.detach(), torch.stack(weights).mean(0))
        assert not torch.equal(model.weight, weights[-1])
    assert torch.equal(model.weight, weights[-1])
    averaging.swap()
    assert not torch.equal(model.weight, weights[-1])


def test_nt_asgd_starts_without_improvement() -> None:
    """Algorithm 1 of Merity et al. 2017: averaging starts when an evaluation before the last two was better."""
    model, optimizer, averaging = make_averaging("nt-asgd", patience=2)
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.6, 2.4], start=1):
        weights = train(model, optimizer, 1)
        averaging.observe(step, {"eval_loss": loss})
        assert averaging.state_dict()["begun"] == (NEVER if step < 5 else 4)
        with averaging.applied():
            assert torch.equal(model.weight, weights[-1]), "averaging started too early"
    weights = train(model, optimizer, 4)
    averaging.observe(9, {"eval_loss": 9.0})
    assert averaging.state_dict()["begun"] == 4
    averaging.swap()
    torch.testing.assert_close(model.weight.detach(), torch.stack(weights).mean(0))


def test_averaging_state_dict() -> None:
    _, _, averaging = make_averaging("nt-asgd", patience=1)
    for step, loss in enumerate([2.0, 3.0, 3.0], start=1):
        averaging.observe(step, {"eval_loss": loss})
    _, optimizer, restored = make_averaging("nt-asgd", patience=1)
    restored.load_state_dict(averaging.state_dict())
    assert restored.state_dict() == averaging.state_dict()
    assert optimizer.param_groups[0]["t0"] == 2
    restored.observe(5, {"eval_loss": 9.0})
    assert optimizer.param_groups[0]["t0"] == 2


@pytest.mark.parametrize("optimizer", ["sgd", "asgd", "nt-asgd"])
def test_scaled_learning_rate(optimizer: str) -> None:
    """Half the targets, half the step; also in the second step, where ASGD would use the first step's rate."""
    for factors in ((1.0, 0.5), (0.5, 1.0)):
        model, scaled_optimizer, _ = make_averaging(optimizer)
        sgd_model, sgd_optimizer, _ = make_averaging("sgd")
        for factor in factors:
            torch.manual_seed(int(10 * factor))
            train(model, scaled_optimizer, 1, factor)
            sgd_optimizer.param_groups[0]["lr"] = sgd_optimizer.param_groups[1]["lr"] = 0.1 * factor
            torch.manual_seed(int(10 * factor))
            train(sgd_model, sgd_optimizer, 1)
            torch.testing.assert_close(model.weight, sgd_model.weight)
        assert scaled_optimizer.param_groups[0]["lr"] == 0.1


def test_invalid_averaging_raises() -> None:
    with pytest.raises(CtxError, match="eval_steps"):
        make_averaging("nt-asgd", eval_steps=0)
    _, optimizer, _ = make_averaging("nt-asgd")
    arguments = LoopArguments(output_dir="unused", max_steps=1, optimizer="nt-asgd", eval_steps=1)
    with pytest.raises(CtxError, match="no validation data"):
        Averaging(optimizer, arguments, False)
