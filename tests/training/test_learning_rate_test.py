"""Learning-rate range test: suggestion, restored state, and runs with `auto`."""

import copy
import csv
import json
from itertools import repeat

import numpy as np
import pytest
import torch
from torch import nn
from training_runs import arguments, log_without_speed, new_model, run
from transformers.modeling_outputs import ModelOutput

from hf_ctxmodels import CtxError
from hf_ctxmodels.training import loop
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.learning_rate_test import RANGE_TEST_FILE, RangeTest, learning_rate_range_test
from hf_ctxmodels.training.optimizers import make_optimizer
from hf_ctxmodels.training.random_state import random_state
from hf_ctxmodels.training.training_step import INDEX_KEY, TrainingStep

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class LinearRegression(nn.Module):
    """Linear regression on random inputs of variance h: gradient descent is fastest at the rate 1/h, and diverges above
    2/h."""

    loss_targets = ()

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.variance, self.norm, self.dropout = variance, nn.BatchNorm1d(4, affine=False), nn.Dropout(0.1)
        self.weight = nn.Parameter(torch.zeros(4, 1))

    def forward(self, input_ids, num_items_in_batch=None):
        inputs = torch.randn(64, 4)
        self.norm(self.dropout(inputs))  # changes buffers
        inputs = inputs * self.variance**0.5
        targets = inputs.sum(dim=1, keepdim=True) + 0.2 * self.variance**0.5 * torch.randn(64, 1)
        return ModelOutput(loss=(inputs @ self.weight - targets).square().mean() / 2)


def make_step(tmp_path, model, optimizer):
    options = arguments(tmp_path, learning_rate="auto", optimizer=optimizer, max_grad_norm=0.0)
    accelerator = make_accelerator(options)
    model, prepared = accelerator.prepare(model, make_optimizer(model, options))
    return TrainingStep(accelerator, model, prepared, 0.0)


def batches():
    return ({"input_ids": torch.ones(1, 1), INDEX_KEY: torch.tensor([0])} for _ in repeat(None))


@pytest.mark.parametrize("variance", [1.0, 30.0, 1000.0])
def test_suggestion_is_near_best_rate(tmp_path, variance):
    """Stable, and high enough to converge within a few hundred steps."""
    test = learning_rate_range_test(make_step(tmp_path, LinearRegression(variance), "sgd:weight_decay=0"), batches())
    assert 0.02 / variance < test.suggestion < 1 / variance
    assert len(test.losses) < 100, "stops when the loss diverges"
    test.save(tmp_path)
    rows = list(csv.DictReader((tmp_path / RANGE_TEST_FILE).open()))
    assert [float(row["loss"]) for row in rows] == pytest.approx(test.losses, rel=1e-4)
    assert (tmp_path / "lr_range_test.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "adafactor", "asgd"])
def test_range_test_restores_state(tmp_path, optimizer):
    step = make_step(tmp_path, LinearRegression(1.0), optimizer)
    step([next(batches())])  # initializes the state of the optimizer

    def state():
        optimizer = step.optimizer.optimizer.state_dict()
        tensors = copy.deepcopy([step.model.state_dict(), optimizer["state"]])
        return tensors, json.dumps([optimizer["param_groups"], random_state()])

    tensors, scalars = state()
    learning_rate_range_test(step, batches(), micro_batches=2)
    torch.testing.assert_close(state()[0], tensors, rtol=0, atol=0)
    assert state()[1] == scalars
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_loss_that_never_falls_raises():
    with pytest.raises(CtxError, match=r"falls at none of the 10 learning rates from 1e-06 to 0\.1"):
        _ = RangeTest(np.geomspace(1e-6, 0.1, 10), np.linspace(1, 2, 10)).suggestion


@pytest.mark.slow
def test_auto_run_equals_run_with_suggested_rate(workspace, pretraining_setup, tmp_path, monkeypatch, capsys):
    """Bit for bit, with dropout, accumulation and layerwise rates; a resumed run does not repeat the test."""
    options = {"gradient_accumulation_steps": 2, "layerwise_lr_decay": 2.0, "save_steps": 3}
    model = new_model(workspace, "dropout.json")
    result = run(model, pretraining_setup, arguments(tmp_path / "auto", learning_rate="auto", **options))
    rate = result.arguments.learning_rate
    assert result.curve[0]["learning_rate"] == rate
    summary = result.summary(task="", dataset="", warnings=["The loss did not fall"])
    assert summary.hyperparameters["learning_rate"] == rate
    summary.print_warnings()
    assert "hint: try more steps, or a pretrained --model" in capsys.readouterr().out, "no hint to measure the rate"
    monkeypatch.setattr(loop, "learning_rate_range_test", None)
    model = new_model(workspace, "dropout.json")
    resumed = arguments(tmp_path / "auto", learning_rate="auto", max_steps=6, resume=True, **options)
    assert run(model, pretraining_setup, resumed).arguments.learning_rate == rate
    expected = new_model(workspace, "dropout.json")
    run(expected, pretraining_setup, arguments(tmp_path / "number", learning_rate=rate, max_steps=6, **options))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert log_without_speed(tmp_path / "auto") == log_without_speed(tmp_path / "number")
    assert (tmp_path / "auto" / RANGE_TEST_FILE).exists()
    run(new_model(workspace), pretraining_setup, arguments(tmp_path / "auto", max_steps=1, overwrite=True))
    assert not list((tmp_path / "auto").glob("lr_range_test*"))
    with pytest.raises(CtxError, match="--learning_rate auto --head_learning_rate"):
        arguments(tmp_path, learning_rate="auto", head_learning_rate=0.1)
