"""The base class of all heads, and the losses that they share.

Every loss is a sum over targets divided by their number. `num_items_in_batch` replaces this number by the number of
targets of a larger batch (accumulated micro-batches, other processes): a number for heads with one loss term, as
Trainer passes it, or a mapping from the names of the targets to their numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host, select_true
from hf_ctxmodels.core.inputs import check_id_type, check_tensors, mask_of_inputs, padding_mask_or_none
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.heads.layer_mix import build_layer_mix, encode_with_layer_mix
from hf_ctxmodels.layers.common import HookPoint, ScalarMix
from hf_ctxmodels.layers.cpu.linear import MAX_PREPACKED_BYTES, linear
from hf_ctxmodels.layers.lm_loss.cross_entropy import summed_cross_entropy
from hf_ctxmodels.layers.pooling import Pooling, build_token_mask, pool_tokens

ItemCounts = int | Tensor | Mapping[str, int | Tensor] | None
"""Number of targets, or name of the targets -> number; None for the numbers in the batch. See `heads.base`."""


def validate_targets(targets: Any, name: str, *shapes: Sequence[int]) -> Tensor:
    """Return targets as int64; raise CtxError for another type, or for a shape other than `shapes` (if any)."""
    check_id_type(name, targets)
    check_target_shape(targets, name, *shapes)
    return targets if targets.dtype == torch.int64 else on_host(Tensor.long, targets)


def validate_sequence_targets(targets: Any, name: str, batch_size: int) -> Tensor:
    """Check (batch,) or (batch, 1) targets as in `validate_targets`; returns (batch,) targets."""
    targets = validate_targets(targets, name, (batch_size,), (batch_size, 1))
    return on_host(lambda labels: labels.reshape(-1), targets)


def check_target_shape(targets: Tensor, name: str, *shapes: Sequence[int]) -> None:
    """Raise CtxError unless the targets have one of the shapes; without shapes, or in a traced graph, accept any."""
    expected = [tuple(shape) for shape in shapes]
    if expected and not is_traced(targets) and tuple(targets.shape) not in expected:
        raise CtxError(
            f"{name} is {tuple(targets.shape)}, expected {' or '.join(map(str, expected))}.",
            hint=f"pass {name} and inputs of the same batch.",
        )


def check_classes(targets: Tensor, classes: int, name: str, size_name: str = "classes") -> None:
    """Raise CtxError if a target that is not -100 is outside [0, classes). Skipped while compiling."""
    if torch.compiler.is_compiling():
        return
    targets = host_copy(targets)
    invalid = targets[(targets != IGNORE_INDEX) & ((targets < 0) | (targets >= classes))]
    if invalid.numel():
        raise CtxError(
            f"{name} contains {int(invalid[0])}, outside [0, {size_name}={classes}) and not -100 (ignored).",
            hint=f"correct {name}, or the size in the configuration (num_labels, vocab_size).",
        )


def mask_of_targets(targets: Tensor) -> Tensor:
    """(...) bool, True at the targets that are not -100."""
    return on_host(lambda labels: labels != IGNORE_INDEX, targets)


def ignore_padding(targets: Tensor, *masks: Tensor | None) -> Tensor:
    """Replace (batch, length) targets by -100 where one of the masks of this shape is 0."""
    for mask in masks:
        if mask is not None:
            targets = on_host(lambda labels, mask: labels.masked_fill(mask == 0, IGNORE_INDEX), targets, mask)
    return targets


def labeled_targets(targets: Tensor) -> Tensor:
    """(number,) the targets that are not -100, in row-major order."""
    return on_host(lambda labels: select_true(labels, labels != IGNORE_INDEX), targets)


def mean_over_targets(total: Tensor, targets: Tensor, name: str, num_items: ItemCounts) -> Tensor:
    """Divide the summed loss of a term by its number of targets, see `number_of_targets`."""
    return total / number_of_targets(targets, name, num_items)


def number_of_targets(targets: Tensor, name: str, num_items: ItemCounts) -> int | Tensor:
    """The number of targets of a loss term, at least 1: `num_items_in_batch` (see `ItemCounts`) for the argument `name`
    of `forward`; if it is None, the number of `targets` that are not -100."""
    count = num_items.get(name) if isinstance(num_items, Mapping) else num_items
    if count is None:
        count = targets.numel() if targets.is_floating_point() else (targets != IGNORE_INDEX).sum().clamp(min=1)
    return count


def cross_entropy_over_targets(logits: Tensor, targets: Tensor, name: str, num_items: ItemCounts = None) -> Tensor:
    """Mean cross-entropy in nats of (..., classes) logits over the (...) targets that are not -100.

    `name` and `num_items` as in `number_of_targets`. Raises CtxError for another type or shape, and for targets outside
    [0, classes).
    """
    classes = logits.shape[-1]
    targets = validate_targets(targets, name, logits.shape[:-1])
    check_classes(targets, classes, name)
    total = F.cross_entropy(
        logits.reshape(-1, classes).float(), targets.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return mean_over_targets(total, targets, name, num_items)


def sequence_classification_loss(
    logits: Tensor, targets: Tensor | None, name: str, num_items: ItemCounts
) -> tuple[Tensor | None, Tensor | None]:
    """Mean cross-entropy in nats of (batch, classes) logits, and `accuracy_counts`; (None, None) without targets."""
    if targets is None:
        return None, None
    targets = validate_sequence_targets(targets, name, len(logits))
    loss = cross_entropy_over_targets(logits, targets, name, num_items)
    return loss, accuracy_counts(logits.detach(), targets)


def language_modeling_loss(
    output_layer: nn.Linear,
    states: Tensor,
    labels: Tensor,
    num_items: ItemCounts,
    name: str = "labels",
    *,
    summed_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean cross-entropy in nats of a softmax over the vocabulary, computed at the labeled positions only.

    Args:
        states: (targets, hidden) the states where `labels` is not -100.
        labels: (...) token ids.
        num_items, name: As in `number_of_targets`.
        summed_loss: (targets, hidden) states and (targets,) ids -> summed loss; None for cross-entropy.
    """
    labels = validate_targets(labels, name)
    check_classes(labels, output_layer.out_features, name, "vocab_size")
    targets = labeled_targets(labels)
    total = summed_cross_entropy(output_layer, states, targets) if summed_loss is None else summed_loss(states, targets)
    return mean_over_targets(total, labels, name, num_items)


def loss_from_logits(logits: Tensor, labels: Tensor, num_items: ItemCounts, name: str = "labels") -> Tensor:
    """`language_modeling_loss` for (...) labels, from the (..., vocabulary) logits of all positions."""
    labels = validate_targets(labels, name, logits.shape[:-1])
    check_classes(labels, logits.shape[-1], name, "vocab_size")
    mask = mask_of_targets(labels)
    total = F.cross_entropy(select_true(logits, mask).float(), labeled_targets(labels), reduction="sum")
    return mean_over_targets(total, labels, name, num_items)


def has_targets(targets: Tensor | None) -> bool:
    """Whether any target is not -100. True for targets whose values are unknown because a graph is traced."""
    return targets is not None and (is_traced(targets) or bool(mask_of_targets(host_copy(targets)).any()))


def select_states(states: Tensor, targets: Tensor, output_mask: Tensor | None) -> Tensor:
    """(targets, hidden) states at the positions with a target, from (batch, length, hidden) states, or from (outputs,
    hidden) states at the positions of the (batch, length) bool `output_mask`, which include all targets."""
    mask = mask_of_targets(targets)
    return select_true(states, mask if output_mask is None else on_host(select_true, mask, output_mask))


def accuracy_counts(logits: Tensor, targets: Tensor) -> Tensor:
    """(2,) float32: correct predictions of (..., classes) logits, and (...) targets other than -100.

    The output field `metrics` of a pretraining head maps names to (numerator, denominator), both summed over the batch;
    the training loop sums them and logs the ratio.
    """
    target_mask = targets != IGNORE_INDEX
    return torch.stack([((logits.argmax(-1) == targets) & target_mask).sum(), target_mask.sum()]).float()


def detached_loss(loss: Tensor | None, targets: Tensor | None) -> Tensor | None:
    """A loss term as an output field: without gradient, and None if the batch has no target."""
    return loss.detach() if loss is not None and has_targets(targets) else None


def with_unused_parameters(value: Tensor, module: nn.Module) -> Tensor:
    """The value with zero gradients of a module's parameters, which DDP requires of those that a batch did not use."""
    if not module.training or not (distributed.is_available() and distributed.is_initialized()):
        return value
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return value + 0.0 * torch.stack([parameter.sum() for parameter in parameters]).sum() if parameters else value


class HeadModel(CtxPreTrainedModel):
    """A head on a family's encoder, which is the attribute named by the family's `base_model_prefix`.

    A family binds the generic heads to its encoder by inheritance: `class CtxXForY(heads.ForY, CtxXHeadModel)`, where
    `CtxXHeadModel` derives from this class and sets `encoder_class`. `build_head` creates the modules of the head.
    Every `forward` raises CtxError for inputs that do not match each other or the model.

    Attributes:
        uses_pooled_output: Whether the head reads `pooler_output`.
        has_configurable_pooling: Whether `config.classifier_pooling` may replace the encoder's pooler.
        accepts_loss_kwargs: Whether Trainer may pass `num_items_in_batch` as a number, which is exact for heads with
            one loss term only. `hf_ctxmodels.training.trainer.CtxTrainer` handles the others.
        output_layer_name: Name of the linear layer that computes the vocabulary's logits, or None.
        output_layer_input: Hook point of its input.
        num_labels: Number of classes of a classifier, for code that reads it from the model, such as PEFT.
        prepacked_bytes: Upper limit in bytes of the copies of weights that `generate` prepacks for oneDNN on a CPU;
            0 for none.
        supports_layer_mix: Whether the head may read a mix of the layers (`config.layer_mix`).
        has_custom_layer_mix: Whether the family's heads mix the layers in another way.
        layer_mix: The layer mix that the head reads; None for the last layer.
        feature_lookup: Replaces a frozen encoder, see `downstream.finetuning.feature_cache`; None for the encoder.

    The forwards take the ids of all families: `token_type_ids` (ignored or rejected by encoders without segments), and,
    if the encoder lists them in `extra_input_ids`, `langs` (XLM) and `task_type_ids` (ERNIE), each (batch, length). See
    `ItemCounts` for `num_items_in_batch`, and `needs_all_logits` for `return_logits`.
    """

    encoder_class: ClassVar[type[CtxPreTrainedModel]]
    uses_pooled_output: ClassVar[bool] = False
    has_configurable_pooling: ClassVar[bool] = False
    accepts_loss_kwargs = True
    output_layer_name: str | None = None
    prepacked_bytes: int = MAX_PREPACKED_BYTES
    supports_layer_mix: ClassVar[bool] = False
    has_custom_layer_mix: ClassVar[bool] = False
    layer_mix: ScalarMix | None
    feature_lookup: Callable[..., Any] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.build_encoder(config))
        has_layer_mix = self.supports_layer_mix and not self.has_custom_layer_mix and config.layer_mix
        self.layer_mix = build_layer_mix(self.base_model) if has_layer_mix else None
        self.output_layer_input = HookPoint()
        self.num_labels = config.num_labels
        self.build_head(config)
        self.post_init()

    def build_encoder(self, config: Any) -> CtxPreTrainedModel:
        """Create the encoder, with a pooler if the head uses it."""
        return self.encoder_class(config, add_pooling_layer=self.uses_pooler)

    def build_head(self, config: Any) -> None:
        """Create the modules of the head."""
        raise NotImplementedError

    @property
    def uses_pooler(self) -> bool:
        """Whether the head reads the `pooler_output` that the encoder's pooler computes."""
        return self.uses_pooled_output and self.pooling is None

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of the token states; None for the encoder's `pooler_output`."""
        return getattr(self.config, "classifier_pooling", None) if self.has_configurable_pooling else None

    @property
    def supports_label_smoothing(self) -> bool:
        """Whether the training loss is the cross-entropy of `logits` and `labels`, without further terms, which Trainer
        smooths with `label_smoothing_factor`."""
        return self.penalty() is None

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer over the vocabulary, or None."""
        return None if self.output_layer_name is None else self.get_submodule(self.output_layer_name)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer over the vocabulary."""
        if self.output_layer_name is not None:
            self.set_submodule(self.output_layer_name, new_embeddings)

    def output_layer_states(self, states: Tensor) -> Tensor:
        """The input of the output layer, from the (..., hidden) output of the encoder."""
        return self.output_layer_input(states)

    def token_logits(self, states: Tensor) -> Tensor:
        """(..., hidden) output of the encoder -> (..., vocabulary) logits of the output layer."""
        output_layer: Any = self.get_output_embeddings()
        return linear(output_layer, self.output_layer_states(states))

    def token_loss(self, states: Tensor, labels: Tensor, num_items: ItemCounts) -> Tensor:
        """Mean cross-entropy in nats; (targets, hidden) states at the labeled positions."""
        output_layer: Any = self.get_output_embeddings()
        return language_modeling_loss(output_layer, self.output_layer_states(states), labels, num_items)

    def encode(self, *, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Run the encoder; returns a model output.

        With a `layer_mix`, `last_hidden_state` is the mix of the layers. With a `pooling`, `pooler_output` is the
        pooled `last_hidden_state`.
        """
        if self.layer_mix is None and self.feature_lookup is None:
            outputs: Any = self.base_model(attention_mask=attention_mask, return_dict=True, **inputs)
        else:
            outputs = encode_with_layer_mix(
                self.base_model, self.layer_mix, self.feature_lookup, attention_mask=attention_mask, **inputs
            )
        if self.pooling is not None:
            if attention_mask is not None and padding_mask_or_none(attention_mask) is None:
                raise CtxError(
                    f"Pooling needs an attention_mask (batch, length); got {tuple(attention_mask.shape)}.",
                    hint="pass a mask of this shape, or set classifier_pooling=None.",
                )
            mask = mask_of_inputs(
                inputs.get("input_ids"), inputs.get("inputs_embeds"), attention_mask, inputs.get("past_key_values")
            )
            token_mask = build_token_mask(outputs.last_hidden_state, mask, inputs.get("sequence_ids"))
            outputs.pooler_output = pool_tokens(outputs.last_hidden_state, token_mask, self.pooling)
        return outputs

    def extra_ids(self, **ids: Tensor | None) -> dict[str, Tensor]:
        """The ids that are not None, for `encode`; raises CtxError for ids that the encoder does not embed."""
        arguments = {name: tensor for name, tensor in ids.items() if tensor is not None}
        for name in arguments:
            if name not in getattr(self.encoder_class, "extra_input_ids", ()):
                raise CtxError(f"{self.encoder_class.__name__} has no embeddings of {name}.", hint=f"remove {name}.")
        return arguments

    def encoder_fields(self, outputs: Any) -> dict[str, Any]:
        """Return the fields of the encoder's output that the output of a task head contains."""
        return {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}

    def input_shape(self, input_ids: Any, inputs_embeds: Any) -> tuple[int, int] | None:
        """(batch, length) of the input; None if the encoder will raise an error for its number of dimensions."""
        check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
        inputs = input_ids if input_ids is not None else inputs_embeds
        axes = 3 if input_ids is None else 2 + len(self.token_id_axes)
        if inputs is None or inputs.dim() != axes or not inputs.numel():
            return None
        return inputs.shape[0], inputs.shape[1]

    def validate_token_targets(
        self, targets: Any, name: str, input_ids: Any, inputs_embeds: Any = None, *label_shape: int
    ) -> Tensor | None:
        """Check (batch, length, *label_shape) targets as in `validate_targets`; None without targets, and for an input
        for which the encoder will raise an error."""
        shape = self.input_shape(input_ids, inputs_embeds)
        return None if targets is None or shape is None else validate_targets(targets, name, (*shape, *label_shape))

    def needs_all_logits(self, return_logits: bool | None) -> bool:
        """Whether a language model with labels computes and returns the logits of all positions.

        None means `config.return_logits_with_labels`. If this is None as well, logits are returned in evaluation
        without gradients, since Trainer's metrics read them.
        """
        if return_logits is None:
            return_logits = self.config.return_logits_with_labels
        return not (self.training or torch.is_grad_enabled()) if return_logits is None else return_logits

    def target_output_mask(self, return_logits: bool | None, *targets: Tensor | None) -> Tensor | None:
        """(batch, length) mask of the positions with a target, to which the output of the encoder is limited; None for
        all positions: without targets, or if `needs_all_logits(return_logits)`."""
        labels = [tensor for tensor in targets if tensor is not None]
        if not labels or self.needs_all_logits(return_logits):
            return None
        return on_host(lambda *tensors: torch.stack([label != IGNORE_INDEX for label in tensors]).any(0), *labels)

    def total_loss(self, *losses: Tensor | None) -> Tensor | None:
        """The sum of the losses that are not None, `with_unused_parameters` if one is missing; None if all are."""
        available_losses = [loss for loss in losses if loss is not None]
        if not available_losses:
            return None
        total = torch.stack(available_losses).sum()
        return total if len(available_losses) == len(losses) else self.with_unused_parameters(total)

    def with_unused_parameters(self, loss: Tensor | None) -> Tensor | None:
        """The loss with zero gradients of the parameters that the batch did not use, as DDP requires."""
        return None if loss is None else with_unused_parameters(loss, self)

    def penalty(self) -> Tensor | None:
        """The regularization term of the training loss, a function of the parameters only; or None."""
        terms = [regularizer() for regularizer in self.base_model.regularizers]
        penalties = [term for term in terms if term is not None]
        return torch.stack(penalties).sum() if penalties else None

    def add_regularization(
        self, loss: Tensor, outputs: Any, targets: Tensor, name: str, num_items: ItemCounts
    ) -> Tensor:
        """Add the `penalty` to the loss of a task in training, in equal shares of all targets, so that the shares of
        micro-batches sum to one penalty; other arguments as in `number_of_targets`."""
        penalty = self.penalty() if self.training else None
        if penalty is None:
            return loss
        number = targets.numel() if targets.is_floating_point() else (targets != IGNORE_INDEX).sum()
        return loss + mean_over_targets(penalty * number, targets, name, num_items)

    def reference_config(self) -> dict[str, Any]:
        """The configuration of the reference class; raises CtxError if it lacks an option of the head."""
        options: dict[str, tuple[Any, Any]] = {"layer_mix": (self.layer_mix is not None, False)}
        if self.has_configurable_pooling:
            options["classifier_pooling"] = (getattr(self.config, "classifier_pooling", None), None)
            options["answer_steps"] = (getattr(self.config, "answer_steps", 0), 0)
        for name, (value, default) in options.items():
            if value != default:
                raise CtxError(
                    f"{type(self).__name__.removeprefix('Ctx')} in transformers does not support {name}.",
                    hint=f"use save_pretrained, or fine-tune with {name}={default}.",
                )
        return super().reference_config()
