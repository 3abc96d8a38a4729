"""Names that modules can have in an `nn.ModuleDict`."""

from torch import nn


def is_valid_module_name(name: object) -> bool:
    """Whether a value is a name without dots that no attribute of an `nn.ModuleDict` has: not `train`."""
    return isinstance(name, str) and "." not in name and not hasattr(nn.ModuleDict(), name)
