"""The training loop for pretraining and fine-tuning, on one or more processes through Accelerate."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import ExampleStream
from hf_ctxmodels.layers.cpu.allocator import retain_freed_memory
from hf_ctxmodels.tokenizers.base import record_tokenizer_digest
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.batches import Collate, take, training_batches
from hf_ctxmodels.training.callbacks import FinetuningCallback, Methods, TrainingRun
from hf_ctxmodels.training.checkpoint.identity import loop_identity, model_identity
from hf_ctxmodels.training.checkpoint.output_dir import locked_output_dir
from hf_ctxmodels.training.checkpoint.run_state import RunState
from hf_ctxmodels.training.interruption import InterruptionError, SignalWatch, detect_lost_processes
from hf_ctxmodels.training.metrics.progress import Progress, Stopwatch
from hf_ctxmodels.training.metrics.step_metrics import StepMetrics, require_finite_weights
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.optim.averaging import Averaging
from hf_ctxmodels.training.optim.gradual_unfreezing import GradualUnfreezing
from hf_ctxmodels.training.optim.optimizers import make_optimizer, make_scheduler
from hf_ctxmodels.training.parallelism import inactive_parallelism_warnings, require_configured_backend
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier, state_outputs
from hf_ctxmodels.training.steps import Stepper

Evaluate = Callable[[nn.Module, Accelerator], dict[str, float]]


def make_accelerator(arguments: LoopArguments, *, unused_parameters: bool = False) -> Accelerator:
    """The Accelerator of a script, to be created before data and model; seeds the global generators.

    Says what `accelerate launch` was told and is not in force.

    Args:
        arguments: The flags.
        unused_parameters: Whether a step may leave parameters without gradients, as the heads of other tasks; data
            parallelism then looks for them, and leaves them as one process does.

    Raises:
        CtxError: DeepSpeed is configured and not installed.
    """
    require_configured_backend()
    accelerator = Accelerator(
        # without it, accelerate does not connect the processes of a machine without GPU
        cpu=not torch.accelerator.is_available(),
        mixed_precision=arguments.mixed_precision,
        log_with=None if arguments.report_to == "none" else arguments.report_to,
        project_config=ProjectConfiguration(arguments.output_dir, logging_dir=f"{arguments.output_dir}/tensorboard"),
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True),
        rng_types=[],
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if unused_parameters else None,
    )
    if accelerator.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate shards on accelerators only; torch also shards on CPUs
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    for line in inactive_parallelism_warnings(
        accelerator.distributed_type, accelerator.num_processes, accelerator.device.type
    ):
        print_status(line, accelerator.is_main_process)
    set_seed(arguments.seed)
    return accelerator


@dataclass
class TrainingResult:
    """The result of a run.

    Attributes:
        steps: Optimizer steps, those before a resume included.
        tokens: Non-padding input tokens of training, over all processes.
        tokens_per_second: Training speed of this process, without evaluation; None without any training.
        metrics: The last evaluation.
        curve: The records of `training_log.jsonl`.
        arguments, parameters, model_class, model_type: For the summary.
    """

    arguments: LoopArguments
    model_class: str
    model_type: str
    parameters: int
    global_batch_size: int
    steps: int
    tokens: int
    tokens_per_second: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)

    def summary(self, *, task: str, dataset: str, **more: Any) -> TrainingSummary:
        """The summary of this run; `more` are other fields of `TrainingSummary`."""
        own = {name: value for name, value in vars(self).items() if name != "arguments"}
        hyperparameters = asdict(self.arguments)
        return TrainingSummary(
            task=task,
            dataset=dataset,
            seed=hyperparameters.pop("seed"),
            hyperparameters=hyperparameters,
            **own,
            **more,
        )


def total_steps(arguments: LoopArguments, examples: Dataset | ExampleStream, accelerator: Accelerator) -> int:
    """Optimizer steps of the run: `max_steps`, or `num_train_epochs` rounded to whole steps, at least 1.

    Raises:
        CtxError: Epochs are given for a stream, whose length is unknown.
    """
    if arguments.max_steps is not None or arguments.num_train_epochs is None:
        return arguments.max_steps or 0
    length = _length(examples)
    if length is None:
        raise CtxError(
            "The length of a stream, and so of its epochs, is unknown.",
            location=f"--num_train_epochs {arguments.num_train_epochs}",
            hint="give --max_steps instead, or leave out --streaming.",
        )
    return max(round(arguments.num_train_epochs * length / global_batch_size(arguments, accelerator)), 1)


def global_batch_size(arguments: LoopArguments, accelerator: Accelerator) -> int:
    """Examples per optimizer step."""
    return arguments.per_device_batch_size * accelerator.num_processes * arguments.gradient_accumulation_steps


def train(
    model: PreTrainedModel,
    examples: Dataset | ExampleStream,
    collate: Collate,
    arguments: LoopArguments,
    accelerator: Accelerator,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    evaluate: Evaluate | None = None,
    identity: Mapping[str, Any] | None = None,
    contiguous: bool = False,
    methods: Sequence[FinetuningCallback] = (),
) -> TrainingResult:
    """Train a model, evaluate, save checkpoints and the final model.

    A run that was killed at any time and continued with `arguments.resume` has the losses and weights of an
    uninterrupted run, bit for bit (same number of processes, same machine).

    Args:
        model: A head with `loss_targets` whose forward takes `num_items_in_batch` as a mapping of counts.
        examples: Map-style, indexed by `(epoch, index)`, with "epoch" and "example_index" (see
            `batches.EpochIndexed`), or a stream from `hf_ctxmodels.data`.
        collate: List of examples -> arguments of the model's forward. Its random draws must derive from the examples'
            "epoch" and "example_index".
        accelerator: From `make_accelerator`.
        tokenizer: Saved with every checkpoint and the final model.
        evaluate: `(model, accelerator) -> {name: value}`, for example `evaluation.LossEvaluation`; called on every
            process with the model in evaluation mode.
        identity: JSON values that must be equal when a run is resumed (data set, objective, ...).
        contiguous: Consecutive examples are contiguous text, which is not shuffled, and the model's state
            (`state_outputs`) is carried from row to row; see `data.ContiguousBatchSampler` and
            `recurrent_state.RecurrentStateCarrier`.
        methods: Ways to fine-tune, in the order in which they act; made of the model as it is given.

    Raises:
        InterruptionError: SIGTERM or SIGINT arrived; a checkpoint was saved.
        NonFiniteError: The loss or gradient norm became NaN or infinite.
        LostProcessError: Another process of the run was killed.
        CtxError: The output directory or a checkpoint is unusable or cannot be written, another run is training there,
            or `contiguous` and the model has no state.
    """
    identity = {**(identity or {}), **({"contiguous": True} if contiguous else {})}
    processes = detect_lost_processes(accelerator.num_processes)
    with processes, locked_output_dir(accelerator, arguments, tokenizer) as checkpoint:
        run = _Run(
            model,
            examples,
            collate,
            arguments,
            accelerator,
            tokenizer,
            evaluate,
            identity,
            contiguous,
            checkpoint,
            methods,
        )
        return run.execute()


class _Run:
    """The parts of a run; `execute` is the loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Dataset | ExampleStream,
        collate: Collate,
        arguments: LoopArguments,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase | None,
        evaluate: Evaluate | None,
        identity: Mapping[str, Any],
        contiguous: bool,
        checkpoint: Path | None,
        methods: Sequence[FinetuningCallback],
    ) -> None:
        self.arguments, self.accelerator, self.evaluate_model = arguments, accelerator, evaluate
        self.total_steps = total_steps(arguments, examples, accelerator)
        if tokenizer is not None:
            record_tokenizer_digest(model.config, tokenizer)
        same = {
            "examples": _length(examples),
            **loop_identity(arguments, accelerator, self.total_steps),
            **model_identity(model),
            **identity,
            **Methods(methods).identity,
        }
        self.state = RunState(accelerator, arguments, tokenizer, same)
        if checkpoint is not None:
            self.state.load_weights(checkpoint, model)
        self.parameters = model.num_parameters()
        optimizer = make_optimizer(model, arguments)
        self.methods = self._start(methods, model, optimizer, examples)
        self.model, prepared = accelerator.prepare(model, optimizer)
        self.scheduler = make_scheduler(optimizer, arguments, self.total_steps)
        carried = RecurrentStateCarrier(
            state_outputs(model) if contiguous else (), arguments.gradient_accumulation_steps
        )
        self.averaging = Averaging(optimizer, arguments, evaluate is not None)
        scaling = arguments.lr_reference_targets, self.methods.before_update
        self.stepper = Stepper(accelerator, self.model, prepared, arguments.max_grad_norm, carried, *scaling)
        self.records = StepMetrics(accelerator, arguments.output_dir)
        self.state.attach(self.model, optimizer, self.scheduler, self.records, carried, self.averaging, self.methods)
        set_seed(arguments.seed, device_specific=True)
        if checkpoint is not None:
            self.state.load(checkpoint)
            accelerator.print(f"Resuming from {checkpoint}.", file=sys.stderr)
        if arguments.report_to != "none":
            given = {name: value for name, value in asdict(arguments).items() if value is not None}
            accelerator.init_trackers(Path(arguments.output_dir).resolve().name, config=given)
        start_batch = self.state.step * arguments.gradient_accumulation_steps
        self.batches = training_batches(accelerator, examples, collate, arguments, start_batch, contiguous)
        rows = f"{global_batch_size(arguments, accelerator):,} rows a step"
        what = f"{self.state.model_class}, {self.parameters:,} parameters, {rows}"
        self.progress = Progress(accelerator, arguments.output_dir, self.total_steps, self.state.step, what)
        self.examples_per_epoch = _length(examples)
        self.watch = Stopwatch()
        self.untimed_tokens = self.records.tokens
        self.timed_tokens = self.logged_seconds = 0.0

    def _start(
        self, given: Sequence[FinetuningCallback], model: PreTrainedModel, optimizer: Any, examples: Any
    ) -> Methods:
        """The ways to fine-tune that are given, and the one of the flags; they are told of the run."""
        interval = self.arguments.unfreezing(self.total_steps)
        methods = Methods([*given, *([GradualUnfreezing(model, interval)] if interval else [])])
        accelerator, length = self.accelerator, _length(examples)
        per_epoch = None if length is None else length / global_batch_size(self.arguments, accelerator)
        sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        evaluates = self.evaluate_model is not None
        steps, processes = self.total_steps, accelerator.num_processes
        methods.start(TrainingRun(model, optimizer, steps, per_epoch, evaluates, processes, sharded))
        return methods

    def execute(self) -> TrainingResult:
        """Train to the end."""
        try:
            with SignalWatch(self.accelerator.num_processes) as signals, retain_freed_memory():
                self._train(signals)
                self.averaging.settle()
                self.state.publish()
        finally:
            self.batches.close()
            self.progress.close()
            if self.arguments.report_to != "none":
                self.accelerator.end_training()
        return self._result()

    def _train(self, signals: SignalWatch) -> None:
        state, arguments = self.state, self.arguments
        self.model.train()
        self.watch.start()
        while state.step < self.total_steps:
            step = state.step + 1
            self.methods.before_step(state.step)
            scalars, indices = self.stepper.step(take(self.batches, arguments.gradient_accumulation_steps))
            self.learning_rate = self.stepper.learning_rate
            self.scheduler.step()
            self.records.add(step, scalars, indices)
            state.step = step
            self.progress.advance()

            last = step == self.total_steps
            if last or _due(step, arguments.logging_steps):
                self._log()
            elif self.records.full:
                self.records.settle()
            if last or _due(step, arguments.eval_steps) or self.methods.evaluates_after(step):
                self._evaluate(last)
            received = signals.received()
            if last or received or _due(step, arguments.save_steps):
                self._save()
            if received and not last:
                raise InterruptionError(received, step, str(self.state.path))
        self.methods.finish()
        self.watch.pause()

    def _log(self) -> None:
        values = self.records.flush()
        tokens = values.pop("tokens")
        self.state.tokens += int(tokens)
        self.timed_tokens += tokens - self.untimed_tokens
        self.watch.pause()
        rate = (tokens - self.untimed_tokens) / (self.watch.seconds - self.logged_seconds)
        self.logged_seconds = self.watch.seconds
        self.untimed_tokens = 0
        if self.examples_per_epoch is not None:
            per_step = global_batch_size(self.arguments, self.accelerator)
            values["epoch"] = round(self.state.step * per_step / self.examples_per_epoch, 4)
        timed = {"tokens": self.state.tokens, "tokens_per_second": rate}
        values = {**values, "learning_rate": float(self.learning_rate), **timed}
        self.progress.record(self.state.step, values, run_rate=self.timed_tokens / self.logged_seconds)
        self.watch.start()

    def _evaluate(self, last: bool) -> None:
        if self.evaluate_model is None:
            return
        self.watch.pause()
        self.model.eval()
        with self.averaging.applied():
            self.state.metrics = self.evaluate_model(self.model, self.accelerator)
        if self.methods.after_evaluation(self.state.step, self.state.metrics) and last:
            self.state.metrics = self.evaluate_model(self.model, self.accelerator)
        self.averaging.observe(self.state.step, self.state.metrics)
        self.model.train()
        self.progress.record(self.state.step, self.state.metrics)
        self.watch.start()

    def _save(self) -> None:
        self.records.settle()  # raises for a non-finite step before it is saved
        require_finite_weights(self.model, self.state.step)
        self.watch.pause()
        self.state.save()
        self.watch.start()

    def _result(self) -> TrainingResult:
        model = self.accelerator.unwrap_model(self.model)
        return TrainingResult(
            arguments=self.arguments,
            model_class=self.state.model_class,
            model_type=model.config.model_type,
            parameters=self.parameters,
            global_batch_size=global_batch_size(self.arguments, self.accelerator),
            steps=self.state.step,
            tokens=self.state.tokens,
            tokens_per_second=self.timed_tokens / self.logged_seconds if self.timed_tokens else None,
            metrics=self.state.metrics,
            curve=self.progress.curve,
        )


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _length(examples: Dataset | ExampleStream) -> int | None:
    """Number of examples; None for a stream."""
    return len(examples) if isinstance(examples, Sized) else None
