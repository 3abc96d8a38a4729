"""The pretraining of a checkpoint, looked at from fine-tuning: its objective on a text, and how far weights moved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.core.adapter_files import suppress_adapter_notice
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.downstream.finetuning.fisher import Labels, fisher_information, save_fisher, single_example_batches
from hf_ctxmodels.downstream.loading_with_adapters import add_saved_adapters
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.metrics.loss_evaluation import LossEvaluation
from hf_ctxmodels.training.metrics.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer, require_single_task
from hf_ctxmodels.training.optim.layer_groups import LAYER
from hf_ctxmodels.training.pretraining import PretrainingArguments, make_model, make_objective, resolve_family

_LENGTH = 128


@dataclass
class PretrainingEvaluation:
    """A pretrained checkpoint with its own objective on a text.

    Attributes:
        model: With the objective's head, in evaluation mode.
        objective: Makes and collates the rows.
        rows: Of the text.
        name: The objective's name.
    """

    model: PreTrainedModel
    objective: Objective
    rows: ExampleSet
    name: str

    @classmethod
    def open(cls, source: str, *text: str, max_length: int | None = None, held_out: float | None = None) -> Self:
        """Open a checkpoint; the objective and its options are those of its training summary, or that of its head.

        Args:
            source: Directory or Hub id.
            text: Documents, as pretrain's --dataset takes them.
            max_length: Longest row in tokens; None for that of pretraining, or else 128 where the model can.
            held_out: Read only the documents that pretrain holds out with this share; None for all.

        Raises:
            CtxError: The checkpoint has no pretraining head, or something cannot be opened.
        """
        summary = TrainingSummary.load(source) if (Path(source) / SUMMARY_FILE).exists() else None
        pretrained = summary if summary is not None and summary.task == "pretraining" else None
        config = load_config(source)
        limit = getattr(config, "max_sequence_length", None) or _LENGTH
        arguments = PretrainingArguments(
            model=source,
            dataset=list(text),
            objective=None if pretrained is None else pretrained.objective,
            max_length=max_length or (pretrained.max_length if pretrained else None) or min(limit, _LENGTH),
            validation_fraction=held_out or 0.0,
        )
        family, tokenizer = resolve_family(arguments), load_tokenizer(source)
        arguments.objective = arguments.objective or _objective_of_head(family, config)
        name, made = make_objective(family, tokenizer, arguments, seed=0)
        if pretrained is not None:
            made = type(made)(tokenizer, max_length=arguments.max_length, seed=0, **pretrained.objective_options)
        model = make_model(family, made, tokenizer, arguments).eval()
        if new := [
            each
            for each in getattr(model, "newly_initialized_modules", ())
            if not each.startswith(model.base_model_prefix)
        ]:
            raise CtxError(
                f"The checkpoint lacks the head of its pretraining: {', '.join(new)}.",
                location=source,
                hint="give the checkpoint that pretraining left.",
            )
        documents, others = arguments.load()
        return cls(model, made, ExampleSet.build(made.examples(documents if others is None else others)), name)

    def loss(self, batch_size: int = 32) -> dict[str, float]:
        """The objective's losses and metrics on the text, with the corruptions of epoch 0."""
        evaluation = LossEvaluation(self.rows, self.objective.collate, batch_size)
        return evaluation(self.model, Accelerator(cpu=self.model.device.type == "cpu"))

    @torch.no_grad()
    def copy_encoder_weights(self, finetuned: str) -> None:
        """Put in the encoder's weights of another checkpoint, and the adapters beside them.

        New rows of the table of words, of tokens that fine-tuning added, are left out. What the other was saved
        without, for example a pooler that its head does not read, stays as pretrained.

        Raises:
            CtxError: It is that of another model.
        """
        config = load_config(finetuned)
        require_single_task(config, finetuned)
        with suppress_adapter_notice():
            other = load_model(finetuned, "AutoModel", config)
        if is_quantized(other):
            raise CtxError(
                "The weights of a quantized model are codes, at no distance from others.",
                location=finetuned,
                hint="give the checkpoint in single precision that it was made of.",
            )
        theirs, own = dict(other.named_parameters()), dict(self.model.base_model.named_parameters())
        drawn = tuple(f"{module}." for module in getattr(other, "newly_initialized_modules", ()))
        shared = [name for name in own if name in theirs and not name.startswith(drawn)]
        odd = [name for name in shared if theirs[name].shape[1:] != own[name].shape[1:]]
        lone = sorted(name for name in set(own) ^ set(theirs) if LAYER.match(name))
        if not shared or odd or lone or any(len(theirs[name]) < len(own[name]) for name in shared):
            what = f": {odd[0]} differs in shape." if odd else f": one alone has {lone[0]}." if lone else "."
            raise CtxError(
                f"The two checkpoints are of different models{what}",
                location=finetuned,
                hint="give a checkpoint and one that was fine-tuned from it.",
            )
        for name in shared:
            own[name].copy_(theirs[name][: len(own[name])])
        add_saved_adapters(self.model, finetuned)


def _objective_of_head(family: FamilySpec, config: PreTrainedConfig) -> str | None:
    """The family's first objective that trains the head that a checkpoint was saved with; None for the family's own."""
    saved = {name.removeprefix("Ctx") for name in config.architectures or []}
    for name, objective in family.objectives.items():
        model = family.models.get(objective.auto_class)
        if model is not None and model.__name__.removeprefix("Ctx") in saved:
            return name
    return None


def compute_fisher(side: PretrainingEvaluation, file: str, number: int, labels: Labels) -> None:
    """Compute the Fisher information of the first rows of the text, and write it.

    Raises:
        CtxError: See `fisher_information`.
    """
    examples = single_example_batches(side.objective.collate, side.rows, number, side.model.device)
    fisher = fisher_information(side.model, examples, labels)
    facts = {"objective": side.name, "examples": min(number, len(side.rows)), "labels": labels}
    save_fisher(file, fisher, side.model, **facts)


def distances(start: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """The L2 distance of weights from where they started: of what is below or above the layers ("other"), of each layer
    ("layers.0"; of an encoder-decoder "encoder.layers.0" and "decoder.layers.0"), and of all ("encoder").

    Args:
        start, now: Weights by their names in the encoder; those that one lacks are left out.

    Returns:
        Part -> "distance", and "relative" to the norm at the start.
    """
    sums: dict[str, list[float]] = {}
    for name in sorted(set(start) & set(now)):
        layer = LAYER.match(name)
        part = layer["part"] if layer else "other"
        before, after = start[name].double(), now[name][: len(start[name])].double()
        for each in (part, "encoder"):
            found = sums.setdefault(each, [0.0, 0.0])
            found[0] += float((after - before).square().sum())
            found[1] += float(before.square().sum())
    return {
        part: {"distance": math.sqrt(moved), "relative": math.sqrt(moved / size) if size else math.nan}
        for part, (moved, size) in sorted(sums.items(), key=lambda each: _order(each[0]))
    }


def _order(part: str) -> tuple[int, bool, int]:
    """That of application: the layers of the encoder's stack before those of the decoder's."""
    layer = LAYER.match(f"{part}.")
    if layer is None:
        return ("other", "", "encoder").index(part), False, 0
    return 1, part.startswith("decoder."), int(layer["number"])


def measure_forgetting(side: PretrainingEvaluation, finetuned: str, batch_size: int = 32) -> dict[str, Any]:
    """What fine-tuning changed: the pretraining losses before and after, and the distances of the pretrained weights.

    Raises:
        CtxError: The checkpoint is that of another model.
    """
    start = {name: each.detach().clone() for name, each in side.model.base_model.named_parameters()}
    before = side.loss(batch_size)
    side.copy_encoder_weights(finetuned)
    now = {name: each.detach() for name, each in side.model.base_model.named_parameters() if name in start}
    return {
        "objective": side.name,
        "rows": len(side.rows),
        "before": before,
        "after": side.loss(batch_size),
        "distances": distances(start, now),
    }
