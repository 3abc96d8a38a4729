"""The complete state of a run: saving and restoring."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.checkpoint import directory as checkpoints
from hf_ctxmodels.training.checkpoint.identity import check_identity
from hf_ctxmodels.training.checkpoint.optimizer_state import (
    full_state_dict,
    load_optimizer_tensors,
    load_random_state,
    optimizer_tensors,
    save_random_state,
)
from hf_ctxmodels.training.metrics.step_metrics import StepMetrics
from hf_ctxmodels.training.optim.averaging import Averaging
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier

_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_DEEPSPEED_FOLDER = "deepspeed"
_STATE_FILE = "trainer_state.json"


class RunState:
    """Step, weights, optimizer, schedule, recurrent states and random generators of a run. The data position follows
    from the step.

    Attributes:
        step: Optimizer steps so far.
        tokens: Non-padding tokens of the logged steps.
        metrics: The last evaluation.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        arguments: LoopArguments,
        tokenizer: PreTrainedTokenizerBase | None,
        identity: Mapping[str, Any],
    ) -> None:
        """`identity` is what must be equal when the run is resumed, as JSON values; see `checkpoint.identity`."""
        self._accelerator = accelerator
        self._arguments = arguments
        self._tokenizer = tokenizer
        self.step = self.tokens = 0
        self.metrics: dict[str, float] = {}
        # through JSON, for comparison with a checkpoint
        self._identity = json.loads(json.dumps(identity))
        self.model_class = ""

    @property
    def path(self) -> Path:
        """The checkpoint of the current step."""
        return checkpoints.checkpoint_path(self._arguments.output_dir, self.step)

    def load_weights(self, checkpoint: Path, model: PreTrainedModel) -> None:
        """Load a checkpoint's weights into the bare model, before it is wrapped or sharded."""
        state = self._read(checkpoint)
        check_identity(checkpoint, self._identity, state["identity"])
        if hasattr(model, "load_saved_weights"):  # it saves more than one model's weights, or fewer
            model.load_saved_weights(checkpoint)
        else:
            safetensors.torch.load_model(model, checkpoint / _MODEL_FILE)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        records: StepMetrics,
        carried: RecurrentStateCarrier,
        averaging: Averaging,
        method: FinetuningCallback,
    ) -> None:
        """Set the parts to save; the model prepared, the optimizer bare."""
        self._model: Any = model  # under DeepSpeed its engine
        self._optimizer, self._scheduler, self._records, self._carried = optimizer, scheduler, records, carried
        self._averaging, self._method = averaging, method
        self._bare_model = self._accelerator.unwrap_model(model)
        # sharding replaces the class by a subclass named FSDP<class>
        self.model_class = getattr(self._bare_model, "checkpoint_class", type(self._bare_model)).__name__.removeprefix(
            "FSDP"
        )

    def load(self, checkpoint: Path) -> None:
        """Restore everything but the weights; the random states last, since the other steps may draw."""
        state = self._read(checkpoint)
        self.step, self.tokens, self.metrics = state["step"], state["tokens"], state["metrics"]
        self._records.load_state_dict(state["records"])
        if self._uses_deepspeed:
            self._model.load_checkpoint(str(checkpoint / _DEEPSPEED_FOLDER))
        else:
            load_optimizer_tensors(self._bare_model, self._optimizer, checkpoint / _OPTIMIZER_FILE)
        self._scheduler.load_state_dict(state["scheduler"])
        if "averaging" in state:
            self._averaging.load_state_dict(state["averaging"])
        self._method.load(checkpoint)
        for group, rate in zip(self._optimizer.param_groups, self._scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
        accelerator = self._accelerator
        self._carried.load(checkpoint, accelerator.process_index, accelerator.num_processes, accelerator.device)
        random_state = checkpoint / self._random_file()
        if random_state.exists():
            load_random_state(random_state)
        else:
            self._accelerator.print(
                f"Warning: {checkpoint} was saved by fewer processes; dropout differs from an uninterrupted run."
            )

    def save(self) -> None:
        """Write the checkpoint of the current step, unless it exists; delete old ones."""
        temporary = checkpoints.temporary_path(self.path)
        if self._accelerator.is_main_process and not self.path.exists():
            with self._writing(temporary):
                temporary.mkdir()
        self._accelerator.wait_for_everyone()
        if not temporary.exists():
            return
        with self._writing(temporary):
            self._save_model(temporary)
            self._save_optimizer(temporary)
            save_random_state(temporary / self._random_file())
            self._carried.save(temporary, self._accelerator.process_index)
            if self._accelerator.is_main_process:
                self._method.save(temporary)
                (temporary / _STATE_FILE).write_text(json.dumps(self._as_json(), indent=2) + "\n", encoding="utf-8")
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                checkpoints.commit(temporary, self.path)
        if self._accelerator.is_main_process:
            checkpoints.prune(self._arguments.output_dir, self._arguments.save_total_limit)
        self._accelerator.wait_for_everyone()

    def publish(self) -> None:
        """Write the final model and tokenizer into the output directory, each file atomically."""
        output_dir = Path(self._arguments.output_dir)
        temporary = checkpoints.temporary_path(output_dir / "model")
        if self._accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            with self._writing(temporary):
                temporary.mkdir()
        self._accelerator.wait_for_everyone()
        with self._writing(temporary):
            self._save_model(temporary)
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                checkpoints.publish_files(temporary, output_dir)
        self._accelerator.wait_for_everyone()

    @contextmanager
    def _writing(self, temporary: Path) -> Iterator[None]:
        """Within, files are written to `temporary`; what an error of the disk leaves of it is removed."""
        good = checkpoints.checkpoints(self._arguments.output_dir)
        kept = f"the last good checkpoint is {good[-1]}" if good else "no checkpoint was saved before"
        try:
            with wrap_write_errors(temporary, f"make room there and run the same command again with --resume; {kept}."):
                yield
        except CtxError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    @property
    def _uses_deepspeed(self) -> bool:
        return self._accelerator.distributed_type == DistributedType.DEEPSPEED

    def _save_optimizer(self, directory: Path) -> None:
        if self._uses_deepspeed:
            # every process writes its part of the moments
            self._model.save_checkpoint(str(directory / _DEEPSPEED_FOLDER))
            return
        tensors = optimizer_tensors(self._bare_model, self._optimizer)
        if self._accelerator.is_main_process:
            safetensors.torch.save_file(tensors, directory / _OPTIMIZER_FILE)

    def _save_model(self, directory: Path) -> None:
        weights = full_state_dict(self._bare_model)
        if not self._accelerator.is_main_process:
            return
        with _no_progress_bar():
            # always one file, for resuming
            self._bare_model.save_pretrained(directory, state_dict=weights, max_shard_size="1000GB")
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(directory)

    def _as_json(self) -> dict[str, Any]:
        scaler = self._accelerator.scaler
        return {
            "step": self.step,
            "tokens": self.tokens,
            "metrics": self.metrics,
            "identity": self._identity,
            "records": self._records.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "averaging": self._averaging.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def _random_file(self) -> str:
        return f"random_state_{self._accelerator.process_index}.json"

    def _read(self, checkpoint: Path) -> dict[str, Any]:
        return json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without transformers' progress bar for weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
