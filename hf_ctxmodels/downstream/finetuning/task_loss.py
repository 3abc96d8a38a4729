"""The training loss of fine-tuning, with label smoothing and for heads of transformers."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.base import ItemCounts, mean_over_targets
from hf_ctxmodels.training.training_step import count_targets


class TaskLoss:
    """The loss of a micro-batch in fine-tuning, for `training.loop.TrainingLoop` and `CtxTrainer`.

    - A head of this package computes the loss in its forward.
    - A head of transformers returns the mean over its batch, which is multiplied by the batch's number of targets and
      divided by `num_items_in_batch`: exact for one term, and for spans, whose two terms have equal numbers of targets.
    - With label smoothing (Szegedy et al. 2016, arXiv 1512.00567, section 7) the target distribution is 1 - smoothing
      at the label plus `smoothing` spread over the vocabulary. `config.label_smoothing` is set, if it exists.

    Evaluation uses the model's own loss.

    Args:
        model: The model, not wrapped.
        targets: The batch entries that the task's loss counts, for heads of transformers.
        label_smoothing: From 0 (no smoothing) to below 1; above 0 for encoder-decoders with one loss term.

    Raises:
        CtxError: The smoothing is out of range, or the model does not support it.

    Example:
        >>> loss_function = TaskLoss(model, ["labels"], label_smoothing=0.1)  # doctest: +SKIP
        >>> CtxTrainer(model, arguments, train_dataset=data, loss_function=loss_function).train()  # doctest: +SKIP
    """

    targets: tuple[str, ...]

    def __init__(self, model: PreTrainedModel, targets: Sequence[str], label_smoothing: float = 0.0) -> None:
        self._normalizes_itself = hasattr(model, "loss_targets")
        self.targets = tuple(getattr(model, "loss_targets", targets))
        self._label_smoothing = label_smoothing
        if not 0 <= label_smoothing < 1:
            raise CtxError(
                "Label smoothing must be from 0 to below 1.",
                location=f"--label_smoothing {label_smoothing}",
                hint="use 0.1, for example.",
            )
        if isinstance(model, CtxPreTrainedModel) and hasattr(model.config, "label_smoothing"):
            model.config.label_smoothing = label_smoothing
            self._label_smoothing = 0.0
        elif label_smoothing:
            if self.targets != ("labels",):
                raise CtxError(
                    f"The loss of {type(model).__name__} has several terms.", hint="remove --label_smoothing."
                )
            if not model.config.is_encoder_decoder:
                raise CtxError(f"{type(model).__name__} is not an encoder-decoder.", hint="remove --label_smoothing.")
        has_logits_option = "return_logits" in inspect.signature(model.forward).parameters
        self._logits_option = {"return_logits": True} if has_logits_option else {}

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], num_items_in_batch: ItemCounts) -> ModelOutput:
        """The output of the model, possibly wrapped for several processes, with the training loss; `num_items_in_batch`
        is the number of targets to divide by, see `heads.base.number_of_targets`."""
        if self._label_smoothing:
            output = model(**batch, **self._logits_option)
            output.loss = smoothed_cross_entropy(
                output.logits, batch["labels"], self._label_smoothing, num_items_in_batch
            )
            return output
        if self._normalizes_itself:
            return model(**batch, num_items_in_batch=num_items_in_batch)
        output, total = model(**batch), num_items_in_batch
        if total is not None:
            total = total[self.targets[0]] if isinstance(total, Mapping) else total
            output.loss = output.loss * count_targets([batch], self.targets)[0] / total
        return output


def smoothed_cross_entropy(
    logits: Tensor | None, labels: Tensor, label_smoothing: float, num_items_in_batch: ItemCounts = None
) -> Tensor:
    """Mean cross-entropy (nats) of logits (batch, length, vocabulary) with label smoothing; labels (batch, length) of
    -100 are ignored.

    Raises:
        CtxError: There are no logits for the labels.
    """
    if logits is None or logits.shape[:-1] != labels.shape:
        raise CtxError("The head has no logits at the positions of its labels.", hint="remove --label_smoothing.")
    is_target = labels != IGNORE_INDEX
    total = F.cross_entropy(
        logits[is_target].float(), labels[is_target], reduction="sum", label_smoothing=label_smoothing
    )
    return mean_over_targets(total, labels, "labels", num_items_in_batch)
