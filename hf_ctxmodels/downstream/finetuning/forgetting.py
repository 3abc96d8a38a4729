"""What fine-tuning changed: the pretraining objective on a text before and after, and the distance of the weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.core.adapter_support import suppress_adapter_notice
from hf_ctxmodels.core.devices import to_float64
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import typed_options
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import add_saved_adapters
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import root_family
from hf_ctxmodels.training.corpora import make_objective
from hf_ctxmodels.training.evaluation import LossEvaluation
from hf_ctxmodels.training.model_loading import (
    load_config,
    load_model,
    load_tokenizer,
    loaded_names,
    require_single_task,
)
from hf_ctxmodels.training.optimizers import LAYER
from hf_ctxmodels.training.pretraining import PretrainingArguments, make_model, model_config, resolve_family
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary

_DEFAULT_LENGTH = 128


@dataclass
class PretrainingEvaluation:
    """A pretrained checkpoint in evaluation mode, and examples of a text for its pretraining objective `name`."""

    model: PreTrainedModel
    objective: Objective
    examples: ExampleSet
    name: str

    @classmethod
    def open(
        cls,
        source: str,
        *text: str,
        max_length: int | None = None,
        held_out: float | None = None,
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Load a checkpoint; the objective and its options are read from its training summary, or follow from its head.

        Args:
            source: Directory or Hub id.
            text: Documents, as for --dataset of pretrain.
            max_length: Maximum length in tokens; None for the length of pretraining, else 128 or the model's maximum.
            held_out: Read only the documents that pretrain holds out with this fraction; None for all.
            options: Options of the objective, as on a command line, that differ from pretraining.

        Raises:
            CtxError: The checkpoint has no pretraining head, or cannot be loaded; or an option is wrong.
        """
        summary = TrainingSummary.load(source) if (Path(source) / SUMMARY_FILE).exists() else None
        if summary is not None and summary.task != "pretraining":
            summary = None
        config = load_config(source)
        model_length = getattr(config, "max_sequence_length", None) or _DEFAULT_LENGTH
        arguments = PretrainingArguments(
            model=source,
            dataset=list(text),
            objective=None if summary is None else summary.objective,
            max_length=max_length or (summary.max_length if summary else None) or min(model_length, _DEFAULT_LENGTH),
            validation_fraction=held_out or 0.0,
        )
        family, tokenizer = resolve_family(arguments), load_tokenizer(source)
        if not arguments.objective:  # the first one that trains the head in the checkpoint; None for the default
            heads = {name: family.models.get(objective.auto_class) for name, objective in family.objectives.items()}
            saved_heads = {name.removeprefix("Ctx") for name in config.architectures or []}
            matches = [
                name for name, head in heads.items() if head and head.__name__.removeprefix("Ctx") in saved_heads
            ]
            arguments.objective = matches[0] if matches else None
        name, objective = make_objective(family, tokenizer, arguments, seed=0)
        if objective.loss_function is not None:
            raise CtxError(
                f"The loss of the objective {name} exists in training only.",
                location=source,
                hint="evaluate the model on its task, such as by `generate --references`.",
            )
        if summary is not None:
            pretraining_options = summary.objective_options
            objective = type(objective)(tokenizer, max_length=arguments.max_length, seed=0, **pretraining_options)
        if options:
            names, location = objective.option_help(), f"--objective_options {name}"
            objective = replace(objective, **typed_options(type(objective), options, location=location, names=names))
        model = make_model(model_config(family, tokenizer, arguments), objective, tokenizer, arguments).eval()
        new_modules = [
            module
            for module in getattr(model, "newly_initialized_modules", ())
            if not module.startswith(model.base_model_prefix)
        ]
        if new_modules:
            raise CtxError(
                f"The checkpoint lacks its pretraining head: {', '.join(new_modules)}.",
                location=source,
                hint="use the pretrained checkpoint.",
            )
        documents, held_out_documents = arguments.load()
        if held_out_documents is not None:
            documents = held_out_documents
        return cls(model, objective, ExampleSet.build(objective.examples(documents)), name)

    def loss(self, batch_size: int = 32) -> dict[str, float]:
        """The objective's losses and metrics on the text, with the corruption of epoch 0."""
        evaluation = LossEvaluation(self.examples, self.objective.collate, batch_size)
        return evaluation(self.model, Accelerator(cpu=self.model.device.type == "cpu"))

    @torch.no_grad()
    def copy_encoder_weights(self, finetuned: str) -> None:
        """Copy the encoder's weights and the adapters of a fine-tuned checkpoint into the model, without the word
        embeddings of added tokens. Weights that the checkpoint lacks, such as an unused pooler, keep their pretrained
        values.

        Raises:
            CtxError: The checkpoint was not fine-tuned from this model, or is quantized.
        """
        config = load_config(finetuned)
        require_single_task(config, finetuned)
        with suppress_adapter_notice():
            finetuned_model = load_model(finetuned, "AutoModel", config)
        if is_quantized(finetuned_model):
            raise CtxError(
                "The distance to the weights of a quantized model is undefined.",
                location=finetuned,
                hint="use the float32 checkpoint that was quantized.",
            )
        source = dict(finetuned_model.named_parameters())
        target = dict(self.model.base_model.named_parameters())
        names = [name for name in loaded_names(finetuned_model) if name in target]
        mismatched = [name for name in names if source[name].shape[1:] != target[name].shape[1:]]
        unmatched = sorted(name for name in set(target) ^ set(source) if LAYER.match(name))
        configs = (self.model.config, config)
        is_other_family = len(set(map(root_family, configs))) > 1  # whose weights may have the same names and shapes
        is_shorter = any(len(source[name]) < len(target[name]) for name in names)
        if not names or mismatched or unmatched or is_other_family or is_shorter:
            differences = [f": {' and '.join(type(entry).__name__ for entry in configs)}"] if is_other_family else []
            differences += [f": {name} differs in shape" for name in mismatched]
            differences += [f": only one of them has {name}" for name in unmatched]
            raise CtxError(
                f"The two checkpoints are of different models{differences[0] if differences else ''}.",
                location=finetuned,
                hint="use a checkpoint and one that was fine-tuned from it.",
            )
        for name in names:
            target[name].copy_(source[name][: len(target[name])])
        add_saved_adapters(self.model, finetuned)


def distances(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """The L2 distance between weights before and after fine-tuning: of weights outside the layers ("other"), of each
    layer ("layers.0"; in an encoder-decoder "encoder.layers.0" and "decoder.layers.0"), and of all weights
    ("all").

    Args:
        before, after: Weights by their names in the encoder; weights that one of them lacks are ignored.

    Returns:
        Module -> "distance", and "relative" to the norm before; layers in the order of application.
    """
    sums: dict[str, list[float]] = {}
    for name in sorted(set(before) & set(after)):
        layer = LAYER.match(name)
        old = to_float64(before[name])
        change = to_float64(after[name][: len(old)]).to(old.device) - old
        for module in (layer["part"] if layer else "other", "all"):
            totals = sums.setdefault(module, [0.0, 0.0])
            totals[0] += float(change.square().sum())
            totals[1] += float(old.square().sum())

    def order(module: str) -> tuple[int, bool, int]:
        layer = LAYER.match(f"{module}.")
        if layer is None:
            return ("other", "", "all").index(module), False, 0
        return 1, module.startswith("decoder."), int(layer["number"])

    results = {}
    for module in sorted(sums, key=order):
        squared_distance, squared_norm = sums[module]
        relative = math.sqrt(squared_distance / squared_norm) if squared_norm else math.nan
        results[module] = {"distance": math.sqrt(squared_distance), "relative": relative}
    return results


def measure_forgetting(evaluation: PretrainingEvaluation, finetuned: str, batch_size: int = 32) -> dict[str, Any]:
    """The pretraining losses before and after fine-tuning, and the distances between the weights.

    Returns:
        objective: Name of the pretraining objective.
        rows: Number of examples.
        before, after: Losses and metrics of the pretrained and of the fine-tuned encoder, see
            `PretrainingEvaluation.loss`.
        distances: See `distances`.
    """
    base = evaluation.model.base_model
    old_weights = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    old_losses = evaluation.loss(batch_size)
    evaluation.copy_encoder_weights(finetuned)
    base = evaluation.model.base_model
    new_weights = {name: parameter.detach() for name, parameter in base.named_parameters() if name in old_weights}
    return {
        "objective": evaluation.name,
        "rows": len(evaluation.examples),
        "before": old_losses,
        "after": evaluation.loss(batch_size),
        "distances": distances(old_weights, new_weights),
    }
