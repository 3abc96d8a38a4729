"""Whether a model is quantized."""

from torch import nn


def is_quantized(model: nn.Module) -> bool:
    """Whether a model is quantized by this package (a module sets `has_quantized_weights`) or by another one."""
    holds_codes = any(getattr(module, "has_quantized_weights", False) for module in model.modules())
    return holds_codes or bool(getattr(model, "is_quantized", False))
