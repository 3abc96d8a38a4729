"""transformers' Trainer for heads whose loss has several terms."""

from typing import Any

import torch
from transformers import Trainer

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.training.distributed import inactive_parallelism_warnings
from hf_ctxmodels.training.training_step import LossFunction, count_targets

_TRAINER_TARGETS = ("labels",)


class CtxTrainer(Trainer):
    """transformers' Trainer, exact under gradient accumulation and on several devices for all heads of this package.

    Trainer counts the targets of a step in `labels` alone, which is exact for heads with one term. Heads with several
    terms, or with other targets (`accepts_loss_kwargs = False`), average the means of the micro-batches there. This
    class passes these heads the number of targets of each term in the whole step, as the training loop does.

    Batches may lack some of a head's targets: evaluation needs `labels` alone. `include_num_input_tokens_seen` counts
    words, and not characters, for models whose `input_ids` are (batch, length, characters).

    Under `torch.nn.DataParallel`, and for models of other packages, this class behaves like Trainer.

    Args:
        loss_function: The training loss, for example `finetuning.TaskLoss` with label smoothing; by default the loss of
            the model's forward, which evaluation uses in any case.

    Raises:
        CtxError: `label_smoothing_factor` is set, with which Trainer replaces the loss by the cross-entropy of `logits`
            and `labels`, and there is a `loss_function` or the model has another loss.
    """

    def __init__(self, *args: Any, loss_function: LossFunction | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        accelerator = self.accelerator
        for line in inactive_parallelism_warnings(
            accelerator.distributed_type, accelerator.num_processes, accelerator.device.type
        ):
            print_status(line, accelerator.is_main_process)
        self._loss_function = loss_function
        targets = tuple(getattr(self.model, "loss_targets", ())) if loss_function is None else loss_function.targets
        is_exact = targets == _TRAINER_TARGETS and self.model_accepts_loss_kwargs  # type: ignore[has-type]
        self._counted_targets = () if is_exact or self.args.n_gpu > 1 else targets
        if self._counted_targets:
            self.model_accepts_loss_kwargs = True
        has_other_loss = (
            loss_function is not None
            or bool(targets and not is_exact)
            or not getattr(self.model, "supports_label_smoothing", True)
        )
        if self.args.label_smoothing_factor and has_other_loss:
            loss_name = type(loss_function or self.model).__name__
            raise CtxError(
                f"With label_smoothing_factor={self.args.label_smoothing_factor}, Trainer replaces the loss by the "
                f"cross-entropy of logits and labels, which differs from the loss of {loss_name}.",
                hint="remove label_smoothing_factor, or pass a smoothed loss as loss_function, see TaskLoss.",
            )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of a batch, see Trainer; from `loss_function` in training."""
        if self._loss_function is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = self._loss_function(model, inputs, num_items_in_batch)
        loss = outputs.loss
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Prediction on a batch, see Trainer; the loss is computed if the batch has `labels`."""
        names = self.label_names  # type: ignore[has-type]
        if self.args.label_names is None and inputs.get("labels") is not None:
            self.label_names = [name for name in names if inputs.get(name) is not None]
        try:
            return super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.label_names = names

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of a batch, see Trainer; words, if their ids are characters."""
        if getattr(self.model, "token_id_axes", ()) and "input_ids" in inputs:
            inputs = {**inputs, "input_ids": inputs["input_ids"][..., 0]}
        super()._track_num_input_tokens(inputs)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Target -> its number over the micro-batches, and over the processes if Trainer averages over devices."""
        if not any(name in batch for batch in batch_samples for name in self._counted_targets):
            return super()._get_num_items_in_batch(batch_samples, device)
        counts = count_targets(batch_samples, self._counted_targets).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts[None]).sum(dim=0)
        return {
            name: count.clamp(min=1)
            for name, count in zip(self._counted_targets, counts, strict=True)
            if count > 0 or any(name in batch for batch in batch_samples)
        }
