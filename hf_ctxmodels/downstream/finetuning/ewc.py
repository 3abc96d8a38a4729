"""Elastic weight consolidation: L2-SP weighted by the Fisher information of pretraining (Kirkpatrick et al. 2017, arXiv
1612.00796)."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels import heads
from hf_ctxmodels.core.console import print_status, progress_bar
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import check_choice
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.output_files import replacing, write_tensors
from hf_ctxmodels.core.weights import weights_digest
from hf_ctxmodels.data.examples import LOOP_COLUMNS
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation
from hf_ctxmodels.downstream.finetuning.l2_sp import L2SPPenalty

Batch = Mapping[str, Any]
Labels = Literal["sampled", "data"]


class ElasticWeightConsolidation(L2SPPenalty):
    """`L2SPPenalty` with each weight's squared distance multiplied by its Fisher information in pretraining (equation
    3): weight / 2 * sum of F * (w - w_0)^2.

    Args:
        model, weight, head_weight: As for `L2SPPenalty`.
        fisher_file: From `save_fisher`, for the same pretrained weights.
    """

    def __init__(
        self, model: PreTrainedModel, weight: float, fisher_file: str | Path, head_weight: float = 0.0
    ) -> None:
        super().__init__(model, weight, head_weight)
        fisher, digests = load_fisher(fisher_file)
        names = [name for name in fisher if name in self.pretrained]  # the model may have no pooler, for example
        pretrained = {name: self.pretrained[name][: len(fisher[name])] for name in names}  # without new tokens
        mismatched = [name for name in names if weights_digest({name: pretrained[name]}) != digests[name]]
        if mismatched or not names:
            raise CtxError(
                "The Fisher information was computed from other weights"
                + (f": {mismatched[0]} differs." if mismatched else "."),
                location=f"--anchor ewc:file={fisher_file}",
                hint="use the file computed from this --model, or compute a new one: ewc:file=FILE,text=TEXT.",
            )
        self._fisher = {}
        for name in names:
            padded = torch.zeros_like(self.pretrained[name], dtype=fisher[name].dtype)  # 0 for rows of new tokens
            padded[: len(fisher[name])] = fisher[name]
            self._fisher[name] = padded

    @property
    def identity(self) -> dict[str, Any]:
        """The digests of the pretrained weights and of the Fisher information."""
        return {**super().identity, "fisher": weights_digest(self._fisher)}

    def importance(self, name: str) -> Tensor | float:
        """The parameter's Fisher information; 0 for parameters that pretraining does not use, and for new rows."""
        return self._fisher.get(name, 0.0)


def fisher_information(
    model: PreTrainedModel, examples: Iterable[Batch], labels: Labels = "sampled"
) -> dict[str, Tensor]:
    """The diagonal of the Fisher information: the mean over examples of the squared gradient of each example's loss.

    Args:
        model: The model with its pretraining head, in evaluation mode.
        examples: Batches of one example each, with labels at the predicted positions.
        labels: "sampled" from the model's predictions; or of the "data", for the empirical Fisher information.

    Returns:
        Name in the encoder -> a value for each weight, float32; parameters that pretraining does not use are omitted.

    Raises:
        CtxError: There are no examples, `labels` is unknown, or the head's targets cannot be sampled.
    """
    check_choice(get_args(Labels), labels=labels)
    prefix = f"{model.base_model_prefix}."
    parameters = {
        name.removeprefix(prefix): parameter
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and parameter.requires_grad
    }
    totals = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
    generator, number = torch.Generator().manual_seed(0), 0
    for batch in examples:
        if not any(heads.has_targets(batch.get(name)) for name in model.loss_targets):  # no token was selected
            continue
        inputs = batch if labels == "data" else {**batch, **sampled_targets(model, batch, generator)}
        loss = model(**inputs).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for total, gradient in zip(totals.values(), gradients, strict=True):
            if gradient is not None:
                total += gradient.float().square()
        number += 1
    if not number:
        raise CtxError("There are no examples to compute the Fisher information from.", hint="use more text.")
    return {name: total / number for name, total in totals.items() if bool(total.any())}


@torch.no_grad()
def sampled_targets(model: PreTrainedModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Targets sampled from the predictions of a (masked) language model, possibly with sentence tasks, at the positions
    of the batch's targets; `generator` is on the CPU."""
    if isinstance(model, heads.ForCausalLM):  # its labels may be shifted, and longer than the input
        batch = {**batch, "shift_labels": model.resolve_targets(**batch), "labels": None}
    targets = [name for name in (*model.loss_targets, "shift_labels") if batch.get(name) is not None]
    output = model(**{name: value for name, value in batch.items() if name not in targets})
    samples: dict[str, Any] = {"labels": None} if "shift_labels" in targets else {}
    for name in targets:
        if name in ("labels", "shift_labels"):
            logits = output.get("prediction_logits", output.get("logits"))
        else:
            logits = output.get(model.logits_fields.get(name))
        # the losses of word vectors (negative samples, least squares) are not likelihoods
        if logits is None or logits.shape[:-1] != batch[name].shape or hasattr(model, "set_sparse_gradients"):
            raise CtxError(
                f"The targets {name!r} of {type(model).__name__} cannot be sampled from its predictions.",
                location="--anchor ewc:labels=sampled",
                hint="use labels=data.",
            )
        values = torch.multinomial(logits.float().softmax(-1).flatten(0, -2).cpu(), 1, generator=generator)
        sampled = values.view(batch[name].shape).to(batch[name])
        samples[name] = sampled.masked_fill(batch[name] == IGNORE_INDEX, IGNORE_INDEX)
    return samples


def compute_fisher(
    source: str,
    text: str | None,
    file: str,
    number: int,
    labels: Labels,
    device: torch.device | str = "cpu",
    *,
    verbose: bool = True,
) -> None:
    """Compute the Fisher information of a checkpoint in its pretraining objective, from the first `number` examples of
    a text (in any format of `pretrain --dataset`), and save it."""
    if text is None:
        raise CtxError(
            "There is no such file of Fisher information.",
            location=f"--anchor ewc:file={file}",
            hint="pass a text to compute it from: --anchor ewc:file=FILE,text=TEXT.",
        )
    print_status(f"computing the Fisher information of {source} in {file}", verbose)
    evaluation = PretrainingEvaluation.open(source, text)
    evaluation.model.to(device)
    number = min(number, len(evaluation.examples))

    def batches() -> Iterable[Batch]:
        for index in progress_bar(range(number), "Fisher information", unit="examples", enabled=verbose):
            batch = evaluation.objective.collate([evaluation.examples[0, index]])
            yield CollatedBatch({name: value for name, value in batch.items() if name not in LOOP_COLUMNS}).to(device)

    fisher = fisher_information(evaluation.model, batches(), labels)
    save_fisher(file, fisher, evaluation.model, objective=evaluation.name, examples=number, labels=labels)


def save_fisher(file: str | Path, fisher: Mapping[str, Tensor], model: PreTrainedModel, **provenance: Any) -> None:
    """Write the Fisher information, with a digest of each weight of the model, and `provenance`: JSON values that
    describe the data."""
    weights = dict(model.base_model.named_parameters())
    digests = {name: weights_digest({name: weights[name]}) for name in fisher}
    with replacing(file) as temporary:
        write_tensors(temporary, fisher, {"weights": json.dumps(digests), "facts": json.dumps(provenance)})


def describe_fisher(file: str | Path) -> str:
    """Description of the data that a file of Fisher information was computed from."""
    try:
        with safe_open(file, "pt") as stored:
            facts: dict[str, Any] = json.loads((stored.metadata() or {}).get("facts", "{}"))
    except (OSError, SafetensorError, ValueError):
        return "damaged"  # `load_fisher` raises the error
    return ", ".join(f"{name} {value}" for name, value in facts.items()) or "of unknown origin"


def load_fisher(file: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The Fisher information by names in the encoder, and the digests of the weights that it was computed from."""
    location = f"--anchor ewc:file={file}"
    hint = "use an existing file, or another name and a text to compute it from: ewc:file=FILE,text=TEXT."
    message = "The Fisher information cannot be read"
    with wrap_errors(message, location=location, hint=hint), safe_open(file, "pt") as stored:
        digests = json.loads((stored.metadata() or {}).get("weights", "{}"))
        fisher = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    if set(digests) != set(fisher) or any(bool((value < 0).any()) for value in fisher.values()):
        raise CtxError("The file contains no Fisher information.", location=location, hint=hint)
    return fisher, digests
