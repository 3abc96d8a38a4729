"""Devices: the flags of all commands that run a model, and moving models."""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.weights import is_quantized

Dtype = Literal["float32", "bfloat16", "float16"]
Model = TypeVar("Model", bound=nn.Module)
meta_autocast: ContextVar[torch.dtype | None] = ContextVar("meta_autocast", default=None)
"""Data type of the emulated autocast on the meta device."""


@dataclass(kw_only=True)
class DeviceArguments:
    """Device.

    Raises:
        CtxError: There is no such device.
    """

    device: str | None = flag(
        None, "cpu, cuda, cuda:1, mps or xpu; by default the GPU if there is one.", group="device"
    )
    dtype: Dtype | None = flag(None, "Data type of the weights; by default as saved.", group="device")

    def __post_init__(self) -> None:
        select_device(self.device)

    def place(self, model: Model) -> Model:
        """Move a model to the device of the flags, and convert its weights to `dtype`; see `place_model`."""
        return place_model(model, self.device, self.dtype)

    def place_for_inference(self, model: Model) -> None:
        """`place` a model, and prepare its weights if it is a model of this package."""
        self.place(model)
        if hasattr(model, "prepare_for_inference"):
            model.prepare_for_inference()  # type: ignore[operator]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Data type of the active autocast of a device type; None without autocast. On the meta device, for which torch has
    none, it is emulated, see `meta_autocast`."""
    if device_type == "meta":
        return meta_autocast.get()
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Context that disables the autocast of a device type."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def to_float64(tensor: Tensor) -> Tensor:
    """The values in float64; on the CPU if the device has no such numbers, as Apple's GPUs (mps)."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def has_float64(device: torch.device) -> bool:
    """Whether tensors on a device can be float64."""
    return device.type != "mps"


def select_device(name: str | torch.device | None = None) -> torch.device:
    """Return the device `name`; by default CUDA, else another accelerator such as mps, else the CPU.

    The device is not initialized.

    Raises:
        CtxError: There is no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if torch.cuda.is_available():
        accelerator = torch.device("cuda")
    if name is None:
        return accelerator or torch.device("cpu")
    names = ["cpu"]
    if accelerator is not None:
        count = torch.get_device_module(accelerator).device_count()
        names += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    if str(name) not in names:
        raise CtxError(
            f"There is no device {name}.", location=f"--device {name}", hint=f"use one of: {', '.join(names)}."
        )
    return torch.device(name)


def place_model(model: Model, device: str | torch.device | None = None, dtype: Dtype | None = None) -> Model:
    """Move a model to a device, by default `select_device()`, and convert its weights to a data type, if there is one.

    A quantized model keeps its data types, and by default its device if other packages quantized it.

    Raises:
        CtxError: There is no such device, or a quantized model cannot be converted or moved there.
    """
    modules = [module for module in model.modules() if getattr(module, "has_quantized_weights", False)]
    if dtype is not None and is_quantized(model):
        raise CtxError("A quantized model keeps its data types.", location=f"--dtype {dtype}", hint="remove --dtype.")
    if device is None and is_quantized(model) and not modules:
        return model
    is_cpu_only = any(getattr(module, "is_cpu_only", False) for module in modules)
    target = torch.device("cpu") if device is None and is_cpu_only else select_device(device)
    if is_cpu_only and target.type != "cpu":
        raise CtxError("An int8 model runs on the CPU only.", location=f"--device {device}", hint="use --device cpu.")
    return model.to(target, None if dtype is None else getattr(torch, dtype))
