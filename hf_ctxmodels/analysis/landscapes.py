"""Loss landscapes: the loss at weights between and around models.

A point is the weights `w + a d1 + b d2` of a model. The directions lead to other models (Goodfellow et al. 2015; Hao et
al. 2019, arXiv 1908.05620), or are random with filter normalization (Li et al. 2018, arXiv 1712.09913, section 4).
Tied weights are one parameter, and buffers keep their values.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_support import suppress_adapter_notice
from hf_ctxmodels.core.devices import to_float64
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation
from hf_ctxmodels.downstream.finetuning.task_evaluation import TaskEvaluation
from hf_ctxmodels.downstream.tasks import TaskArguments
from hf_ctxmodels.inference.prediction import Predictor
from hf_ctxmodels.registry import root_family
from hf_ctxmodels.training.model_loading import load_config, load_model, loaded_names, new_model_with_seed

Weights = dict[str, Tensor]
"""Tensors by the names of parameters: a point, or a direction."""
Metrics = dict[str, float]
Evaluate = Callable[[], Metrics]
"""The loss (`loss`) and other metrics of the model with its current weights."""

RANDOM = "random"
"""Source of new weights instead of a checkpoint."""
_MIN_VARIANCE = 1e-10  # of the second principal component, relative to the first one
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass
class HeldOutLoss:
    """A model with a head, and its loss on held-out examples.

    Attributes:
        model: In evaluation mode; the directions change its weights.
        evaluate: Computes the loss and the metrics.
        auto_class: Name of the Auto class of the model.
        num_examples: Number of examples.
        depends_on_all_rows: Whether the loss depends on embeddings of tokens that are not in the data, as the softmax
            of a language model does.
    """

    model: PreTrainedModel
    evaluate: Evaluate
    auto_class: str
    num_examples: int
    depends_on_all_rows: bool = True

    @classmethod
    def of_task(
        cls,
        source: str,
        file: str,
        arguments: TaskArguments | None = None,
        *,
        batch_size: int = 32,
        max_examples: int | None = None,
    ) -> Self:
        """The loss of a fine-tuned model on labeled examples.

        Args:
            source: Directory or Hub id of a model with the head of a fine-tuning task.
            file: Labeled examples, as `--validation_file` of finetune.
            arguments: Columns of the file; by default as in finetune.
            batch_size: Examples per batch.
            max_examples: Use the first N examples; None for all.

        Raises:
            CtxError: The model has no such head, or the file cannot be read.
        """
        predictor = Predictor.open(source, arguments)
        task, model = predictor.task.for_file(file, predictor.columns), predictor.model
        examples = task.read(file, "validation")[:max_examples]
        encoded = task.encode(examples, predictor.tokenizer)
        evaluation = TaskEvaluation(task, examples, encoded, task.collator(predictor.tokenizer), batch_size)

        def evaluate() -> Metrics:
            return _without_prefix(evaluation(model, Accelerator(cpu=model.device.type == "cpu")))

        depends_on_all_rows = task.is_generative or getattr(model, "has_auxiliary_lm_loss", False)
        return cls(model, evaluate, task.auto_class, len(examples), depends_on_all_rows)

    @classmethod
    def of_pretraining(cls, source: str, *text: str, batch_size: int = 32, max_length: int | None = None) -> Self:
        """The loss of the pretraining objective of a checkpoint on a text; arguments and errors as for
        `PretrainingEvaluation.open`."""
        pretraining = PretrainingEvaluation.open(source, *text, max_length=max_length)
        examples, model = pretraining.examples, pretraining.model

        def evaluate() -> Metrics:
            return _without_prefix(pretraining.loss(batch_size))

        return cls(model, evaluate, pretraining.objective.auto_class, len(examples))


def _without_prefix(metrics: Mapping[str, float]) -> Metrics:
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}


def current_weights(model: nn.Module) -> Weights:
    """Copies of the floating-point parameters, tied ones once; raises CtxError for a quantized model."""
    if is_quantized(model):
        raise CtxError("The weights of a quantized model have no landscape.", hint="use the float32 checkpoint.")
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.is_floating_point()}


def checkpoint_weights(loss: HeldOutLoss, source: str | Path, seed: int = 0) -> Weights:
    """The weights of a checkpoint by the names of another model's parameters.

    Parameters that are not in the checkpoint, such as the head of a task or embeddings of tokens that were added in
    fine-tuning, keep the values of the model.

    Args:
        loss: The model.
        source: Directory or Hub id of a checkpoint of the same architecture; or `RANDOM` for a new model.
        seed: Seed of new weights.

    Raises:
        CtxError: The checkpoint has a parameter of another shape, or lacks a layer.
    """
    model = loss.model
    weights = current_weights(model)
    if source == RANDOM:
        new_weights = current_weights(new_model_with_seed(type(model), model.config, seed))
        return {name: new_weights[name].to(weight) for name, weight in weights.items()}
    loaded, prefix = _checkpoint_parameters(loss, str(source))
    loaded = {name: weight for name, weight in loaded.items() if name in weights}
    mismatched = [name for name, weight in loaded.items() if weight.shape[1:] != weights[name].shape[1:]]
    missing = [name for name in weights if name not in loaded and _LAYER.match(name) and name.startswith(prefix)]
    if mismatched or missing or not loaded:
        problem = (
            f"{mismatched[0]} differs in shape"
            if mismatched
            else f"{missing[0] if missing else 'all weights'} is missing"
        )
        hint = "use checkpoints of the same architecture and size."
        raise CtxError(f"The checkpoint is of another architecture: {problem}.", location=str(source), hint=hint)
    for name, weight in loaded.items():
        values, loaded_values = torch.atleast_1d(weights[name], weight)
        rows = min(len(values), len(loaded_values))
        values[:rows] = loaded_values[:rows]
    return weights


def _checkpoint_parameters(loss: HeldOutLoss, source: str) -> tuple[Weights, str]:
    """The parameters of a checkpoint by their names in a model, without new ones, and the prefix of these names: none
    if the checkpoint has the same head, else of the base model."""
    model, config = loss.model, load_config(source)
    if root_family(config) != root_family(model.config):
        raise CtxError(
            f"The checkpoint is of another architecture: a {type(config).__name__}, expected a "
            f"{type(model.config).__name__}.",
            location=str(source),
            hint="use checkpoints of the same architecture and size.",
        )
    has_head = type(model).__name__ in (config.architectures or []) and config.num_labels == model.config.num_labels
    with suppress_adapter_notice():
        checkpoint = load_model(source, loss.auto_class if has_head else "AutoModel", config)
    prefix = "" if has_head else f"{model.base_model_prefix}."
    loaded = set(loaded_names(checkpoint))
    return {f"{prefix}{name}": weight for name, weight in current_weights(checkpoint).items() if name in loaded}, prefix


def difference(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> Weights:
    """The direction from one point to another."""
    return {name: end[name] - weight for name, weight in start.items()}


def random_direction(weights: Mapping[str, Tensor], generator: torch.Generator) -> Weights:
    """A Gaussian direction with filter normalization: each output row of a matrix, and each filter of a convolution,
    has the norm of the weights; biases and the weights of normalizations are not moved (Li et al. 2018, section 4).

    Args:
        weights: The point at which the direction starts.
        generator: A generator on the CPU.
    """
    direction = {}
    for name, weight in weights.items():
        if weight.dim() < 2:
            direction[name] = torch.zeros_like(weight)
            continue
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        dims = tuple(range(1, weight.dim()))
        scale = weight.norm(dim=dims, keepdim=True) / (noise.norm(dim=dims, keepdim=True) + 1e-10)
        direction[name] = noise * scale
    return direction


def dot(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Inner product of two directions, in float64."""
    return float(sum((to_float64(first[name]) * to_float64(second[name])).sum() for name in first))


def scaled_to(direction: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Weights:
    """The direction, scaled to the norm of `reference`; raises CtxError if it is zero."""
    norm = dot(direction, direction) ** 0.5
    if not norm:
        raise CtxError("Two models have the same weights.", hint="use different models.")
    factor = dot(reference, reference) ** 0.5 / norm
    return {name: change * factor for name, change in direction.items()}


def used_embedding_rows(loss: HeldOutLoss) -> dict[str, Tensor]:
    """Boolean masks of the rows of embeddings that the evaluation uses, by parameter name; a parameter without a mask
    is used as a whole."""
    if loss.depends_on_all_rows:
        return {}
    masks, hooks = {}, []
    embeddings = {id(module.weight): module for module in loss.model.modules() if isinstance(module, nn.Embedding)}
    for name, weight in loss.model.named_parameters():
        if id(weight) in embeddings:
            masks[name] = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)

            def record(module: nn.Module, arguments: tuple[Any, ...], mask: Tensor = masks[name]) -> None:
                mask[arguments[0].unique()] = True

            hooks.append(embeddings[id(weight)].register_forward_pre_hook(record))
    try:
        loss.evaluate()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: mask for name, mask in masks.items() if mask.any()}  # others are not called


def restrict(direction: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Weights:
    """The direction without unused rows of embeddings: unused rows do not affect the loss but would dominate norms and
    angles."""
    return {
        name: change * masks[name][:, None].to(change) if name in masks else change
        for name, change in direction.items()
    }


@contextmanager
def moved_weights(model: nn.Module, origin: Mapping[str, Tensor]) -> Iterator[Callable[..., None]]:
    """Yield a function that sets the weights to `origin` plus multiples of directions, `move((a, d1), (b, d2))`; on
    exit, also after an error, the model has its previous weights, bit for bit."""
    parameters = dict(model.named_parameters())
    previous = {name: parameters[name].detach().clone() for name in origin}

    @torch.no_grad()
    def move(*steps: tuple[float, Mapping[str, Tensor]]) -> None:
        for name, weight in origin.items():
            value = weight
            for coefficient, direction in steps:
                if coefficient:
                    value = value + coefficient * direction[name]
            parameters[name].copy_(value)

    try:
        with evaluation_mode(model):
            yield move
    finally:
        with torch.no_grad():
            for name, weight in previous.items():
                parameters[name].copy_(weight)


@dataclass
class Plane:
    """A line or plane of weights: an origin and one or two directions.

    Attributes:
        origin: The weights at 0.
        directions: The changes of the weights per unit of each coordinate.
    """

    origin: Weights
    directions: Sequence[Weights]

    def evaluate(
        self,
        loss: HeldOutLoss,
        points: Sequence[Sequence[float]],
        cached_metrics: dict[str, Metrics] | None = None,
    ) -> Iterator[Metrics]:
        """The loss and the metrics at points, in their order; the weights of the model are restored afterwards.

        Args:
            loss: The model, whose parameters have the names of the origin.
            points: Coordinates.
            cached_metrics: Available metrics by `point_key`, which are not computed again; new ones are added.
        """
        cached_metrics = {} if cached_metrics is None else cached_metrics
        with moved_weights(loss.model, self.origin) as move:
            for point in points:
                if (key := point_key(point)) not in cached_metrics:
                    move(*zip(point, self.directions, strict=True))
                    cached_metrics[key] = loss.evaluate()
                yield cached_metrics[key]

    def project(self, weights: Mapping[str, Tensor]) -> tuple[float, ...]:
        """Coordinates of the nearest point of the plane, by least squares.

        Hao et al. (2019) use the cosines with each direction, `|d| cos(d, d1) / |d1|`, which is the same for orthogonal
        directions; for others, the end of a direction would not have the coordinates (1, 0).
        """
        change = difference(self.origin, weights)
        gram = [[dot(first, second) for second in self.directions] for first in self.directions]
        products = [[dot(change, direction)] for direction in self.directions]
        coordinates = np.linalg.lstsq(np.array(gram), np.array(products), rcond=None)[0]
        return tuple(coordinates[:, 0].tolist())


def point_key(point: Sequence[float]) -> str:
    """Name of a point in a file of results."""
    return ",".join(f"{coordinate:.6g}" for coordinate in point)


@dataclass
class Trajectory:
    """The plane of the two principal components of the weights of a run relative to its last ones (Li et al. 2018,
    section 7), in which the axes have unit length.

    Attributes:
        plane: The last weights are its origin.
        coordinates: (a, b) of each checkpoint.
        explained: Fractions of the variance that the two directions explain.
    """

    plane: Plane
    coordinates: list[tuple[float, float]]
    explained: tuple[float, float]

    @classmethod
    def of_checkpoints(cls, checkpoints: Sequence[Weights], masks: Mapping[str, Tensor] | None = None) -> Self:
        """The trajectory of three or more checkpoints in training order; raises CtxError for fewer, or if they lie on a
        line."""
        if len(checkpoints) < 3:
            raise CtxError(
                f"A trajectory needs 3 checkpoints, got {len(checkpoints)}.",
                hint="fine-tune with --save_steps, and keep all checkpoints.",
            )
        origin = checkpoints[-1]
        changes = [restrict(difference(origin, weights), masks or {}) for weights in checkpoints]
        gram = torch.tensor([[dot(first, second) for second in changes] for first in changes], dtype=torch.float64)
        eigenvalues, vectors = torch.linalg.eigh(gram)  # of the small Gram matrix instead of an SVD of all weights
        eigenvalues, vectors = eigenvalues.flip(0).clamp(min=0), vectors.flip(1)
        if eigenvalues[1] <= _MIN_VARIANCE * eigenvalues[0]:  # rounding errors
            raise CtxError("The checkpoints lie on a line.", hint="use more checkpoints.")
        lengths = eigenvalues[:2].sqrt()
        directions = [{name: torch.zeros_like(weight) for name, weight in origin.items()} for _ in lengths]
        for axis, direction in enumerate(directions):
            factors = (vectors[:, axis] / lengths[axis]).tolist()
            for change, factor in zip(changes, factors, strict=True):
                for name, total in direction.items():
                    total.add_(change[name], alpha=factor)
        first, second = (eigenvalues[:2] / eigenvalues.sum()).tolist()
        coordinates = [(float(a), float(b)) for a, b in (vectors[:, :2] * lengths)]
        return cls(Plane(origin, directions), coordinates, (first, second))


def layer_groups(names: Sequence[str], prefix: str) -> dict[str, list[str]]:
    """Names of parameters by layer (`layers.0`, `encoder.layer.3`), and outside of the layers by module (`embeddings`,
    `pooler`, `classifier`), in their order.

    Args:
        names: Names of the parameters of a model with a head.
        prefix: Name of the base model in it.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        inner = name.removeprefix(f"{prefix}.")
        layer = _LAYER.match(inner)
        groups.setdefault(layer[1] if layer else inner.partition(".")[0], []).append(name)
    return groups


def roll_back_layers(
    loss: HeldOutLoss,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    cached_metrics: dict[str, Metrics] | None = None,
) -> Iterator[tuple[str, Metrics]]:
    """The loss and the metrics of the weights `end` with one layer at a time reset to `start` (Hao et al. 2019).

    The model's weights are restored afterwards.

    Args:
        loss: The model, whose parameters have the names of the weights.
        start, end: Weights before and after training.
        cached_metrics: Available metrics by group, which are not computed again; new ones are added.

    Yields:
        Names of `layer_groups` with their metrics; groups whose weights did not change are skipped.
    """
    cached_metrics = {} if cached_metrics is None else cached_metrics
    change = difference(end, start)
    zero_direction = {name: torch.zeros_like(weight) for name, weight in end.items()}
    with moved_weights(loss.model, end) as move:
        for group, names in layer_groups(list(end), loss.model.base_model_prefix).items():
            if not any(bool(change[name].any()) for name in names):
                continue
            if group not in cached_metrics:
                move((1.0, zero_direction | {name: change[name] for name in names}))
                cached_metrics[group] = loss.evaluate()
            yield group, cached_metrics[group]
