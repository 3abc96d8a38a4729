"""Outputs and gradients, compared."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zoo.cases import Batch, Case

NOT_LEARNED = (
    "mask_embedding",  # of a second stream, which the common suite does not run; tests/models/test_xlnet.py does
    "qa_outputs.bias",  # shifts the scores of all places alike, of which a softmax takes no notice
)


def tensors_of(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model output by name, without hidden states, attention weights and integer fields."""
    return {name: value for name, value in outputs.items() if torch.is_tensor(value) and value.is_floating_point()}


def at_tokens(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Per-token outputs (batch, length, ...) at tokens; other outputs as they are."""
    if mask is None or tensor.shape[: mask.dim()] != mask.shape:
        return tensor
    return tensor[mask.bool()]


def assert_same_outputs(
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    mask: Tensor | None = None,
    tolerance: float = 1e-5,
    where: str = "",
) -> None:
    """Equal tensors under the names `expected` has, compared at tokens; `where` says of what in the message."""
    wanted = tensors_of(expected)
    assert wanted, "nothing to compare"
    found = tensors_of(got)
    for name, value in wanted.items():
        assert name in found, f"{where}: no {name} in the output, only {sorted(found)}"
        assert_close(at_tokens(found[name], mask), at_tokens(value, mask), f"{name} {where}", tolerance)


def assert_close(got: Tensor, expected: Tensor, name: str = "values", tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{name}: {message}")


def objective(case: Case, model: PreTrainedModel, batch: Batch, **kwargs: Any) -> Tensor:
    """A number to differentiate: that of `objective_of` for the outputs."""
    return objective_of(case, model(**batch, **kwargs), batch)


def objective_of(case: Case, outputs: Any, batch: Batch) -> Tensor:
    """The loss, or for the base model a fixed weighting of its outputs at tokens."""
    if not case.is_base:
        return outputs.loss
    total = torch.zeros(())
    for name, value in tensors_of(outputs).items():
        value = at_tokens(value, batch.get("attention_mask"))
        generator = torch.Generator().manual_seed(len(name))
        total = total + (value.float() * torch.randn(value.shape, generator=generator)).mean()
    return total


def gradients(model: PreTrainedModel, number: Tensor) -> dict[str, Tensor]:
    """d number / d parameter for every parameter; zeros where nothing arrives."""
    model.zero_grad(set_to_none=True)
    number.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def assert_same_gradients(
    got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5, where: str = ""
) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(got[name], value, f"gradient of {name} {where}", tolerance)


def assert_every_parameter_learns(model: PreTrainedModel, found: dict[str, Tensor], where: str = "") -> None:
    """A parameter without any gradient is a part of the model that is not trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith(NOT_LEARNED):
            assert found[name].any(), f"{name} gets no gradient {where}"


def assert_same_weights(got: PreTrainedModel, expected: PreTrainedModel) -> None:
    """The same names, and under each the same numbers bit for bit."""
    found, wanted = got.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
