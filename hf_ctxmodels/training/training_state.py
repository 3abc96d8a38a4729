"""The complete state of a run: saving, exact restoring, and the identity that a resumed run must have.

The files are safetensors and JSON; under FSDP and DeepSpeed they are sharded, see `sharded_checkpoints`.
`Accelerator.save_state` is not used, because it pickles the optimizer and the random states.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, logging

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flat_options
from hf_ctxmodels.core.loading import describe_differences, read_json
from hf_ctxmodels.core.output_files import wrap_write_errors, write_tensors
from hf_ctxmodels.data.files import describe_content
from hf_ctxmodels.training import checkpoint_files
from hf_ctxmodels.training.accelerator import receives_weights
from hf_ctxmodels.training.arguments import ConstantOptions, LoopArguments, NTASGDOptions
from hf_ctxmodels.training.deepspeed_state import EngineState, full_weight, is_optimized_by_deepspeed
from hf_ctxmodels.training.distributed import new_cpu_group
from hf_ctxmodels.training.optimizers import Averaging
from hf_ctxmodels.training.random_state import random_state, set_random_state
from hf_ctxmodels.training.sharded_checkpoints import (
    MOMENT_SEPARATOR,
    copy_to_cpu,
    is_sharded,
    merge_checkpoint,
    read_shards,
    saved_weights,
    stored_tensors,
    write_shards,
)
from hf_ctxmodels.training.training_log import StepMetrics
from hf_ctxmodels.training.training_step import TrainingStep

FLAGS_THAT_MAY_CHANGE = (
    *("output_dir", "resume", "overwrite", "logging_steps", "report_to"),
    *("save_steps", "save_total_limit", "save_at", "eval_steps", "dataloader_workers", "device", "deterministic"),
    *("compile", "gradient_checkpointing", "timeout"),
)
"""Flags of the loop that do not change the weights."""

# Flags that are compared through derived values: lengths in epochs and in steps may be equal.
_DERIVED_FLAGS = ("max_steps", "num_train_epochs", "per_device_batch_size", "dtype", "warmup_steps")
# Fields of the configuration that do not change the model.
_UNCOMPARED_CONFIG_FIELDS = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    "return_logits_with_labels",
)
_BATCH_SIZES = ("global_micro_batch", "gradient_accumulation_steps")
_FORMER_NAME = "deepspeed"  # an entry of earlier identities, when the format of DeepSpeed's checkpoints differed
_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "trainer_state.json"


def flags_identity(arguments: Any, may_change: Iterable[str], files: Iterable[str] = ()) -> dict[str, Any]:
    """The flags of a dataclass without the fields that `may_change`; the fields `files` name data files, which are
    compared by content."""
    identity, ignored = {}, set(may_change)
    for name, value in flat_options(arguments).items():
        if name in files and value:
            value = [describe_content(file) for file in value] if isinstance(value, list) else describe_content(value)
        if name not in ignored and name.partition(".")[0] not in ignored:
            identity[name] = value
    return identity


def run_identity(
    arguments: LoopArguments, accelerator: Accelerator, total_steps: int, model: PreTrainedModel
) -> dict[str, Any]:
    """Flags of the loop that determine the weights, and the model's class, dtype and configuration, which contains the
    tokenizer's digest.

    The number of steps may change if the learning rate does not depend on it. The number of processes, their batch size
    and the accumulation may change if their product, the global batch size, does not, and so may the kind of
    parallelism.
    """
    may_change = {*FLAGS_THAT_MAY_CHANGE, *_DERIVED_FLAGS}
    if isinstance(arguments.optimizer, NTASGDOptions):  # averaging starts at an evaluation
        may_change.remove("eval_steps")
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {
        **flags_identity(arguments, may_change),
        "warmup_steps": arguments.warmup(total_steps),
        "total_steps": None if isinstance(arguments.lr_scheduler, ConstantOptions) else total_steps,
        "global_micro_batch": arguments.per_device_batch_size * accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "model_class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{f"config.{name}": value for name, value in config.items() if name not in _UNCOMPARED_CONFIG_FIELDS},
    }


def _global_batch_size(identity: Mapping[str, Any]) -> int:
    return math.prod(identity.get(name, 0) for name in _BATCH_SIZES)


def load_weights(
    checkpoint: Path,
    model: PreTrainedModel,
    identity: Mapping[str, Any],
    accelerator: Accelerator,
    fixed_micro_batches: bool = False,
) -> int:
    """Load a checkpoint's weights into the model, before it is wrapped or sharded; returns the checkpoint's step.

    Raises CtxError if the checkpoint belongs to a run with another identity. With `fixed_micro_batches` the examples of
    a step depend on the size of its micro-batches.
    """
    state = _read_state(checkpoint)
    saved = state["identity"]
    names = {*identity, *saved} - {_FORMER_NAME}
    if not fixed_micro_batches and _global_batch_size(identity) == _global_batch_size(saved):
        names -= {*_BATCH_SIZES}  # a step has the same examples
    if differing := describe_differences(identity, saved, sorted(names)):
        raise CtxError(
            f"The checkpoint belongs to another run: {'; '.join(differing)}.",
            location=str(checkpoint),
            hint="resume with the values of that run, or use another --output_dir; to start a new run from these "
            f"weights, pass them as --model. Only {', '.join(FLAGS_THAT_MAY_CHANGE)}, the location of files, "
            "the number of steps at a constant learning rate, and batch sizes with the same product may change.",
        )
    if receives_weights(accelerator):
        return state["step"]
    if hasattr(model, "load_saved_weights"):  # it saves more than one model's weights, or fewer
        model.load_saved_weights(checkpoint)
    elif is_sharded(checkpoint):
        read_shards(checkpoint, saved_weights(model))
    else:
        safetensors.torch.load_model(model, checkpoint / _MODEL_FILE)
    return state["step"]


@dataclass(eq=False, kw_only=True)
class TrainingState:
    """Step, weights, optimizer, schedule, recurrent states and random generators of a run; the position in the data
    follows from the step.

    Args:
        identity: JSON values that must be equal when the run is resumed, see `load_weights`.
        optimizer: The optimizer before `Accelerator.prepare`.
        engine_state: The state of DeepSpeed's engine; None without DeepSpeed.

    Attributes:
        step: Completed optimizer steps.
        tokens: Non-padding tokens of the logged steps.
        metrics: The last evaluation.
        model_class: Name of the class that is saved.
    """

    training_step: TrainingStep
    arguments: LoopArguments
    tokenizer: PreTrainedTokenizerBase | None
    identity: Mapping[str, Any]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    step_metrics: StepMetrics
    averaging: Averaging | None
    engine_state: EngineState | None

    def __post_init__(self) -> None:
        self._accelerator = self.training_step.accelerator
        self.step = self.tokens = 0
        self.metrics: dict[str, float] = {}
        self._unwrapped_model = unwrapped = self.training_step.unwrapped_model
        saved_class = getattr(unwrapped, "checkpoint_class", type(unwrapped))
        self.model_class = saved_class.__name__.removeprefix("FSDP")  # sharding makes a subclass named FSDP<class>
        self._random_file = f"random_state_{self._accelerator.process_index}.json"
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None  # the checkpoint that is being completed
        self._shard_group: torch.distributed.ProcessGroup | None = None
        is_sharded_run = self._accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        # other models save the weights of a part, or write files of adapters with the gathered weights
        has_hooks = hasattr(unwrapped, "load_saved_weights") or bool(getattr(unwrapped.base_model, "save_hooks", ()))
        if is_sharded_run and not has_hooks and self.averaging is None:
            self._shard_group = new_cpu_group(self.arguments.timeout)

    @property
    def path(self) -> Path:
        """The checkpoint of the current step."""
        return checkpoint_files.checkpoint_path(self.arguments.output_dir, self.step)

    def load(self, checkpoint: Path) -> None:
        """Restore everything except the weights; the random states last, since restoring may use them."""
        state, accelerator = _read_state(checkpoint), self._accelerator
        self.step, self.tokens, self.metrics = state["step"], state["tokens"], state["metrics"]
        self.step_metrics.load_state_dict(state["records"])
        if self.engine_state is not None:
            self.engine_state.load_moments(_read_moments(checkpoint, self.engine_state.sharded_parameters()))
            self.engine_state.load_loss_scale(state.get("loss_scale") or {})
        else:
            _load_optimizer(self._unwrapped_model, self.optimizer, checkpoint)
        self.scheduler.load_state_dict(state["scheduler"])
        if self.averaging is not None:
            self.averaging.load_state_dict(state["averaging"])
        for group, learning_rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = learning_rate
        if accelerator.scaler is not None and state["scaler"] is not None:
            accelerator.scaler.load_state_dict(state["scaler"])
        if self.training_step.recurrent_states is not None:
            self.training_step.recurrent_states.load(
                checkpoint, accelerator.process_index, accelerator.num_processes, accelerator.device
            )
        random_file = checkpoint / self._random_file
        if random_file.exists():
            set_random_state(json.loads(random_file.read_text(encoding="utf-8")))
        num_processes = len(list(checkpoint.glob("random_state_*.json")))
        is_regrouped = any(self.identity.get(name) != state["identity"].get(name) for name in _BATCH_SIZES)
        if num_processes != accelerator.num_processes or is_regrouped:
            print_status(
                f"{checkpoint} was saved with other batches ({num_processes} processes, now "
                f"{accelerator.num_processes}): dropout masks differ from an uninterrupted run",
                accelerator.is_main_process,
            )

    @contextmanager
    def saving(self) -> Iterator[Path | None]:
        """Write the checkpoint of the current step; a collective context, which yields the temporary directory for
        further files of the main process, or None if the checkpoint exists.

        A thread completes the checkpoint and deletes old ones while training continues, see `check_saving`. Under FSDP
        it also writes the shards, of which this context makes a copy."""
        self.finish_saving()
        temporary, is_main_process = checkpoint_files.temporary_path(self.path), self._accelerator.is_main_process
        # one process looks for files: a network file system may show others an earlier state
        exists = is_main_process and self.path.exists()
        if is_main_process and not exists:
            with self._clean_up_failed_write(temporary):
                temporary.mkdir()
        (exists,) = broadcast_object_list([exists])
        if exists:
            yield None
            return
        with self._clean_up_failed_write(temporary):
            self._save_model(temporary, only_configuration=self._shard_group is not None)
            shards = None if self._shard_group is None else self._copy_shards()
            if shards is None:
                tensors = {name: _gather(moment) for name, moment in self._moments().items()}
                if is_main_process:
                    write_tensors(temporary / _OPTIMIZER_FILE, tensors)
            (temporary / self._random_file).write_text(json.dumps(random_state()), encoding="utf-8")
            if self.training_step.recurrent_states is not None:
                self.training_step.recurrent_states.save(temporary, self._accelerator.process_index)
            yield temporary
            if is_main_process:
                text = json.dumps(self._json_state(), indent=2) + "\n"
                (temporary / _STATE_FILE).write_text(text, encoding="utf-8")
            self._accelerator.wait_for_everyone()
        if is_main_process or shards is not None:
            self._pending = self._executor.submit(self._complete, temporary, self.path, shards)

    def _json_state(self) -> dict[str, Any]:
        """What a checkpoint contains in addition to tensors and random states, as JSON values."""
        scaler, averaging, engine = self._accelerator.scaler, self.averaging, self.engine_state
        return {
            "step": self.step,
            "tokens": self.tokens,
            "metrics": self.metrics,
            "identity": self.identity,
            "records": self.step_metrics.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "averaging": averaging.state_dict() if averaging is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "loss_scale": engine.loss_scale() if engine is not None else None,
        }

    def _copy_shards(self) -> dict[str, Any]:
        """A copy of this process's shards of the weights and of the optimizer's state."""
        weights = saved_weights(self._unwrapped_model)  # first: it shards what an evaluation has gathered
        if self.engine_state is not None:
            weights = self.engine_state.sharded_weights(weights)
        return copy_to_cpu(weights | self._moments())

    def _moments(self) -> dict[str, Tensor]:
        """The optimizer's state by `<parameter name>|<moment>`, sharded like the parameters."""
        if self.engine_state is not None:
            return self.engine_state.sharded_moments()
        return {
            f"{name}{MOMENT_SEPARATOR}{key}": value if isinstance(value, Tensor) else torch.tensor(value)
            for name, parameter in self._unwrapped_model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def _complete(self, temporary: Path, checkpoint: Path, shards: dict[str, Any] | None) -> None:
        """Write the shards, if any, and give a checkpoint its name when all processes have written theirs."""
        with self._clean_up_failed_write(temporary):
            digests = {}
            if shards is not None and self._shard_group is not None:
                digests = write_shards(temporary, shards, self._shard_group)
            if not self._accelerator.is_main_process:
                return
            checkpoint_files.commit_checkpoint(temporary, checkpoint, digests)
            arguments = self.arguments
            checkpoint_files.delete_old_checkpoints(
                arguments.output_dir, arguments.save_total_limit, retained_steps=arguments.save_at
            )

    def check_saving(self) -> None:
        """Raise CtxError if the last checkpoint could not be written; does not wait for it."""
        if self._pending is not None and self._pending.done():
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the last checkpoint; raises CtxError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last checkpoint, without raising its error."""
        self._executor.shutdown()

    def save_final_model(self) -> None:
        """Write the final model and tokenizer into the output directory, each file atomically; a collective call.

        From a sharded checkpoint, the main process merges the shards, so that no process holds all weights."""
        self.finish_saving()
        output_dir = Path(self.arguments.output_dir)
        temporary = checkpoint_files.temporary_path(output_dir / "model")
        if self._accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            with self._clean_up_failed_write(temporary):
                temporary.mkdir()
        (has_shards,) = broadcast_object_list([is_sharded(self.path)])
        with self._clean_up_failed_write(temporary):
            if not has_shards:
                self._save_model(temporary)
            elif self._accelerator.is_main_process:
                merge_checkpoint(self.path, temporary)
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                checkpoint_files.move_files(temporary, output_dir)
        self._accelerator.wait_for_everyone()

    @contextmanager
    def _clean_up_failed_write(self, temporary: Path) -> Iterator[None]:
        """Context in which files are written to `temporary`, which is removed if writing fails."""
        checkpoints = checkpoint_files.list_checkpoints(self.arguments.output_dir)
        last_good = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        try:
            next_step = f", and run the same command again with --resume; {last_good}"
            with wrap_write_errors(temporary, next_step=next_step):
                yield
        except CtxError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _save_model(self, folder: Path, only_configuration: bool = False) -> None:
        weights = {} if only_configuration else full_state_dict(self._unwrapped_model)
        if not self._accelerator.is_main_process:
            return
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            # always one file, for resuming
            self._unwrapped_model.save_pretrained(folder, state_dict=weights, max_shard_size="1000GB")
        finally:
            if shows_progress:
                logging.enable_progress_bar()
        if self.engine_state is not None:  # the saved weights are not converted to the engine's data type
            config = read_json(folder / CONFIG_NAME) | {"dtype": self.identity["dtype"]}
            (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, gathered if sharded, with tied weights. A collective call."""
    gathered: dict[int, Tensor] = {}
    weights = {}
    # tied weights are one parameter; memory addresses do not show it, since shards may be empty
    for name, parameter in model.state_dict(keep_vars=True).items():
        if id(parameter) not in gathered:
            weight = _gather(full_weight(parameter))
            gathered[id(parameter)] = weight.cpu() if is_optimized_by_deepspeed(parameter) else weight
        weights[name] = gathered[id(parameter)]
    return weights


def _gather(value: Tensor) -> Tensor:
    """A sharded tensor as a whole, on the CPU, so that tensors gathered before take no memory of the device."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Restore the optimizer's state from a sharded or unsharded checkpoint."""
    parameters = dict(model.named_parameters())
    moments = _read_moments(checkpoint, parameters)
    names = {parameter: name for name, parameter in parameters.items()}
    optimized = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: moments[name] for index, name in enumerate(optimized) if name in moments}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _read_moments(checkpoint: Path, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state, parameter name -> moment -> tensor, sharded like the parameters."""
    tensors = {}
    if is_sharded(checkpoint):
        for full_name, stored in stored_tensors(checkpoint).items():
            name, separator, _ = full_name.partition(MOMENT_SEPARATOR)
            if separator:
                tensors[full_name] = _empty_moment(parameters[name], stored.size, stored.properties.dtype)
        read_shards(checkpoint, tensors)
    else:
        for full_name, value in safetensors.torch.load_file(checkpoint / _OPTIMIZER_FILE).items():
            tensors[full_name] = _shard_moment(value, parameters[full_name.partition(MOMENT_SEPARATOR)[0]])
    moments: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.partition(MOMENT_SEPARATOR)
        moments.setdefault(name, {})[key] = tensor
    return moments


def _empty_moment(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if isinstance(parameter, DTensor) and size:
        mesh, placements = parameter.device_mesh, parameter.placements
        return empty_dtensor(size, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(size, dtype=dtype)


def _shard_moment(value: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor) and value.ndim:
        mesh = parameter.device_mesh
        return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements)
    return value


def saved_identity(checkpoint: Path) -> dict[str, Any]:
    """The identity of the run that a checkpoint belongs to; empty for another directory."""
    file = checkpoint / _STATE_FILE
    state = read_json(file) if file.is_file() else None
    identity = state.get("identity") if isinstance(state, dict) else None  # Trainer has files of this name, too
    return identity if isinstance(identity, dict) else {}


def _read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
