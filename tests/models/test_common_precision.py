"""Every family in bfloat16: close to single precision, by every path."""

import torch
from torch import Tensor
from zoo import (
    SIDES,
    Case,
    assert_close,
    at_tokens,
    by_path,
    gradients,
    make_batch,
    make_targets,
    objective,
    tensors_of,
)


class TestPrecision:
    def test_bfloat16_weights_are_close(self, network_case: Case) -> None:
        """By every path, to single precision and to the formula in half precision."""
        whole = network_case.model(initializer_range=0.02)
        models = {
            path: model.to(torch.bfloat16) for path, model in by_path(network_case, initializer_range=0.02).items()
        }
        for side in SIDES:
            batch = make_batch(network_case, side=side)
            exact = tensors_of(whole(**batch))
            found = {path: tensors_of(model(**batch)) for path, model in models.items()}
            for path, name in [(path, name) for path in found for name in exact]:
                got, where = found[path][name], f"{name} by the {path} path, padding at the {side}"
                assert got.dtype is torch.bfloat16
                _assert_roughly(got, exact[name], batch["attention_mask"], where)
                _assert_roughly(got, found["eager"][name], batch["attention_mask"], f"{where}, of the formula")

    def test_bfloat16_autocast_is_close(self, network_or_archetype_case: Case) -> None:
        batch = make_batch(network_or_archetype_case)
        batch |= make_targets(network_or_archetype_case, batch)
        model = network_or_archetype_case.model(initializer_range=0.02)
        expected = objective(network_or_archetype_case, model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            got = objective(network_or_archetype_case, model, batch)
        assert got.dtype is torch.float32
        assert_close(got, expected, "loss", tolerance=0.03)
        expected, got = gradients(model, expected), gradients(model, got)
        rough = network_or_archetype_case.has_consistency_loss or network_or_archetype_case.uses_max_pooling
        for name in expected:
            assert got[name].dtype is torch.float32
            _assert_roughly(got[name], expected[name], None, name, share=0.25 if rough else 0.1)


def _assert_roughly(got: Tensor, expected: Tensor, mask: Tensor | None, name: str, share: float = 0.05) -> None:
    """Within a share of the expected values' own size (bfloat16 has 8 bits), or nearly zero like them."""
    got, expected = at_tokens(got, mask).float(), at_tokens(expected, mask).float()
    error, size = (got - expected).norm(), expected.norm()
    assert error <= share * size + 1e-3, f"{name}: off by {float(error / size):.1%}"
