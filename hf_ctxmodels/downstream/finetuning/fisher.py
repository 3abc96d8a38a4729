"""The diagonal of the Fisher information of a pretrained encoder's weights in its own pretraining."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels import heads
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.output_files import wrap_write_errors
from hf_ctxmodels.registry import get_family

Batch = Mapping[str, Any]
Labels = Literal["sampled", "data"]


def fisher_information(
    model: PreTrainedModel, examples: Iterable[Batch], labels: Labels = "sampled", seed: int = 0
) -> dict[str, Tensor]:
    """The mean over examples of the squared gradient of each example's loss (Kirkpatrick et al. 2017).

    It differs from the square of a batch's gradient. The expectation is over the model's predictions, so labels are
    sampled from them; the labels of the data give the empirical Fisher information.

    Args:
        model: The model with its pretraining head, in evaluation mode.
        examples: Batches of one example each, with labels at the predicted positions.
        labels: "sampled" from the model, for language models and masked language models; or the labels of the "data".
        seed: Seed of the samples.

    Returns:
        Name in the encoder -> a value for each weight, float32.

    Raises:
        CtxError: There are no examples, or the head's targets cannot be sampled.
    """
    prefix = f"{model.base_model_prefix}."
    parameters = {
        name.removeprefix(prefix): parameter
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and parameter.requires_grad
    }
    totals = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
    generator, number = torch.Generator().manual_seed(seed), 0
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
    # parameters that pretraining does not use are omitted
    return {name: total / number for name, total in totals.items() if bool(total.any())}


@torch.no_grad()
def sampled_targets(model: PreTrainedModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Targets of a batch sampled from the model's predictions, at the positions where the batch has targets.

    Args:
        model: A language model or a masked language model, possibly with sentence tasks.
        batch: A batch with targets.
        generator: Generator on the CPU.

    Raises:
        CtxError: The head's targets cannot be sampled from its predictions.
    """
    if isinstance(model, heads.ForCausalLM):  # its labels may be shifted, and longer than the input
        batch = {**batch, "shift_labels": model.resolve_targets(**batch), "labels": None}
    targets = [name for name in (*model.loss_targets, "shift_labels") if batch.get(name) is not None]
    output = model(**{name: value for name, value in batch.items() if name not in targets})
    samples: dict[str, Any] = {"labels": None} if "shift_labels" in targets else {}
    for name in targets:
        logits, labels = _logits_of_target(model, output, name), batch[name]
        # the losses of word vectors (negative samples, least squares) are not likelihoods
        if logits is None or logits.shape[:-1] != labels.shape or hasattr(model, "set_sparse_gradients"):
            raise CtxError(
                f"The targets {name!r} of {type(model).__name__} cannot be sampled from its predictions.",
                location="--anchor ewc:labels=sampled",
                hint="use labels=data.",
            )
        values = torch.multinomial(logits.float().softmax(-1).flatten(0, -2).cpu(), 1, generator=generator)
        sampled = values.view(labels.shape).to(labels)
        samples[name] = sampled.masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
    return samples


def _logits_of_target(model: Any, output: Any, name: str) -> Tensor | None:
    """The output's logits for a target; None if they are not returned."""
    logits_field = get_family(model).traits.logits.get(name)
    if logits_field is not None:
        return output.get(logits_field)
    return output.get("prediction_logits", output.get("logits")) if name in ("labels", "shift_labels") else None


def save_fisher(file: str | Path, fisher: Mapping[str, Tensor], model: PreTrainedModel, **facts: Any) -> None:
    """Write the Fisher information atomically, as safetensors.

    Args:
        file: Path of the file.
        fisher: From `fisher_information`.
        model: The model that it was computed with; a digest of each weight is recorded.
        facts: Further JSON values to record.
    """
    weights = dict(model.base_model.named_parameters())
    digests = {name: weights_digest({name: weights[name]}) for name in fisher}
    path = Path(file)
    temporary = path.with_name(f".{path.name}.writing")
    with wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"weights": json.dumps(digests), "facts": json.dumps(facts)}
        save_file({name: value.cpu().contiguous() for name, value in fisher.items()}, temporary, metadata)
        temporary.replace(path)


def describe_fisher(file: str | Path) -> str:
    """Description of the data that a file of Fisher information was computed from."""
    try:
        with safe_open(file, "pt") as stored:
            facts: dict[str, Any] = json.loads((stored.metadata() or {}).get("facts", "{}"))
    except (OSError, SafetensorError, ValueError):
        return "damaged"  # `load_fisher` raises the error
    return ", ".join(f"{name} {value}" for name, value in facts.items()) or "of unknown origin"


def load_fisher(file: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The Fisher information by names in the encoder, and the digests of the weights that it was computed from.

    Raises:
        CtxError: The file is missing or damaged, or does not contain Fisher information.
    """
    try:
        with safe_open(file, "pt") as stored:
            digests = json.loads((stored.metadata() or {}).get("weights", "{}"))
            fisher = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CtxError(
            f"The Fisher information cannot be read: {error}.",
            location=f"--anchor ewc:file={file}",
            hint="use an existing file, or a text to compute it from: ewc:file=FILE,text=TEXT.",
        ) from error
    if set(digests) != set(fisher) or any(bool((value < 0).any()) for value in fisher.values()):
        raise CtxError(
            "The file contains no Fisher information.",
            location=f"--anchor ewc:file={file}",
            hint="use another file name and a text to compute it from: ewc:file=FILE,text=TEXT.",
        )
    return fisher, digests


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def single_example_batches(collate: Any, examples: Any, number: int, device: torch.device) -> Iterable[Batch]:
    """The first examples of a pretraining objective as batches of one on a device, with a progress bar."""
    for index in progress_bar(range(min(number, len(examples))), "Fisher information", unit="examples", enabled=True):
        batch = dict(collate([examples[0, index]]))
        yield {name: value.to(device) for name, value in batch.items() if name not in ("epoch", "example_index")}
