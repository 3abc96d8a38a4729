"""Training batches, in an order that depends only on seed and position, and one optimizer step on them."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from joblib import cpu_count
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch, host_copy
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.data import ExampleStream, ShardedStream, training_loader
from hf_ctxmodels.data.streams import POSITION_KEY
from hf_ctxmodels.training.accelerator import unwrap_model
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.distributed import ignore_signals
from hf_ctxmodels.training.optimizers import scaled_learning_rate
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier

Collate = Callable[[list[dict[str, Any]]], Mapping[str, torch.Tensor]]
Batch = dict[str, torch.Tensor]

INDEX_KEY = "example_index"
STREAM_FILE = "stream_state_{}.json"
_MIN_CORES_PER_PROCESS = 4  # for a worker in the background


class EpochIndexed(Dataset):
    """A map-style dataset indexed by `(epoch, index)`; items contain both, as "epoch" and "example_index"."""

    def __init__(self, examples: Sequence[Mapping[str, Any]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        return {**self._examples[index], "epoch": epoch, INDEX_KEY: index}


@dataclass(frozen=True)
class IndexedCollator:
    """A collator that adds the indices of the examples to batches, as "example_index" for error messages."""

    collate: Collate

    def __call__(self, examples: list[dict[str, Any]]) -> CollatedBatch:
        """Collate examples."""
        indices = torch.tensor([int(example[INDEX_KEY]) for example in examples])
        batch = {name: value for name, value in self.collate(examples).items() if name != "epoch"}
        return CollatedBatch({**batch, INDEX_KEY: indices})


class TrainingBatches:
    """Endless micro-batches; `close` ends the background processes that make them.

    Workers ignore the first SIGTERM (see `ignore_signals`), so a process that exits without closing waits for them.

    Args:
        stream: The stream of several parts from which the batches are made; None for other data.
    """

    def __init__(self, loader: Any, stream: ShardedStream | None = None) -> None:
        self._loader, self._stream = loader, stream
        self._batches = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if self._stream is not None:
            self._stream.record(host_copy(batch.pop(POSITION_KEY)))
        return batch

    def save_stream(self, checkpoint: Path, process_index: int) -> None:
        """Write the position of this process in a stream of several parts; other positions follow from the step."""
        if self._stream is not None:
            file = checkpoint / STREAM_FILE.format(process_index)
            file.write_text(json.dumps(self._stream.state_dict()), encoding="utf-8")

    def close(self) -> None:
        """End the workers; there are no further batches."""
        self._batches.close()
        iterator = self._loader.base_dataloader._iterator
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:  # that did not react
            worker.kill()


def training_batches(
    accelerator: Accelerator,
    examples: Dataset | ExampleStream,
    collate: Collate,
    arguments: LoopArguments,
    start_batch: int,
    contiguous: bool = False,
    checkpoint: Path | None = None,
) -> TrainingBatches:
    """Endless micro-batches of this process, beginning with micro-batch `start_batch` of the run.

    A micro-batch is sampled for all processes together and split among them, so two processes with batch size 4 see the
    same examples as one with batch size 8. In a stream of several parts each process and worker reads other parts, from
    the positions in the checkpoint on. See `TrainingLoop` for the other arguments.

    Raises:
        CtxError: There are no examples.
    """
    if isinstance(examples, Sized) and len(examples) == 0:
        raise CtxError("The training set is empty.", hint="pass --dataset or --train_file with at least one example.")
    batch_size = arguments.per_device_batch_size * accelerator.num_processes
    loader = training_loader(
        examples,  # type: ignore[arg-type]
        IndexedCollator(collate),
        batch_size=batch_size,
        seed=arguments.seed,
        start_batch=start_batch,
        workers=default_workers(accelerator) if arguments.dataloader_workers is None else arguments.dataloader_workers,
        contiguous_rows=batch_size * arguments.gradient_accumulation_steps if contiguous else None,
        batches_per_step=arguments.gradient_accumulation_steps,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    # a separate generator: starting a loader must not advance the global one, which dropout uses
    loader.generator = torch.Generator().manual_seed(arguments.seed)
    loader.worker_init_fn = ignore_signals
    loader.pin_memory = accelerator.device.type == "cuda"
    if not isinstance(loader.dataset, ShardedStream):
        return TrainingBatches(accelerator.prepare_data_loader(loader))
    states = [] if checkpoint is None else sorted(checkpoint.glob(STREAM_FILE.format("*")))
    if states and not loader.dataset.load_state_dicts([read_json(file) for file in states]):
        accelerator.print(
            "warning: the number of processes or workers changed: the stream continues with the first unfinished part.",
            file=sys.stderr,
        )
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,  # the batches are this process's already
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        non_blocking=True,
    )
    return TrainingBatches(prepared, loader.dataset)


def default_workers(accelerator: Accelerator) -> int:
    """The default number of background processes that make batches: 1, or 0 with few CPU cores, where a worker would
    slow down training."""
    has_few_cores = cpu_count() < _MIN_CORES_PER_PROCESS * accelerator.num_processes
    return 0 if has_few_cores and accelerator.device.type == "cpu" else 1


def next_batches(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next `count` micro-batches; raises CtxError if the stream ends earlier, or the data cannot be read."""
    try:
        step_batches = list(islice(batches, count))
    except CtxError as error:
        # the message of a worker's error is at the end of a traceback
        raise CtxError(re.split(r"\n[\w.]+Error: ", str(error))[-1]) from None
    if len(step_batches) < count:
        raise CtxError("The data ended before the last step.", hint="lower --max_steps or use more data.")
    return step_batches


def count_items(batches: Iterable[Batch], targets: Sequence[str]) -> torch.Tensor:
    """(len(targets) + 1,) int64: the number of targets per name, then of non-padding input tokens, over all batches.

    Counted are all elements of floating-point targets, elements of integer targets that are not -100, and answer
    positions (`..._positions`) inside the sequence; absent targets count 0. Nothing synchronizes with the device.
    """
    batches = list(batches)
    tokens = torch.stack([_count_tokens(batch) for batch in batches]).sum()
    return torch.cat([count_targets(batches, targets), tokens[None]])


def count_targets(batches: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[str]) -> torch.Tensor:
    """(len(targets),) int64: the number of targets per name over all batches, as in `count_items`."""
    if not targets:
        return torch.zeros(0, dtype=torch.int64)
    counts = []
    for batch in batches:
        zero = torch.zeros((), dtype=torch.int64, device=next(iter(batch.values())).device)
        counts.append(torch.stack([_count_target(batch, name) if name in batch else zero for name in targets]))
    return torch.stack(counts).sum(dim=0)


def _count_target(batch: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    target = batch[name]
    if target.is_floating_point():
        return torch.tensor(target.numel(), device=target.device)
    if name.endswith("_positions"):  # heads ignore positions outside the sequence
        length = batch["input_ids" if "input_ids" in batch else "inputs_embeds"].shape[1]
        return ((target >= 0) & (target < length)).sum()
    return (target != IGNORE_INDEX).sum()


def _count_tokens(batch: Batch) -> torch.Tensor:
    for name in ("sequence_ids", "attention_mask"):
        if name in batch:
            return (batch[name] != 0).sum()
    first = batch.get("input_ids", next(iter(batch.values())))
    return torch.tensor(first.numel(), device=first.device)


class LossFunction(Protocol):
    """Computes the training loss of a micro-batch.

    Attributes:
        targets: Names of the batch entries that the terms of the loss are normalized by.
    """

    targets: tuple[str, ...]

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], num_items_in_batch: Any) -> ModelOutput:
        """The model's output, whose `loss` is the sum over the micro-batch's targets divided by `num_items_in_batch`
        (target -> number; None for the number in `batch`). The model may be wrapped for several processes."""


def loss_targets(model: nn.Module) -> tuple[str, ...]:
    """The `loss_targets` of a model; raises CtxError if it has none."""
    targets = getattr(model, "loss_targets", None)
    if targets is None:
        raise CtxError(
            f"{type(model).__name__} has no `loss_targets`, so its loss cannot be normalized over an optimizer step.",
            hint="train a head of this package, or use transformers.Trainer for other models.",
        )
    return targets


def logged_terms(output: ModelOutput) -> dict[str, Tensor]:
    """The loss, the output fields named `..._loss`, and the head's `metrics`.

    A metric is (2,), a numerator and a denominator that are summed over batches, such as correct predictions and
    targets.
    """
    losses = {name: value for name, value in output.items() if name.endswith("_loss") and value is not None}
    return {"loss": output.loss, **losses, **(output.get("metrics") or {})}


def enable_gradient_checkpointing(model: PreTrainedModel, options: Mapping[str, Any] | None = None) -> None:
    """Recompute the activations of the layers in the backward pass, with options of `torch.utils.checkpoint`; raises
    CtxError if the model does not support it."""
    if not model.supports_gradient_checkpointing:
        raise CtxError(
            f"{type(model).__name__} does not support gradient checkpointing.",
            location="--gradient_checkpointing",
            hint="remove it, and lower --per_device_batch_size if memory is short.",
        )
    model.activation_checkpointing_enable({"use_reentrant": False, **(options or {})})


@dataclass(eq=False)
class TrainingStep:
    """Optimizer steps with the gradient of one large batch.

    Each loss term is the sum over its targets divided by their number in the whole step, over all micro-batches and
    processes, so the gradient is exact for any distribution of targets. Processes average their gradients, so each
    divides by count / processes.

    A head that `supports_inplace_optimizer` receives the learning rate (and AdaGrad's sums of squares) and updates its
    weights in its forward pass, in a single process.

    Args:
        accelerator, model, optimizer: Prepared by the Accelerator.
        max_grad_norm: Clip the gradient to this norm; 0 does not clip.
        recurrent_states: The model's states after the previous step, if they are carried.
        loss_function: The training loss; by default the loss of the model's forward.
        lr_reference_targets: Number of targets at which a step has the unscaled learning rate; 0 for no scaling.
        on_pre_optimizer_step: Called with the gradients' scale and a dictionary for log entries before clipping; see
            `callbacks.FinetuningCallback`.

    Raises:
        CtxError: The loss cannot be normalized, or an in-place optimizer is used on several processes.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: AcceleratedOptimizer
    max_grad_norm: float
    recurrent_states: RecurrentStateCarrier | None = None
    loss_function: LossFunction | None = None
    lr_reference_targets: float = 0.0
    on_pre_optimizer_step: Callable[[float, dict[str, Tensor]], None] | None = None

    def __post_init__(self) -> None:
        self.unwrapped_model = unwrapped = unwrap_model(self.accelerator, self.model)
        optimizer = self.optimizer.optimizer
        self._targets = loss_targets(unwrapped) if self.loss_function is None else self.loss_function.targets
        is_inplace = isinstance(unwrapped, CtxPreTrainedModel) and unwrapped.supports_inplace_optimizer(optimizer)
        if is_inplace and self.accelerator.num_processes > 1:
            name = type(optimizer).__name__
            raise CtxError(
                f"{name} updates {type(unwrapped).__name__} in place, which needs a single process.",
                location=f"--optimizer {name.lower()} on {self.accelerator.num_processes} processes",
                hint="start one process, which uses all threads, or use another --optimizer.",
            )
        self._is_inplace = is_inplace

    def __call__(self, batches: Sequence[Batch]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Train on the micro-batches of one step.

        Returns:
            scalars: Name -> tensor, (2,) for metrics and else 0-dimensional: `logged_terms` and the loss of the
                batches' task, summed over micro-batches; losses of callbacks; "grad_norm" before clipping; "tokens" of
                all processes.
            indices: For each micro-batch the (batch,) int64 indices of its examples.
        """
        indices = [batch.pop(INDEX_KEY) for batch in batches]
        counts = self.accelerator.reduce(count_items(batches, self._targets), reduction="sum")
        # a step without targets has loss 0, not 0/0
        num_items_in_batch = {
            name: count.clamp(min=1) / self.accelerator.num_processes for name, count in zip(self._targets, counts)
        }

        scalars: dict[str, Tensor] = {}
        for number, (batch, batch_indices) in enumerate(zip(batches, indices, strict=True)):
            is_last = number == len(batches) - 1
            self.accelerator.sync_gradients = is_last  # DeepSpeed's engine reads it
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                inputs: dict[str, Any] = dict(batch)
                if self.recurrent_states is not None:
                    inputs |= self.recurrent_states.inputs(number, batch_indices)
                if self._is_inplace:
                    inputs |= self._inplace_inputs()
                if self.loss_function is None:
                    output = self.model(**inputs, num_items_in_batch=num_items_in_batch)
                else:
                    output = self.loss_function(self.model, inputs, num_items_in_batch)
                if not self._is_inplace:
                    self.accelerator.backward(output.loss)
            if self.recurrent_states is not None:
                self.recurrent_states.update(number, batch_indices, output)
            terms = logged_terms(output)
            if isinstance(batch.get("task"), str):  # of `CtxMultiTaskModel`: all batches of a step have one task
                terms[f"{batch['task']}_loss"] = output.loss
            for name, value in terms.items():
                scalars[name] = scalars[name] + value.detach() if name in scalars else value.detach()

        if self.on_pre_optimizer_step is not None:
            scaler = self.accelerator.scaler
            logs: dict[str, Tensor] = {}
            self.on_pre_optimizer_step(1.0 if scaler is None else scaler.get_scale(), logs)
            scalars |= logs
            scalars["loss"] = sum((logs[name] for name in logs if name.endswith("_loss")), scalars["loss"])
        scalars["grad_norm"] = self._clip_gradients()
        scalars["tokens"] = counts[-1]

        lr_factor = counts[0] / self.lr_reference_targets if self.lr_reference_targets else 1.0
        with scaled_learning_rate(self.optimizer, lr_factor):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return scalars, indices

    @property
    def learning_rate(self) -> float:
        """Current learning rate of the first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    def _inplace_inputs(self) -> dict[str, Any]:
        """The learning rate and AdaGrad's state, for a head with in-place updates."""
        inputs: dict[str, Any] = {"learning_rate": self.learning_rate}
        if isinstance(self.optimizer.optimizer, torch.optim.Adagrad):
            state = self.optimizer.optimizer.state
            inputs["squares"] = {
                name: state[parameter]["sum"] for name, parameter in self.unwrapped_model.named_parameters()
            }
        return inputs

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients and return their norm before clipping; as in torch, which does not support sparse ones."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if not any(parameter.grad.is_sparse for parameter in parameters):  # type: ignore[union-attr]
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or math.inf)
            if isinstance(norm, float):  # of DeepSpeed, whose engine has clipped the gradients and updated the weights
                norm = torch.tensor(norm, device=self.accelerator.device)
            return norm.full_tensor() if hasattr(norm, "full_tensor") else norm.detach()
        self.accelerator.unscale_gradients(self.optimizer)  # as `clip_grad_norm_` does, for float16
        gradients = []
        for parameter in parameters:
            gradient: Any = parameter.grad
            if gradient.is_sparse:
                parameter.grad = gradient.coalesce()
                gradient = parameter.grad._values()  # type: ignore[union-attr]
            gradients.append(gradient)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(values) for values in gradients]))
        if self.max_grad_norm:
            factor = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            for values in gradients:
                values.mul_(factor)
        return norm
