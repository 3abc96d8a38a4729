"""Adapter for heads of transformers in the training loop."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ctxmodels.downstream.finetuning.forward_methods import Forward, replace_forward
from hf_ctxmodels.training.batches import count_items


def count_loss_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Add `loss_targets` and the argument `num_items_in_batch` to a head of transformers; other heads are unchanged.

    Such a head returns the mean loss over its batch, which is multiplied by the batch's number of targets and divided
    by the number in the mapping: exact for heads with one term, and for spans, whose terms have equal numbers of
    targets.

    Args:
        targets: The batch entries that the loss counts.
    """
    if hasattr(model, "loss_targets"):
        return

    def counting(forward: Forward) -> Forward:
        def counted(head: Any, *args: Any, num_items_in_batch: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
            output = forward(head, *args, **kwargs)
            if num_items_in_batch is not None:
                here: torch.Tensor = count_items([{name: kwargs[name] for name in targets}], targets)[0]
                output.loss = output.loss * here / num_items_in_batch[targets[0]]
            return output

        return counted

    replace_forward(model, counting)
    model.loss_targets = targets
