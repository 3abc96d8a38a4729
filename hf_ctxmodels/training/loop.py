"""The training loop for pretraining and fine-tuning, on one or more processes through Accelerate."""

import ctypes
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from hf_ctxmodels.core.console import format_count, format_number, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flat_options
from hf_ctxmodels.data import ExampleStream, Mixture
from hf_ctxmodels.tokenizers.base import limit_tokenizer_length, record_tokenizer_digest
from hf_ctxmodels.training.accelerator import forward_dtype
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.checkpoint_files import locked_output_dir
from hf_ctxmodels.training.deepspeed_state import EngineState
from hf_ctxmodels.training.defaults import describe_defaults, with_default_length, with_default_rates
from hf_ctxmodels.training.distributed import (
    InterruptionError,
    SignalWatch,
    detect_lost_processes,
)
from hf_ctxmodels.training.evaluation import sample_batches
from hf_ctxmodels.training.learning_rate_test import RANGE_TEST_FILE, learning_rate_range_test
from hf_ctxmodels.training.optimizers import Averaging, make_optimizer, make_scheduler, require_sharded_updates
from hf_ctxmodels.training.recurrent_state import RecurrentStateCarrier
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import StepMetrics, Stopwatch, TrainingLog, require_finite_weights
from hf_ctxmodels.training.training_state import TrainingState, load_weights, run_identity
from hf_ctxmodels.training.training_step import (
    Collate,
    LossFunction,
    TrainingStep,
    count_items,
    enable_gradient_checkpointing,
    next_batches,
    training_batches,
)

_SAMPLED_EXAMPLES = 256
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_NEVER_TRIM, _NEVER_MMAP = -1, 1 << 30
_ADJUSTED_MMAP = 32 << 20  # the maximum of glibc's dynamic threshold; it trims from twice that

Evaluate = Callable[[nn.Module, Accelerator], dict[str, float]]


@dataclass
class TrainingResult:
    """The result of a run, including the steps before a resume; see `TrainingSummary` for the fields."""

    arguments: LoopArguments
    model_class: str
    model_type: str
    parameters: int
    global_batch_size: int
    steps: int
    tokens: int
    tokens_per_second: float | None
    metrics: dict[str, float]
    curve: list[dict[str, float]]
    has_measured_rate: bool = False

    def summary(self, **fields: Any) -> TrainingSummary:
        """The summary of this run with further fields of `TrainingSummary`."""
        result = vars(self) | {"hyperparameters": flat_options(self.arguments)}
        del result["arguments"]
        return TrainingSummary(seed=result["hyperparameters"].pop("seed"), **result, **fields)


def global_batch_size(arguments: LoopArguments, accelerator: Accelerator) -> int:
    """Examples per optimizer step."""
    return arguments.per_device_batch_size * accelerator.num_processes * arguments.gradient_accumulation_steps


@dataclass(eq=False)
class TrainingLoop:
    """Trains a model, evaluates, and saves checkpoints and the final model: `TrainingLoop(model, ...).run()`.

    A run that was killed at any time and continued with `arguments.resume` has the losses and weights of an
    uninterrupted run, bit for bit with the same versions and number of processes on the same CPU, or with
    `arguments.deterministic` on the same GPU; otherwise up to the order of atomic additions on the GPU.

    Args:
        model: A head with `loss_targets` whose forward takes `num_items_in_batch` as a mapping of counts; or any model
            with a `loss_function`.
        examples: Map-style, indexed by `(epoch, index)` (see `training_step.EpochIndexed`), or a stream; both have the
            columns "epoch" and "example_index".
        collate: List of examples -> arguments of the model's forward, random only by epoch and index.
        accelerator: From `accelerator.make_accelerator`.
        tokenizer: Saved with every checkpoint and the final model.
        evaluate: For example `evaluation.LossEvaluation`; called on every process with the model in evaluation mode.
        loss_function: By default the loss of the model's forward.
        callbacks: Called in this order; see `callbacks.FinetuningCallback` for what the loop passes.
        identity: JSON values that must be equal when a run is resumed (dataset, objective, ...).
        contiguous: Consecutive examples are contiguous text, which is not shuffled, and the model's state is carried
            from example to example (`recurrent_state.RecurrentStateCarrier`).
    """

    model: PreTrainedModel
    examples: Dataset | ExampleStream
    collate: Collate
    arguments: LoopArguments
    accelerator: Accelerator
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    evaluate: Evaluate | None = None
    loss_function: LossFunction | None = None
    callbacks: Sequence[TrainerCallback] = ()
    identity: Mapping[str, Any] | None = None
    contiguous: bool = False

    def run(self) -> TrainingResult:
        """Set up or restore the run, train to the end, and write the final model.

        Raises:
            InterruptionError: SIGTERM or SIGINT arrived; a checkpoint was saved.
            NonFiniteError: The loss or gradient norm became NaN or infinite.
            LostProcessError: Another process of the run was killed.
            CtxError: The output directory or a checkpoint is unusable, another run is training there, or the model has
                no state for `contiguous`.
        """
        num_processes = self.accelerator.num_processes
        sources = None if self.tokenizer is None else self.tokenizer.name_or_path, self.model.name_or_path
        with (
            detect_lost_processes(num_processes),
            locked_output_dir(self.accelerator, self.arguments, *sources) as checkpoint,
        ):
            self._set_up(checkpoint)
            try:
                with SignalWatch(num_processes, self.arguments.timeout) as signals, retain_freed_memory():
                    self._train(signals)
                    if self.averaging is not None:
                        self.averaging.swap()
                    self.training_state.save_final_model()
            finally:
                self.training_state.close()
                self.batches.close()
                self.log.close()
                if self.arguments.report_to != "none":
                    self.accelerator.end_training()
        has_measured_rate = self.arguments.learning_rate == "auto"
        if has_measured_rate:  # the first parameter group has the unscaled rate
            self.arguments = replace(self.arguments, learning_rate=float(self.scheduler.base_lrs[0]))
        return TrainingResult(
            arguments=replace(self.arguments, dtype=forward_dtype(self.accelerator)),
            model_class=self.training_state.model_class,
            model_type=self.model.config.model_type,
            parameters=self.num_parameters,
            global_batch_size=self.batch_size,
            steps=self.training_state.step,
            tokens=self.training_state.tokens,
            tokens_per_second=self.timed_tokens / self.logged_seconds if self.timed_tokens else None,
            metrics=self.training_state.metrics,
            curve=self.log.curve,
            has_measured_rate=has_measured_rate,
        )

    def _set_up(self, checkpoint: Path | None) -> None:
        """Build optimizer, schedule and batches, and restore the checkpoint, if any."""
        model, accelerator = self.model, self.accelerator
        self.control = TrainerControl()
        self.batch_size = global_batch_size(self.arguments, accelerator)
        self.examples_per_epoch = len(self.examples) if isinstance(self.examples, Sized) else None
        self._set_default_arguments()
        arguments = self.arguments
        if self.tokenizer is not None:
            record_tokenizer_digest(model.config, self.tokenizer)
            limit_tokenizer_length(self.tokenizer, model.config)
        identity, step = self._full_identity(), 0
        if checkpoint is not None:
            fixed_micro_batches = isinstance(self.examples, Mixture) and not self.examples.is_per_example
            step = load_weights(checkpoint, model, identity, accelerator, fixed_micro_batches)
        self.num_parameters = model.num_parameters()
        optimizer = self._make_optimizer(step, checkpoint)
        engine_state = self._prepare_training_step(optimizer)
        if arguments.learning_rate == "auto" and checkpoint is None:
            self._choose_learning_rate(optimizer)
        self.scheduler = make_scheduler(optimizer, arguments, self.total_steps)
        self.step_metrics = StepMetrics(accelerator, arguments.output_dir)
        self.training_state = TrainingState(
            training_step=self.training_step,
            arguments=arguments,
            tokenizer=self.tokenizer,
            identity=identity,
            optimizer=optimizer,
            scheduler=self.scheduler,
            step_metrics=self.step_metrics,
            averaging=self.averaging,
            engine_state=engine_state,
        )
        set_seed(arguments.seed, device_specific=True)
        if checkpoint is not None:
            self.training_state.load(checkpoint)
            accelerator.print(f"Resuming from {checkpoint}.", file=sys.stderr)
        start_batch = step * arguments.gradient_accumulation_steps
        self.batches = training_batches(
            accelerator, self.examples, self.collate, arguments, start_batch, self.contiguous, checkpoint
        )
        self._open_log(step)

    def _full_identity(self) -> dict[str, Any]:
        """A copy, as a checkpoint contains it, of the JSON values that must be equal when the run is resumed."""
        identity = {
            "examples": self.examples_per_epoch,
            **run_identity(self.arguments, self.accelerator, self.total_steps, self.model),
            **(self.identity or {}),
            **({"contiguous": True} if self.contiguous else {}),
        }
        for callback in self.callbacks:
            if isinstance(callback, FinetuningCallback):
                identity |= callback.identity
        return json.loads(json.dumps(identity))

    def _make_optimizer(self, step: int, checkpoint: Path | None) -> torch.optim.Optimizer:
        """The optimizer, whose parameters callbacks may regroup before the schedule is made."""
        model, arguments, distributed_type = self.model, self.arguments, self.accelerator.distributed_type
        if distributed_type == DistributedType.FSDP:
            require_sharded_updates(arguments.optimizer)
        elif distributed_type == DistributedType.DEEPSPEED:
            _configure_deepspeed(self.accelerator, arguments, model)
        optimizer = make_optimizer(model, arguments)
        self.callback_state = TrainerState(
            global_step=step, max_steps=self.total_steps, num_train_epochs=self._epochs(self.total_steps)
        )
        self.callback_objects = {"model": model, "optimizer": optimizer, "processing_class": self.tokenizer}
        self._call("on_train_begin", has_evaluation=self.evaluate is not None, checkpoint=checkpoint)
        return optimizer

    def _prepare_training_step(self, optimizer: torch.optim.Optimizer) -> EngineState | None:
        """Prepare model and optimizer for the processes, and make the training step; returns the state of DeepSpeed's
        engine, if there is one."""
        model, accelerator, arguments = self.model, self.accelerator, self.arguments
        if arguments.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        if arguments.compile:
            model.compile()
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        # the engine may convert the weights to another data type
        weights = {name: weight.clone() for name, weight in model.state_dict().items()} if is_deepspeed else {}
        self.prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
        self.averaging: Averaging | None = None
        if isinstance(optimizer, torch.optim.ASGD):
            self.averaging = Averaging(optimizer, arguments, self.evaluate is not None)
        self.training_step = TrainingStep(
            accelerator,
            self.prepared_model,
            prepared_optimizer,
            arguments.max_grad_norm,
            self._recurrent_states(),
            self.loss_function,
            arguments.lr_reference_targets,
            lambda scale, logs: self._call("on_pre_optimizer_step", gradient_scale=scale, logs=logs),
        )
        return EngineState(self.prepared_model, weights) if is_deepspeed else None

    def _recurrent_states(self) -> RecurrentStateCarrier | None:
        """The carrier of recurrent states for `contiguous` examples."""
        micro_batches = self.arguments.gradient_accumulation_steps
        return RecurrentStateCarrier(self.model, micro_batches) if self.contiguous else None

    def _open_log(self, step: int) -> None:
        """Open the log and the experiment tracker; they continue at `step`."""
        accelerator, arguments = self.accelerator, self.arguments
        if arguments.report_to != "none":
            config = {name: value for name, value in flat_options(arguments).items() if value is not None}
            accelerator.init_trackers(Path(arguments.output_dir).resolve().name, config=config)
        batch_size, parameters = format_count(self.batch_size, "example"), format_number(self.num_parameters)
        title = f"{self.training_state.model_class}, {parameters} parameters, {batch_size} a step"
        last_step = step if arguments.resume == "finish" else self.total_steps
        self.log = TrainingLog(accelerator, arguments.output_dir, last_step, step, title)
        self.stopwatch = Stopwatch()
        self.resumed_tokens = self.step_metrics.tokens  # of steps before the checkpoint, which are not timed
        self.timed_tokens = self.logged_seconds = 0.0

    def _set_default_arguments(self) -> None:
        """Set the arguments that are not given, and the number of steps."""
        examples_per_epoch, batch_size, config = self.examples_per_epoch, self.batch_size, self.model.config
        arguments = with_default_rates(self.arguments, config)
        arguments = with_default_length(arguments, self.model, examples_per_epoch, batch_size, self._tokens_per_example)
        if arguments.num_train_epochs is None:
            self.total_steps = arguments.max_steps or 0
        elif examples_per_epoch is None:
            raise CtxError(
                "A stream has no known number of epochs.",
                location=f"--num_train_epochs {arguments.num_train_epochs}",
                hint="pass --max_steps instead, or remove --streaming.",
            )
        else:
            self.total_steps = max(round(arguments.num_train_epochs * examples_per_epoch / batch_size), 1)
        if line := describe_defaults(self.arguments, arguments, config, self.total_steps):
            print_status(line, self.accelerator.is_main_process)
        self.arguments = arguments

    def _choose_learning_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the optimizer's rates by the main process's result of a range test, whose curve is saved; a resumed
        run restores them with the schedule. The position in the data follows from the step, so the test has its own
        batches."""
        accelerator, arguments = self.accelerator, self.arguments
        micro_batches = arguments.gradient_accumulation_steps
        training_step = replace(self.training_step, recurrent_states=self._recurrent_states())
        batches = training_batches(accelerator, self.examples, self.collate, arguments, 0, self.contiguous)
        try:
            test = learning_rate_range_test(training_step, batches, micro_batches, lambda: self._call("on_step_begin"))
        finally:
            batches.close()
        if accelerator.is_main_process:
            test.save(arguments.output_dir)
            file = Path(arguments.output_dir) / RANGE_TEST_FILE
            line = f"learning rate {test.suggestion:g}: the loss fell fastest there in the range test, see {file}"
            print_status(line)
        (learning_rate,) = broadcast_object_list([test.suggestion])
        for group in optimizer.param_groups:
            group["lr"] *= learning_rate

    def _tokens_per_example(self) -> float:
        """Mean number of tokens of some examples."""
        tokens = number = 0
        examples: Any = self.examples
        for batch in sample_batches(examples, _SAMPLED_EXAMPLES, self.arguments.per_device_batch_size):
            tokens, number = tokens + int(count_items([dict(self.collate(batch))], ())[-1]), number + len(batch)
        return tokens / number

    def _train(self, signals: SignalWatch) -> None:
        state, arguments, control = self.training_state, self.arguments, self.control
        self.prepared_model.train()
        if arguments.resume == "finish" and state.step < self.total_steps:
            self._finish()
        self.stopwatch.start()
        if state.step == 0 and 0 in arguments.save_at:
            self._save()
        while state.step < self.total_steps and not control.should_training_stop:
            control.should_log = control.should_evaluate = control.should_save = False
            state.check_saving()
            self._call("on_step_begin")
            batches = next_batches(self.batches, arguments.gradient_accumulation_steps)
            scalars, indices = self.training_step(batches)
            self.learning_rate = self.training_step.learning_rate
            self.scheduler.step()
            state.step += 1
            self.callback_state.global_step = state.step
            self.callback_state.epoch = self._epochs(state.step)
            self.step_metrics.add(state.step, scalars, indices)
            is_report_due = self.log.advance()
            self._call("on_step_end")

            is_last = state.step == self.total_steps or control.should_training_stop
            if is_last or control.should_log or _is_due(state.step, arguments.logging_steps):
                self._log()
            else:
                if is_report_due:
                    loss, tokens = self.step_metrics.latest()
                    self._show(loss, self.timed_tokens + tokens - self.resumed_tokens)
                self.step_metrics.settle(only_if_full=True)
            if is_last or control.should_evaluate or _is_due(state.step, arguments.eval_steps):
                self._evaluate(is_last)
            signal = signals.received()
            is_save_due = _is_due(state.step, arguments.save_steps) or state.step in arguments.save_at
            if is_last or signal or control.should_save or is_save_due:
                self._save()
            if signal and not is_last:
                state.finish_saving()
                self.accelerator.wait_for_everyone()  # the launcher ends all processes when the first one exits
                raise InterruptionError(signal, state.step, str(state.path))
        self._call("on_train_end")
        self.stopwatch.pause()

    def _finish(self) -> None:
        """Log and evaluate the steps up to the checkpoint, and stop."""
        if values := self.step_metrics.flush():
            self.training_state.tokens += int(values["tokens"])
            self.log.record(self.training_state.step, values | {"tokens": self.training_state.tokens})
        self.control.should_training_stop = True
        self._evaluate(is_last=True)

    def _log(self) -> None:
        values = self.step_metrics.flush()
        tokens = values.pop("tokens")
        self.training_state.tokens += int(tokens)
        self.timed_tokens += tokens - self.resumed_tokens
        self.stopwatch.pause()
        tokens_per_second = (tokens - self.resumed_tokens) / (self.stopwatch.seconds - self.logged_seconds)
        self.logged_seconds = self.stopwatch.seconds
        self.resumed_tokens = 0
        if self.examples_per_epoch is not None:
            values["epoch"] = round(self._epochs(self.training_state.step), 4)
        values["learning_rate"] = float(self.learning_rate)
        values |= {"tokens": self.training_state.tokens, "tokens_per_second": tokens_per_second}
        self.log.record(self.training_state.step, values)
        fields = {"lr": values["learning_rate"], "gradient norm": values.get("grad_norm", math.nan)}
        self._show(values["loss"], self.timed_tokens, **fields)
        self._call("on_log", logs=values)
        self.stopwatch.start()

    def _show(self, loss: float, tokens: float, **fields: float) -> None:
        self.log.show(self.training_state.step, loss, tokens, self.stopwatch.elapsed, **fields)

    def _evaluate(self, is_last: bool) -> None:
        if self.evaluate is None:
            return
        self.stopwatch.pause()
        self.prepared_model.eval()
        with nullcontext() if self.averaging is None else self.averaging.applied():
            self.training_state.metrics = self.evaluate(self.prepared_model, self.accelerator)
        self.control.should_evaluate = False
        self._call("on_evaluate", metrics=self.training_state.metrics)
        if self.control.should_evaluate and is_last:  # a callback changed the weights
            self.training_state.metrics = self.evaluate(self.prepared_model, self.accelerator)
        if self.averaging is not None:
            self.averaging.observe(self.training_state.step, self.training_state.metrics)
        self.prepared_model.train()
        self.log.record(self.training_state.step, self.training_state.metrics)
        self.stopwatch.start()

    def _save(self) -> None:
        self.step_metrics.settle()  # raises for a non-finite step before it is saved
        require_finite_weights(self.training_step.unwrapped_model, self.training_state.step)
        self.stopwatch.pause()
        with self.training_state.saving() as checkpoint:
            if checkpoint is not None:
                self.batches.save_stream(checkpoint, self.accelerator.process_index)
                if self.accelerator.is_main_process:
                    self._call("on_save", checkpoint=checkpoint)
        self.stopwatch.start()

    def _call(self, event: str, **event_arguments: Any) -> None:
        """Call an event of all callbacks, which change `self.control` in place."""
        for callback in self.callbacks:
            getattr(callback, event)(
                self.arguments, self.callback_state, self.control, **self.callback_objects, **event_arguments
            )

    def _epochs(self, steps: int) -> float:
        """Passes over the data after some steps; 0 for a stream."""
        return steps * self.batch_size / self.examples_per_epoch if self.examples_per_epoch else 0.0


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


@contextmanager
def retain_freed_memory() -> Iterator[None]:
    """Keep freed memory for the next step, which allocates the same activations and gradients, instead of returning it
    to the operating system, which would zero its pages again. No effect with allocators other than glibc's."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    # blocks below the threshold come from the heap; older versions of glibc have a maximum
    if (
        libc is None
        or not hasattr(libc, "mallopt")
        or not any(libc.mallopt(_MMAP_THRESHOLD, size) for size in (_NEVER_MMAP, _ADJUSTED_MMAP))
    ):
        yield
        return
    libc.mallopt(_TRIM_THRESHOLD, _NEVER_TRIM)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _ADJUSTED_MMAP)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _ADJUSTED_MMAP)
        libc.malloc_trim(0)


def _configure_deepspeed(accelerator: Accelerator, arguments: LoopArguments, model: PreTrainedModel) -> None:
    """Pass the arguments to DeepSpeed, whose engine clips the gradients and updates the weights in the backward pass;
    raises CtxError for an optimizer or model that it does not support, and for a learning rate that depends on the
    targets of a step."""
    require_sharded_updates(arguments.optimizer, "DeepSpeed")
    if hasattr(model, "set_sparse_gradients"):
        raise CtxError(
            f"DeepSpeed does not support the sparse gradients of {type(model).__name__}.",
            location="accelerate launch",
            hint="use data parallelism, as in scripts/accelerate/ddp_cpu.yaml.",
        )
    if arguments.lr_reference_targets:
        raise CtxError(
            "DeepSpeed does not support a learning rate that is scaled by the number of targets.",
            location=f"--lr_reference_targets {arguments.lr_reference_targets:g}",
            hint="omit it, or use FSDP, as in fsdp2.yaml.",
        )
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = arguments.per_device_batch_size  # accelerate reads it from a data loader
    config["gradient_clipping"] = arguments.max_grad_norm
