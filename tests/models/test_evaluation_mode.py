"""What runs in evaluation mode leaves every module in the mode that it had."""

import pytest
import torch
from torch import nn

from hf_ctxmodels.core.model_modes import evaluation_mode


def test_without_dropout_and_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    inputs = torch.randn(3, 4)
    with evaluation_mode(model):
        outputs = model(inputs)
    assert model[1].training
    assert torch.equal(outputs, model[0](inputs))
    assert not outputs.requires_grad


def test_every_module_has_its_own_mode_again_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))
    model[1].eval()  # as a frozen part of a model in training
    with pytest.raises(RuntimeError), evaluation_mode(model):
        model(torch.ones(1, 5))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert torch.is_grad_enabled()
