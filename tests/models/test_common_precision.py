"""All families in bfloat16: close to float32, on all attention paths.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

import torch
from torch import Tensor
from zoo import (
    SIDES,
    Case,
    assert_close,
    gradients,
    labeled_batch,
    make_batch,
    models_by_path,
    scalar_loss,
    select_non_padding,
    tensors_of,
)


class TestPrecision:
    def test_bfloat16_outputs_are_close_to_float32(self, network_case: Case) -> None:
        """Outputs of all paths are close to float32, and to eager attention in bfloat16."""
        float32_model = network_case.model(initializer_range=0.02)
        models = {
            path: model.to(torch.bfloat16)
            for path, model in models_by_path(network_case, initializer_range=0.02).items()
        }
        for side in SIDES:
            batch = make_batch(network_case, side=side)
            expected = tensors_of(float32_model(**batch))
            outputs = {path: tensors_of(model(**batch)) for path, model in models.items()}
            for path, name in [(path, name) for path in outputs for name in expected]:
                actual, where = outputs[path][name], f"{name} by the {path} path, padding at the {side}"
                assert actual.dtype is torch.bfloat16
                _assert_close_in_norm(actual, expected[name], batch["attention_mask"], where)
                _assert_close_in_norm(
                    actual, outputs["eager"][name], batch["attention_mask"], f"{where}, compared with eager attention"
                )

    def test_bfloat16_autocast_is_close_to_float32(self, trained_case: Case) -> None:
        batch = labeled_batch(trained_case)
        model = trained_case.model(initializer_range=0.02)
        expected = scalar_loss(trained_case, model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            actual = scalar_loss(trained_case, model, batch)
        assert actual.dtype is torch.float32
        assert_close(actual, expected, "loss", tolerance=0.03)
        expected, actual = gradients(model, expected), gradients(model, actual)
        is_noisy = trained_case.has_consistency_loss or trained_case.uses_max_pooling
        for name in expected:
            assert actual[name].dtype is torch.float32
            _assert_close_in_norm(actual[name], expected[name], None, name, rtol=0.25 if is_noisy else 0.1)


def _assert_close_in_norm(actual: Tensor, expected: Tensor, mask: Tensor | None, name: str, rtol: float = 0.05) -> None:
    """The relative error in norm is at most `rtol` (bfloat16 has 8 bits of precision), plus a small absolute error."""
    actual, expected = select_non_padding(actual, mask).float(), select_non_padding(expected, mask).float()
    error, norm = (actual - expected).norm(), expected.norm()
    assert error <= rtol * norm + 1e-3, f"{name}: off by {float(error / norm):.1%}"
