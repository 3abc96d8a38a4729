"""Comparison of outputs, gradients and weights, on all paths: combinations of attention implementation and layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels import heads
from zoo.cases import Batch, Case

# Name -> options of the model; the first is the reference: eager attention on padded batches.
PATHS = {
    "eager": {"attention": "eager", "unpad": False},
    "padded": {"attention": "sdpa", "unpad": False},
    "unpadded": {"attention": "sdpa", "unpad": True},
}
SIDES = ("right", "left")
WITHOUT_GRADIENT = (
    "mask_embedding",  # of the query stream, which tests/models/test_xlnet.py covers
    "qa_outputs.bias",  # adds the same number to all scores of a softmax
)


def models_by_path(case: Case, **changes: Any) -> dict[str, PreTrainedModel]:
    """A model for each path; without attention, the padded path equals the eager path and is omitted."""
    paths = {path: options for path, options in PATHS.items() if case.has_attention or path != "padded"}
    return {path: case.model(**options, **changes) for path, options in paths.items()}


def models_by_fast_path(case: Case, **changes: Any) -> dict[str, PreTrainedModel]:
    """The models of all paths except the eager path."""
    models = models_by_path(case, **changes)
    del models["eager"]
    return models


def tensors_of(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model output by name, without hidden states, attention weights and integer fields."""
    return {name: value for name, value in outputs.items() if torch.is_tensor(value) and value.is_floating_point()}


def select_non_padding(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Per-token outputs (batch, length, ...) at tokens -> (tokens, ...); other outputs are returned unchanged."""
    if mask is None or tensor.shape[: mask.dim()] != mask.shape:
        return tensor
    return tensor[mask.bool()]


def assert_same_outputs(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    mask: Tensor | None = None,
    tolerance: float = 1e-5,
    where: str = "",
) -> None:
    """Compare the tensors of `expected` and `actual` at tokens, by name; `where` is added to the message."""
    expected_tensors, tensors = tensors_of(expected), tensors_of(actual)
    assert expected_tensors, "nothing to compare"
    for name, value in expected_tensors.items():
        assert name in tensors, f"{where}: no {name} in the output, only {sorted(tensors)}"
        assert_close(
            select_non_padding(tensors[name], mask), select_non_padding(value, mask), f"{name} {where}", tolerance
        )


def assert_close(actual: Any, expected: Any, name: str = "values", tolerance: float = 1e-5) -> None:
    """Compare tensors, or sequences or mappings of tensors."""
    torch.testing.assert_close(
        actual, expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{name}: {message}"
    )


def scalar_loss(case: Case, model: PreTrainedModel, batch: Batch, **kwargs: Any) -> Tensor:
    """The scalar `scalar_loss_of` the outputs of a forward pass."""
    return scalar_loss_of(case, model(**batch, **kwargs), batch)


def scalar_loss_of(case: Case, outputs: Any, batch: Batch) -> Tensor:
    """The loss of a head; for a base model a fixed weighted mean of its outputs at tokens."""
    if not case.is_base:
        return outputs.loss
    total = torch.zeros(())
    for name, value in tensors_of(outputs).items():
        value = select_non_padding(value, batch.get("attention_mask"))
        generator = torch.Generator().manual_seed(len(name))
        total = total + (value.float() * torch.randn(value.shape, generator=generator)).mean()
    return total


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of `loss` for every parameter; zeros for a parameter without gradient."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5, where: str = ""
) -> None:
    assert_close(actual, expected, f"gradients {where}", tolerance)


def assert_nonzero_gradients(model: PreTrainedModel, parameter_gradients: dict[str, Tensor], where: str = "") -> None:
    """Every trainable parameter has a nonzero gradient, except where the loss does not depend on it."""
    for name, parameter in model.named_parameters():
        # the softmax over choices does not depend on a bias that all scores share; its gradient is rounding error
        is_shared_bias = isinstance(model, heads.ForMultipleChoice) and name.endswith("bias") and parameter.numel() == 1
        if parameter.requires_grad and not name.endswith(WITHOUT_GRADIENT) and not is_shared_bias:
            assert parameter_gradients[name].any(), f"{name} gets no gradient {where}"


def assert_same_weights(actual: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Equal parameters and buffers, bit for bit, under the same names."""
    assert_close(actual.state_dict(), expected.state_dict(), "weights", tolerance=0)


def load_strict(model_class: Any, folder: Path | str, **options: Any) -> Any:
    """The model of a checkpoint, in evaluation mode; fails if a key is missing or unexpected."""
    model, report = model_class.from_pretrained(folder, **options, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()
