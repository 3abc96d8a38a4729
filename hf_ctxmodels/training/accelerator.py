"""The device, precision and processes of a training run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
    str_to_bool,
)
from torch import nn

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.devices import Dtype, select_device
from hf_ctxmodels.core.errors import CtxError, require_packages
from hf_ctxmodels.training.arguments import LambOptions, LoopArguments
from hf_ctxmodels.training.deepspeed_state import require_zero_stage
from hf_ctxmodels.training.distributed import (
    check_shared_directory,
    detect_lost_processes,
    inactive_parallelism_warnings,
    require_configured_backend,
)

_MIXED_PRECISIONS: dict[Dtype, str] = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
"""Data type of the forward pass -> accelerate's name."""
_AMPERE = (8, 0)  # the first compute capability with bfloat16 and TF32
_CUBLAS_VARIABLE, _CUBLAS_VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def choose_mixed_precision(
    device_type: str, capability: tuple[int, int] | None, dtype: Dtype | None, launched: str | None
) -> str:
    """accelerate's name of the precision of a run's forward pass; the weights are float32.

    Args:
        device_type: "cuda", "cpu" or another type of `torch.device`.
        capability: Compute capability of a CUDA device.
        dtype: `--dtype`, which has precedence.
        launched: Setting of `accelerate launch`; None if the run was not launched by it.

    Returns:
        By default "bf16" on a CUDA device of capability 8.0 or higher, else "no".

    Raises:
        CtxError: float16, which needs loss scaling, is requested on the CPU.
    """
    chosen = launched if dtype is None else _MIXED_PRECISIONS[dtype]
    if chosen is None:
        has_bfloat16 = device_type == "cuda" and capability is not None and capability >= _AMPERE
        return "bf16" if has_bfloat16 else "no"
    if chosen == "fp16" and device_type == "cpu":
        raise CtxError(
            "Training in float16 needs a GPU.",
            location="accelerate launch --mixed_precision fp16" if dtype is None else f"--dtype {dtype}",
            hint="use bfloat16 or float32.",
        )
    return chosen


def make_accelerator(arguments: LoopArguments, *, unused_parameters: bool = False) -> Accelerator:
    """The Accelerator of a run, to be created before data and model; seeds the global generators, and sets torch's
    precision of float32 products on a GPU, and its deterministic algorithms until the end of `restore_determinism`.

    Prints a warning if parallelism that `accelerate launch` configured is not active; raises CtxError if DeepSpeed, the
    optimizer or the tracker is not installed, the stage of ZeRO is not supported, the device does not support the
    precision or the determinism, or the processes do not share the output directory. With `unused_parameters` a step
    may leave parameters without gradients, such as the heads of other tasks.
    """
    require_configured_backend()
    if arguments.report_to != "none":
        require_packages(arguments.report_to, extra="trackers", location=f"--report_to {arguments.report_to}")
    if isinstance(arguments.optimizer, LambOptions):
        require_packages("pytorch_optimizer", extra="lamb", location="--optimizer lamb")
    if arguments.deterministic:
        use_deterministic_algorithms()
    device = _select_process_device(arguments.device)
    is_cuda = device.type == "cuda"
    mixed_precision = choose_mixed_precision(
        device.type,
        torch.cuda.get_device_capability(device) if is_cuda else None,
        arguments.dtype,
        os.environ.get("ACCELERATE_MIXED_PRECISION"),
    )
    if is_cuda:
        torch.set_float32_matmul_precision("high")  # TF32; without effect on GPUs that lack it
    if AcceleratorState._shared_state.get("_mixed_precision", mixed_precision) != mixed_precision:
        AcceleratorState._reset_state()  # of an earlier run in this process
    handlers: list[Any] = [InitProcessGroupKwargs(timeout=timedelta(minutes=arguments.timeout))]
    if unused_parameters:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(
        # without it, accelerate does not connect the processes of a machine without GPU
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision,
        log_with=None if arguments.report_to == "none" else arguments.report_to,
        project_config=ProjectConfiguration(arguments.output_dir, logging_dir=f"{arguments.output_dir}/tensorboard"),
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
        rng_types=[],
        kwargs_handlers=handlers,
    )
    if accelerator.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate shards on accelerators only; torch also shards on CPUs
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        require_zero_stage(accelerator)
    _require_no_accumulation(accelerator)
    for line in inactive_parallelism_warnings(
        accelerator.distributed_type, accelerator.num_processes, accelerator.device.type
    ):
        print_status(line, accelerator.is_main_process)
    if accelerator.num_processes > 1:
        with detect_lost_processes(accelerator.num_processes):
            check_shared_directory(accelerator, Path(arguments.output_dir))
    if arguments.is_finetuning:
        load_weights_in_all_processes(accelerator)
    set_seed(arguments.seed)
    return accelerator


def _require_no_accumulation(accelerator: Accelerator) -> None:
    """Raise CtxError if accelerate or DeepSpeed is configured to accumulate gradients, which the loop does itself."""
    steps = accelerator.gradient_accumulation_steps
    if accelerator.distributed_type == DistributedType.DEEPSPEED and steps == 1:
        configured = accelerator.state.deepspeed_plugin.deepspeed_config.get("gradient_accumulation_steps", 1)
        steps = 1 if configured == "auto" else configured
    if steps != 1:
        raise CtxError(
            f"{steps} gradient accumulation steps are configured, by which the gradients would be divided again.",
            location="accelerate launch",
            hint=f"set gradient_accumulation_steps to 1 there, and pass --gradient_accumulation_steps {steps} to the "
            "command.",
        )


def unwrap_model(accelerator: Accelerator, model: nn.Module) -> Any:
    """The model that `accelerator.prepare` has wrapped, also for `accelerate launch --dynamo_backend`, whose module
    prefixes the names of all weights."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def receives_weights(accelerator: Accelerator) -> bool:
    """Whether this process receives its shards of the weights from the main process, and needs none to start with: all
    others under FSDP with accelerate's `fsdp_cpu_ram_efficient_loading`."""
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    plugin = accelerator.state.fsdp_plugin if is_fsdp else None
    return plugin is not None and bool(plugin.cpu_ram_efficient_loading) and not accelerator.is_main_process


def load_weights_in_all_processes(accelerator: Accelerator) -> None:
    """Disable `fsdp_cpu_ram_efficient_loading`, for methods that read or change weights before they are sharded."""
    if accelerator.distributed_type == DistributedType.FSDP:
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # read by `from_pretrained`


def _select_process_device(name: str | None) -> torch.device:
    """`select_device`, made the current device; of several processes each has its own, by accelerate."""
    if name is None and str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "false")):
        return torch.device("cpu")
    device = select_device(name)
    if device.index is None:
        return device
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CtxError(
            "Several processes would train on the same device.",
            location=f"accelerate launch with --device {name}",
            hint=f"use --device {device.type}, and select devices by `accelerate launch --gpu_ids`.",
        )
    torch.accelerator.set_device_index(device)
    return device


def forward_dtype(accelerator: Accelerator) -> Dtype | None:
    """Data type of the forward pass of a run; None if it is none of `Dtype`."""
    return next((dtype for dtype, name in _MIXED_PRECISIONS.items() if name == accelerator.mixed_precision), None)


def describe_device(accelerator: Accelerator) -> str:
    """Device and precision of a run: "cuda, bfloat16 autocast"."""
    device, precision = accelerator.device, forward_dtype(accelerator) or accelerator.mixed_precision
    if precision != "float32":
        return f"{device}, {precision} autocast"
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _AMPERE
    return f"{device}, float32{' with TF32' if has_tf32 else ''}"


def use_deterministic_algorithms() -> None:
    """Make torch use deterministic algorithms in this process; an operation that has none raises RuntimeError.

    Raises:
        CtxError: cuBLAS has another workspace, or was initialized without one.
    """
    value = os.environ.get(_CUBLAS_VARIABLE)
    is_too_late = value is None and torch.cuda.is_available() and torch.cuda.is_initialized()
    if is_too_late or value not in (None, *_CUBLAS_VALUES):
        raise CtxError(
            f"cuBLAS is not deterministic with {_CUBLAS_VARIABLE}={value or ''}"
            + (", which has no effect after the first use of the GPU." if is_too_late else "."),
            location="--deterministic",
            hint=f"set {_CUBLAS_VARIABLE}={_CUBLAS_VALUES[0]} before the program starts.",
        )
    os.environ[_CUBLAS_VARIABLE] = value or _CUBLAS_VALUES[0]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


@contextmanager
def restore_determinism() -> Iterator[None]:
    """Restore at the end what `use_deterministic_algorithms` changes, except for the variable of cuBLAS, which is read
    only at the first use of the GPU."""
    cudnn = torch.backends.cudnn
    mode = torch.get_deterministic_debug_mode()  # 0: off, 1: warnings, 2: errors
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
        if torch.get_deterministic_debug_mode() != mode:  # the next line imports torch's compiler
            torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
