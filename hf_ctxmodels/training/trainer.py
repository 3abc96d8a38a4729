"""transformers' Trainer for heads whose loss has several terms."""

from typing import Any

import torch
from transformers import Trainer

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.training.batches import count_targets
from hf_ctxmodels.training.parallelism import inactive_parallelism_warnings

_TRAINER_COUNTS = ("labels",)


class CtxTrainer(Trainer):
    """transformers' Trainer, exact under gradient accumulation and on several devices for every head of this package.

    Trainer counts the targets of a step in `labels` alone and passes the model one number. That is exact for heads with
    one term. Heads with other or several terms (`accepts_loss_kwargs = False`: masked language modeling with a sentence
    task, replaced token detection, question answering, cross-view training, GenSen, the language models of lmseq2seq)
    average the means of the micro-batches there, which is the mean over all targets only where every micro-batch has
    equally many of each term. This class passes these heads the number of targets of each term in the whole step, as
    this package's own loop does.

    Batches may lack some of a head's targets, as those of an objective with an option that leaves a term out:
    evaluation needs `labels` alone. Trainer reports no loss there, unless TrainingArguments has label_names=["labels"].

    `torch.nn.DataParallel` cannot split such a mapping: there, and for models of other packages, it is Trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        state = self.accelerator
        for line in inactive_parallelism_warnings(state.distributed_type, state.num_processes, state.device.type):
            print_status(line, state.is_main_process)
        targets = tuple(getattr(self.model, "loss_targets", ()))
        exact_already = targets == _TRAINER_COUNTS and self.model_accepts_loss_kwargs  # type: ignore[has-type]
        self._counted = () if exact_already or self.args.n_gpu > 1 else targets
        if self._counted:
            self.model_accepts_loss_kwargs = True

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """See Trainer; a batch with `labels` has a loss."""
        names = self.label_names  # type: ignore[has-type]
        if self.args.label_names is None and inputs.get("labels") is not None:
            self.label_names = [name for name in names if inputs.get(name) is not None]
        try:
            return super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.label_names = names

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """Target -> its number over the micro-batches, and over the processes where Trainer would add them up."""
        if not any(name in batch for batch in batch_samples for name in self._counted):
            return super()._get_num_items_in_batch(batch_samples, device)
        counts = count_targets(batch_samples, self._counted).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts[None]).sum(dim=0)
        given = [any(name in batch for batch in batch_samples) for name in self._counted]
        found = zip(self._counted, counts, given, strict=True)
        return {name: count.clamp(min=1) for name, count, there in found if there or count > 0}
