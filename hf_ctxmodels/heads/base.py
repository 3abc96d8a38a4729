"""The base of all heads, and losses that are sums over targets divided by their number.

`num_items_in_batch` replaces that number by the count over a larger batch (accumulated micro-batches, other
processes), so that accumulation is exact: a number for heads with one term (from Trainer), or a mapping from target
names to numbers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import ModelOutput

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_id_type, check_tensors, is_traced
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.layer_mix import LayerMix, encode_with_layer_mix, num_hidden_states
from hf_ctxmodels.layers.hook_points import HookPoint
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.layers.pooling import Pooling

ItemCounts = int | Tensor | Mapping[str, int | Tensor] | None


def validate_targets(targets: Any, name: str, *shapes: Sequence[int]) -> Tensor:
    """The targets as int64, once they are a tensor of integers of one of the shapes. No value is read.

    Args:
        targets: Class numbers or token ids, as given to `forward`.
        name: Their argument there.
        shapes: Those that are right; none for any. Not checked while a graph is being traced.

    Raises:
        CtxError: They are not.
    """
    check_id_type(name, targets)
    check_target_shape(targets, name, *shapes)
    return targets.long()


def validate_sequence_targets(targets: Any, name: str, rows: int) -> Tensor:
    """`validate_targets` of (rows,) or (rows, 1) targets, as (rows,)."""
    return validate_targets(targets, name, (rows,), (rows, 1)).reshape(-1)


def check_target_shape(targets: Tensor, name: str, *shapes: Sequence[int]) -> None:
    """Raise CtxError if there are shapes, of which the targets have none. Skipped while a graph is being traced."""
    if not shapes or is_traced(targets) or tuple(targets.shape) in (expected := [tuple(each) for each in shapes]):
        return
    raise CtxError(
        f"{name} is {tuple(targets.shape)}, expected {' or '.join(map(str, expected))}.",
        hint=f"{name} and the inputs must be of the same batch.",
    )


def mean_over_targets(total: Tensor, targets: Tensor, name: str, counts: ItemCounts) -> Tensor:
    """Divide a term's summed loss by its number of targets.

    Args:
        total: The sum over this batch.
        targets: This batch's targets; -100 is not counted.
        name: Their argument in `forward`.
        counts: Their number over a larger batch, see the module's docstring; None counts `targets`.
    """
    return total / number_of_targets(targets, name, counts)


def number_of_targets(targets: Tensor, name: str, counts: ItemCounts) -> int | Tensor:
    """The divisor of a term's summed loss, at least 1; arguments as in `mean_over_targets`."""
    count = counts.get(name) if isinstance(counts, Mapping) else counts
    if count is None:
        count = (targets != IGNORE_INDEX).sum().clamp(min=1) if not targets.is_floating_point() else targets.numel()
    return count


def cross_entropy_over_targets(logits: Tensor, targets: Tensor, name: str, counts: ItemCounts = None) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not -100.

    Args:
        logits: (..., classes).
        targets: (...) class ids.
        name, counts: As in `mean_over_targets`.

    Raises:
        CtxError: Targets of another type or shape, or one outside [0, classes).
    """
    classes = logits.shape[-1]
    targets = validate_targets(targets, name, logits.shape[:-1])
    check_classes(targets, classes, name)
    total = F.cross_entropy(
        logits.reshape(-1, classes).float(), targets.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return mean_over_targets(total, targets, name, counts)


def check_classes(targets: Tensor, classes: int, name: str) -> None:
    """Raise CtxError if a target that is not -100 is outside [0, classes). Skipped while compiling."""
    if torch.compiler.is_compiling():
        return
    bad = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= classes))]
    if bad.numel():
        raise CtxError(
            f"{name} holds {int(bad[0])}, outside [0, {classes}) and not -100 (ignored). "
            f"Set config.num_labels (now {classes}) to the number of classes, or correct the labels."
        )


def language_modeling_loss(
    decoder: nn.Linear,
    states: Tensor,
    labels: Tensor,
    counts: ItemCounts,
    name: str = "labels",
    *,
    summed_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean cross-entropy in nats of a softmax over the vocabulary, at the labelled positions only.

    Args:
        decoder: The linear map to the vocabulary's logits.
        states: (targets, hidden) the states where `labels` is not -100.
        labels: (...) token ids.
        counts, name: As in `mean_over_targets`.
        summed_loss: (targets, hidden) states and (targets,) ids -> summed cross-entropy; None for that of `decoder`.

    Raises:
        CtxError: Labels of another type, or one outside the vocabulary.
    """
    labels = validate_targets(labels, name)
    check_token_labels(labels, decoder.out_features, name)
    targets = labels[labels != IGNORE_INDEX]
    total = summed_cross_entropy(decoder, states, targets) if summed_loss is None else summed_loss(states, targets)
    return mean_over_targets(total, labels, name, counts)


def loss_from_logits(logits: Tensor, labels: Tensor, counts: ItemCounts, name: str = "labels") -> Tensor:
    """`language_modeling_loss` where the logits of all positions are there.

    Args:
        logits: (..., vocabulary).
        labels: (...) token ids.
        counts, name: As in `mean_over_targets`.

    Raises:
        CtxError: Labels of another type or shape, or one outside the vocabulary.
    """
    labels = validate_targets(labels, name, logits.shape[:-1])
    check_token_labels(labels, logits.shape[-1], name)
    targets = labels != IGNORE_INDEX
    total = F.cross_entropy(logits[targets].float(), labels[targets], reduction="sum")
    return mean_over_targets(total, labels, name, counts)


def check_token_labels(labels: Tensor, vocab_size: int, name: str = "labels") -> None:
    """Raise CtxError if a label that is not -100 is outside the vocabulary. Skipped while compiling."""
    if torch.compiler.is_compiling():
        return
    bad = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocab_size))]
    if bad.numel():
        raise CtxError(f"{name} holds {int(bad[0])}, outside [0, vocab_size={vocab_size}).")


def has_targets(targets: Tensor | None) -> bool:
    """Whether a target is not -100, or may be, as while a graph is being traced."""
    return targets is not None and (is_traced(targets) or bool((targets != IGNORE_INDEX).any()))


def accuracy_counts(logits: Tensor, targets: Tensor) -> Tensor:
    """(2,): number of targets with the largest logit, and number of targets.

    The output field `metrics` of a pretraining head is a mapping of name -> (numerator, denominator), both summed over
    the batch; the training loop sums them and logs the ratio.

    Args:
        logits: (..., classes).
        targets: (...) class ids; -100 is ignored.
    """
    counted = targets != IGNORE_INDEX
    return torch.stack([((logits.argmax(-1) == targets) & counted).sum(), counted.sum()]).float()


def with_named_argument(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with an argument in its signature that it takes among its `**kwargs`, if it has any."""
    signature = inspect.signature(function)
    *parameters, rest = signature.parameters.values()
    if name in signature.parameters or rest.kind is not inspect.Parameter.VAR_KEYWORD:
        return function

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    argument = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
    named.__signature__ = signature.replace(parameters=[*parameters, argument, rest])  # type: ignore[attr-defined]
    return named


class HeadModel(CtxPreTrainedModel):
    """A head on a family's encoder, which is an attribute named by the family's `base_model_prefix`.

    A family binds it in a class that derives from both: `class CtxXForY(heads.ForY, CtxXHeadModel)`, where
    `CtxXHeadModel` has the `encoder_class`. `build_head` creates the head's modules. Every `forward` raises CtxError
    for inputs that do not match each other or the model.

    Attributes:
        encoder_class: The family's base model; its `extra_input_ids`, if it has any, are arguments of `forward`, too.
        pools: Whether the head uses `pooler_output`.
        accepts_loss_kwargs: Whether Trainer may pass one `num_items_in_batch`: exact for heads with one term only; for
            others there is `hf_ctxmodels.training.trainer.CtxTrainer`.
        uses_pooler: Whether this instance does.
        output_layer: Name of the linear map to the vocabulary's logits, such as "mlm_head.decoder"; None without one.
        supports_layer_mix: Whether the head may read a mix of the layers (`config.layer_mix`).
        has_custom_layer_mix: Whether the family's heads mix the layers by themselves.
        layer_mix: The mix of the layers that the head reads; None for the last layer.
        feature_lookup: In place of a frozen encoder, see `downstream.finetuning.feature_cache`; None for the encoder.
    """

    encoder_class: ClassVar[type[CtxPreTrainedModel]]
    pools: ClassVar[bool] = False
    accepts_loss_kwargs = True
    output_layer: str | None = None
    supports_layer_mix: ClassVar[bool] = False
    has_custom_layer_mix: ClassVar[bool] = False
    layer_mix: LayerMix | None
    feature_lookup: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the encoder's `extra_input_ids` in the signature of `forward`, by which Trainer keeps their columns."""
        super().__init_subclass__(**kwargs)
        for name in getattr(getattr(cls, "encoder_class", None), "extra_input_ids", ()):
            if (named := with_named_argument(cls.forward, name)) is not cls.forward:
                cls.forward = named  # type: ignore[method-assign]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.build_encoder(config))
        mixes = self.supports_layer_mix and not self.has_custom_layer_mix and config.layer_mix
        self.layer_mix = LayerMix(num_hidden_states(self.base_model)) if mixes else None
        self.decoder_input = HookPoint()
        self.build_head(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """New weights; those of the mix give the average of the layers."""
        if isinstance(module, LayerMix):
            init.zeros_(module.weights)
            init.ones_(module.gamma)
        else:
            super()._init_weights(module)

    def build_encoder(self, config: Any) -> CtxPreTrainedModel:
        """Create the encoder, with a pooler if the head uses it."""
        return self.encoder_class(config, add_pooling_layer=self.uses_pooler)

    @property
    def uses_pooler(self) -> bool:
        """Whether the head reads the `pooler_output` of the encoder."""
        return self.pools and self.pooling is None

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of the tokens' states; None for the encoder's `pooler_output`."""
        return None

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear map to the vocabulary's logits, or None."""
        return None if self.output_layer is None else self.get_submodule(self.output_layer)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the linear map to the vocabulary's logits."""
        if self.output_layer is not None:
            self.set_submodule(self.output_layer, new_embeddings)

    def build_head(self, config: Any) -> None:
        """Create the head's own modules."""
        raise NotImplementedError

    def input_shape(self, input_ids: Any, inputs_embeds: Any) -> tuple[int, int] | None:
        """(batch, length) of the ids or the embeddings; None if the encoder will refuse them for their dimensions.

        Raises:
            CtxError: One of them is no tensor.
        """
        check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
        given = input_ids if input_ids is not None else inputs_embeds
        axes = 3 if input_ids is None else 2 + len(self.token_id_axes)
        return None if given is None or given.dim() != axes or not given.numel() else (given.shape[0], given.shape[1])

    def validate_token_targets(
        self, targets: Any, name: str, input_ids: Any, inputs_embeds: Any = None, *more: int
    ) -> Tensor | None:
        """`validate_targets` of (batch, length, *more) targets, one for each token of the input; None without targets, and
        for an input that the encoder will refuse.

        What a head does with targets before it encodes comes after this.
        """
        shape = self.input_shape(input_ids, inputs_embeds)
        return None if targets is None or shape is None else validate_targets(targets, name, (*shape, *more))

    def returns_logits(self, return_logits: bool | None) -> bool:
        """Whether a language model returns, with labels too, the logits of all positions, which it otherwise does not
        compute.

        Args:
            return_logits: Of the call; None for `config.return_logits_with_labels`. If that is None too: in
                evaluation without gradients, as Trainer evaluates, for its metrics.
        """
        chosen = self.config.return_logits_with_labels if return_logits is None else return_logits
        return not (self.training or torch.is_grad_enabled()) if chosen is None else chosen

    def with_unused_parameters(self, loss: Tensor | None) -> Tensor | None:
        """The loss with zero gradients for parameters that the batch did not use, which distributed training needs:
        for heads without a kind of batch that uses all parameters."""
        if loss is None or not self.training or not (distributed.is_available() and distributed.is_initialized()):
            return loss
        return loss + 0.0 * torch.stack([each.sum() for each in self.parameters() if each.requires_grad]).sum()

    def penalty(self) -> Tensor | None:
        """The training loss's regularization term, a function of the parameters only; None without one."""
        penalties = [regularizer() for regularizer in self.base_model.regularizers]
        penalties = [penalty for penalty in penalties if penalty is not None]
        return torch.stack(penalties).sum() if penalties else None

    def add_regularization(self, loss: Tensor, encoded: Any, targets: Tensor, name: str, counts: ItemCounts) -> Tensor:
        """The loss plus each target's share of `penalty`, so that the shares of micro-batches sum to one penalty.

        Args:
            loss: The task's loss.
            encoded: The encoder's output.
            targets, name, counts: As in `mean_over_targets`.
        """
        penalty = self.penalty() if self.training else None
        if penalty is None:
            return loss
        number = targets.numel() if targets.is_floating_point() else (targets != IGNORE_INDEX).sum()
        return loss + mean_over_targets(penalty * number, targets, name, counts)

    def build_output(self, kind: type[ModelOutput], encoded: Any, **found: Any) -> Any:
        """The output of a task's head, with what the encoder recorded.

        Args:
            kind: Its class.
            encoded: The encoder's output.
            found: The fields of the head itself.
        """
        return kind(**found, hidden_states=encoded.hidden_states, attentions=encoded.attentions)

    def encode(self, **kwargs: Any) -> Any:
        """Run the encoder; always returns a model output. With a `layer_mix` its last state is the mix."""
        if self.layer_mix is None and self.feature_lookup is None:
            return self.base_model(return_dict=True, **kwargs)
        return encode_with_layer_mix(self.base_model, self.layer_mix, self.feature_lookup, **kwargs)

    def reference_config(self) -> dict[str, Any]:
        """The reference class's configuration; raises CtxError if its head reads one layer where this one mixes."""
        if self.layer_mix is not None:
            raise CtxError(
                f"transformers' peer of {type(self).__name__} does not mix layers.", hint="use save_pretrained."
            )
        return super().reference_config()
