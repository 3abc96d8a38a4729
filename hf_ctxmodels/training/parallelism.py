"""What `accelerate launch` was told to do on several processes, and what is done."""

import os

from accelerate.utils import DistributedType, is_deepspeed_available, str_to_bool

from hf_ctxmodels.core.errors import CtxError

_CONFIGURED = {
    "DeepSpeed": ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
    "FSDP": ("ACCELERATE_USE_FSDP", DistributedType.FSDP),
}


def require_configured_backend() -> None:
    """Raise CtxError if `accelerate launch` configured DeepSpeed and it is not installed."""
    if _is_configured("DeepSpeed") and not is_deepspeed_available():
        raise CtxError(
            "DeepSpeed is configured, but it is not installed.",
            location="accelerate launch",
            hint="pip install 'hf_ctxmodels[deepspeed]', or launch with another file, such as fsdp2.yaml.",
        )


def inactive_parallelism_warnings(distributed_type: DistributedType, num_processes: int, device: str) -> list[str]:
    """A line for everything that is configured, through the environment of `accelerate launch`, and not done.

    Args:
        distributed_type: Of the Accelerator or PartialState that was made.
        num_processes: How many processes it joins.
        device: What they compute on, for example "cpu".
    """
    lines = [
        f"warning: {name} is configured but not in force: {num_processes} process{'es' * (num_processes > 1)} on "
        f"{device}, {'with plain data parallelism' if num_processes > 1 else 'no parallelism'}, and nothing is sharded."
        for name, (_, kind) in _CONFIGURED.items()
        if _is_configured(name) and distributed_type != kind
    ]
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > num_processes:
        lines.append(
            f"warning: {started} processes were started, but are not joined: each trains alone on all data. "
            "Without a GPU give TrainingArguments(use_cpu=True), or set ACCELERATE_USE_CPU=true."
        )
    return lines


def _is_configured(name: str) -> bool:
    return bool(str_to_bool(os.environ.get(_CONFIGURED[name][0], "false")))
