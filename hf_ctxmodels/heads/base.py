"""What every head has: the encoder it sits on, and losses that are sums over targets divided by their number.

`num_items_in_batch` replaces that number by the count over a larger batch (accumulated micro-batches, other
processes), so that accumulation is exact: a number for heads with one term (what Trainer passes), a mapping from target
name to number for all heads.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import Pooling

ItemCounts = int | Tensor | Mapping[str, int | Tensor] | None


def mean_over_targets(total: Tensor, targets: Tensor, name: str, counts: ItemCounts) -> Tensor:
    """Divide a term's summed loss by its number of targets.

    Args:
        total: The sum over this batch.
        targets: This batch's targets; those equal to -100 do not count.
        name: The `forward` argument they came in as.
        counts: Their number over a larger batch, see the module's docstring; None counts `targets`.
    """
    count = counts.get(name) if isinstance(counts, Mapping) else counts
    if count is None:
        count = (targets != IGNORED).sum().clamp(min=1) if not targets.is_floating_point() else targets.numel()
    return total / count


def cross_entropy_over_targets(logits: Tensor, targets: Tensor, name: str, counts: ItemCounts = None) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not -100.

    Args:
        logits: (..., classes).
        targets: (...) class ids.
        name, counts: As in `mean_over_targets`.

    Raises:
        CtxError: A target outside [0, classes).
    """
    classes = logits.shape[-1]
    check_classes(targets, classes, name)
    total = F.cross_entropy(
        logits.reshape(-1, classes).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return mean_over_targets(total, targets, name, counts)


def check_classes(targets: Tensor, classes: int, name: str) -> None:
    """Raise CtxError if one of the targets that are not -100 is outside [0, classes). Skipped while compiling."""
    if torch.compiler.is_compiling():
        return
    bad = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
    if bad.numel():
        raise CtxError(
            f"{name} holds {int(bad[0])}, outside [0, {classes}) and not -100 (ignored). "
            f"Set config.num_labels (now {classes}) to the number of classes, or mend the labels."
        )


def vocabulary_loss(
    summed_loss: Callable[[Tensor, Tensor], Tensor],
    states: Tensor,
    labels: Tensor,
    vocab_size: int,
    counts: ItemCounts,
    name: str = "labels",
) -> Tensor:
    """Mean cross-entropy in nats of a prediction head at the labelled positions.

    Args:
        summed_loss: (targets, hidden) states and (targets,) ids -> their summed cross-entropy.
        states: (targets, hidden) the encoder's output where `labels` is not -100.
        labels: (...) ids.
        vocab_size: Number of tokens.
        counts, name: As in `mean_over_targets`.

    Raises:
        CtxError: A label outside the vocabulary.
    """
    targets = labels[labels != IGNORED]
    if not torch.compiler.is_compiling():
        bad = targets[(targets < 0) | (targets >= vocab_size)]
        if bad.numel():
            raise CtxError(f"{name} holds {int(bad[0])}, outside [0, vocab_size={vocab_size}).")
    return mean_over_targets(summed_loss(states, targets), labels, name, counts)


def accuracy_counts(logits: Tensor, targets: Tensor) -> Tensor:
    """(2,): how many targets have the largest logit, and how many targets there are: an accuracy, as outputs hold it.

    A pretraining head reports what it counts in its output field `metrics`, name -> (numerator, denominator), both
    summed over the batch; the training loop adds them up and logs the ratio.

    Args:
        logits: (..., classes).
        targets: (...) class ids; -100 is ignored.
    """
    counted = targets != IGNORED
    return torch.stack([((logits.argmax(-1) == targets) & counted).sum(), counted.sum()]).float()


class HeadModel(CtxPreTrainedModel):
    """A head on a family's encoder, which it holds under the family's `base_model_prefix`.

    Attributes:
        encoder_class: The family's base model.
        pools: Whether the head reads `pooler_output`.
        accepts_loss_kwargs: Whether Trainer may pass one `num_items_in_batch`: exact for heads with one term only.
    """

    encoder_class: ClassVar[type[CtxPreTrainedModel]]
    pools: ClassVar[bool] = False
    accepts_loss_kwargs = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.build_encoder(config))
        self.build_head(config)
        self.post_init()

    def build_encoder(self, config: Any) -> CtxPreTrainedModel:
        """Create the encoder, with a pooler if the head reads its output."""
        return self.encoder_class(config, add_pooling_layer=self.pools and self.pooling is None)

    @property
    def pooling(self) -> Pooling | None:
        """How it makes a sequence's vector of the tokens' states; None for the encoder's `pooler_output`."""
        return None

    def build_head(self, config: Any) -> None:
        """Create the head's own modules."""
        raise NotImplementedError

    def with_every_parameter(self, loss: Tensor | None) -> Tensor | None:
        """The same loss. Among several processes that train, every parameter needs a gradient, if only zero: for heads
        of which no kind of batch uses all."""
        if loss is None or not self.training or not (distributed.is_available() and distributed.is_initialized()):
            return loss
        return loss + 0.0 * torch.stack([each.sum() for each in self.parameters() if each.requires_grad]).sum()

    def penalty(self) -> Tensor | None:
        """What is added to the loss in training, whatever the batch is; None for nothing."""
        return None

    def penalised(self, loss: Tensor, targets: Tensor, name: str, counts: ItemCounts) -> Tensor:
        """The loss with `penalty`: each target's share of it, so that micro-batches add up to one. See
        `mean_over_targets` for the arguments."""
        penalty = self.penalty() if self.training else None
        if penalty is None:
            return loss
        number = targets.numel() if targets.is_floating_point() else (targets != IGNORED).sum()
        return loss + mean_over_targets(penalty * number, targets, name, counts)

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; always returns a model output."""
        return self.base_model(return_dict=True, **kwargs)
