"""Upstream heads in our training loop."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ctxmodels.training.batches import count_items


def count_loss_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Give a head of transformers what the loop asks of a model; heads that have it already stay as they are.

    Upstream heads return the mean loss over the batch they see. Afterwards the head names its `loss_targets`, and its
    forward takes the mapping `num_items_in_batch`: the mean is multiplied by the batch's own number of targets and
    divided by the number in the mapping, which is exact for heads with one term, and for spans, whose two terms have
    equally many targets.

    Args:
        targets: the entries of a batch that the loss counts.
    """
    if hasattr(model, "loss_targets"):
        return
    forward = model.forward

    @wraps(forward)
    def counted(*args: Any, num_items_in_batch: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if num_items_in_batch is not None:
            here: torch.Tensor = count_items([{name: kwargs[name] for name in targets}], targets)[0]
            output.loss = output.loss * here / num_items_in_batch[targets[0]]
        return output

    model.forward = counted  # type: ignore[method-assign]
    model.loss_targets = targets
