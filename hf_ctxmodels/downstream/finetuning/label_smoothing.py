"""Label smoothing for heads that write text (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""

import inspect
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.downstream.finetuning.forward_methods import Forward, replace_forward
from hf_ctxmodels.heads.base import ItemCounts, mean_over_targets


def smooth_labels(model: PreTrainedModel, smoothing: float) -> None:
    """Let a model's training loss be the cross-entropy with smoothed labels; in evaluation mode it stays as it is.

    The target distribution has 1 - smoothing at the label, and `smoothing` spread evenly over the whole vocabulary. The
    loss is the sum over targets divided by their number, or by `num_items_in_batch`, so it is exact under gradient
    accumulation and on several processes. A head that smooths by itself, by `config.label_smoothing`, is told to.

    Args:
        model: An encoder-decoder whose loss is one cross-entropy over `labels`; one of transformers after
            `count_loss_targets`.
        smoothing: From 0, which changes nothing, to below 1.

    Raises:
        CtxError: The value is out of range, the model is no encoder-decoder, or its loss has other terms.
    """
    if not 0 <= smoothing < 1:
        raise CtxError(
            "Label smoothing is a share of the probability, from 0 to below 1.",
            location=f"--label_smoothing {smoothing}",
            hint="use 0.1, for example.",
        )
    if isinstance(model, CtxPreTrainedModel) and hasattr(model.config, "label_smoothing"):
        model.config.label_smoothing = smoothing
        return
    if not smoothing:
        return
    if tuple(getattr(model, "loss_targets", ("labels",))) != ("labels",):
        raise CtxError(f"The loss of {type(model).__name__} has other terms.", hint="leave out --label_smoothing.")
    if not model.config.is_encoder_decoder:
        raise CtxError(f"{type(model).__name__} is no encoder-decoder.", hint="leave out --label_smoothing.")
    asked = {"return_logits": True} if "return_logits" in inspect.signature(model.forward).parameters else {}
    replace_forward(model, partial(_smoothed, smoothing=smoothing, asked=asked))


def _smoothed(forward: Forward, smoothing: float, asked: dict[str, Any]) -> Forward:
    """The forward with the smoothed loss in training; `asked` is what makes the other one give its logits."""

    def smoothed(
        model: PreTrainedModel,
        *args: Any,
        labels: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        **kwargs: Any,
    ) -> Any:
        counts = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if labels is None or not model.training:
            return forward(model, *args, labels=labels, **counts, **kwargs)
        output = forward(model, *args, labels=labels, **counts, **{**kwargs, **asked})
        output.loss = smoothed_loss(output.logits, labels, smoothing, num_items_in_batch)
        return output

    return smoothed


def smoothed_loss(logits: Tensor | None, labels: Tensor, smoothing: float, counts: ItemCounts = None) -> Tensor:
    """Mean cross-entropy in nats with smoothed labels.

    Args:
        logits: (batch, steps, vocabulary).
        labels: (batch, steps) token ids; -100 is ignored.
        smoothing: Share of the probability that is spread over the vocabulary.
        counts: As in `mean_over_targets`.

    Raises:
        CtxError: There are no logits for the labels.
    """
    if logits is None or logits.shape[:-1] != labels.shape:
        raise CtxError("The head has no logits at the positions of its labels.", hint="leave out --label_smoothing.")
    kept = labels != IGNORE_INDEX
    total = F.cross_entropy(logits[kept].float(), labels[kept], reduction="sum", label_smoothing=smoothing)
    return mean_over_targets(total, labels, "labels", counts)
