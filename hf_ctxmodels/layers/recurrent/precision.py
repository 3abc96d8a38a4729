"""The precision of a recurrence."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def precision_of(packed: Tensor) -> tuple[torch.dtype, AbstractContextManager[None]]:
    """The dtype of a layer on this input, and a context in which autocast changes nothing more.

    Without autocast the context does nothing: an exported program cannot be written with a context of autocast in it.
    """
    device = packed.device.type
    if not torch.is_autocast_enabled(device):
        return packed.dtype, nullcontext()
    return torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)
