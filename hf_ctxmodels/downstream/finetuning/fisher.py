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

Batch = Mapping[str, Any]
Labels = Literal["sampled", "data"]


def fisher_information(
    model: PreTrainedModel, examples: Iterable[Batch], labels: Labels = "sampled", seed: int = 0
) -> dict[str, Tensor]:
    """The mean over examples of the squared gradient of each example's own loss (Kirkpatrick et al. 2017).

    The square of a batch's gradient is something else. The expectation is over the model's own predictions, so labels
    are drawn from them; those of the data give what is called the empirical Fisher information.

    Args:
        model: With its pretraining head, in evaluation mode.
        examples: Batches of one example each, with labels: they say where the model predicts.
        labels: "sampled" from the model, for language models and masked language models; or those of the "data".
        seed: Of the draws.

    Returns:
        Name in the encoder -> a value for each weight, float32.

    Raises:
        CtxError: There are no examples, or the head's targets cannot be drawn.
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
        if not any(heads.has_targets(batch.get(name)) for name in model.loss_targets):  # no token was chosen
            continue
        given = batch if labels == "data" else {**batch, **sampled_targets(model, batch, generator)}
        loss = model(**given).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for total, gradient in zip(totals.values(), gradients, strict=True):
            if gradient is not None:
                total += gradient.float().square()
        number += 1
    if not number:
        raise CtxError("There are no examples to compute the Fisher information from.", hint="give more text.")
    used = {name: total / number for name, total in totals.items()}
    return {name: value for name, value in used.items() if bool(value.any())}


@torch.no_grad()
def sampled_targets(model: PreTrainedModel, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """The targets of a batch drawn from the model's own predictions, where it has targets.

    Args:
        model: A language model, or a masked one, also with sentence tasks.
        batch: With targets.
        generator: On the CPU.

    Raises:
        CtxError: The head predicts something else.
    """
    if isinstance(model, heads.ForCausalLM):  # whose labels may be shifted, and longer than the row
        batch = {**batch, "shift_labels": model.targets_of(**batch), "labels": None}
    targets = [name for name in (*model.loss_targets, "shift_labels") if batch.get(name) is not None]
    output = model(**{name: value for name, value in batch.items() if name not in targets})
    drawn: dict[str, Any] = {"labels": None} if "shift_labels" in targets else {}
    for name in targets:
        logits, places = _logits_of(model, output, name), batch[name]
        # the losses of word vectors (negative samples, least squares) are no likelihoods of their logits
        if logits is None or logits.shape[:-1] != places.shape or hasattr(model, "set_sparse_gradients"):
            raise CtxError(
                f"The targets {name!r} of {type(model).__name__} cannot be drawn from its predictions.",
                location="--anchor ewc:labels=sampled",
                hint="give labels=data.",
            )
        values = torch.multinomial(logits.float().softmax(-1).flatten(0, -2).cpu(), 1, generator=generator)
        found = values.view(places.shape).to(places)
        drawn[name] = found.masked_fill(places == IGNORE_INDEX, IGNORE_INDEX)
    return drawn


def _logits_of(model: Any, output: Any, name: str) -> Tensor | None:
    """The output's logits of a target; None where they are not returned."""
    for task in getattr(model, "tasks", ()):
        if task.target == name:
            return None if task.logits is None else output.get(task.logits)
    return output.get("prediction_logits", output.get("logits"))


def save_fisher(file: str | Path, fisher: Mapping[str, Tensor], model: PreTrainedModel, **facts: Any) -> None:
    """Write the Fisher information atomically, as safetensors.

    Args:
        file: Its name.
        fisher: Of `fisher_information`.
        model: That it was computed with; a digest of each weight is recorded.
        facts: What else is recorded, as JSON values.
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
    """What a file of Fisher information was computed from, in words."""
    try:
        with safe_open(file, "pt") as stored:
            facts: dict[str, Any] = json.loads((stored.metadata() or {}).get("facts", "{}"))
    except (OSError, SafetensorError, ValueError):
        return "damaged"  # reading it says how
    return ", ".join(f"{name} {value}" for name, value in facts.items()) or "nothing is known of how it was made"


def load_fisher(file: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The Fisher information by names in the encoder, and the digests of the weights that it is of.

    Raises:
        CtxError: The file is missing or damaged, or holds something else.
    """
    try:
        with safe_open(file, "pt") as stored:
            digests = json.loads((stored.metadata() or {}).get("weights", "{}"))
            fisher = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CtxError(
            f"The Fisher information cannot be read: {error}.",
            location=f"--anchor ewc:file={file}",
            hint="give a file that was computed before, or a text to compute it from, ewc:file=FILE,text=TEXT.",
        ) from error
    if set(digests) != set(fisher) or any(bool((value < 0).any()) for value in fisher.values()):
        raise CtxError(
            "The file holds no Fisher information.", location=f"--anchor ewc:file={file}", hint="compute it."
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


def single_example_batches(collate: Any, rows: Any, number: int, device: torch.device) -> Iterable[Batch]:
    """The first rows of a pretraining objective as batches of one on a device, with a progress bar."""
    for index in progress_bar(range(min(number, len(rows))), "Fisher information", unit="examples", enabled=True):
        batch = dict(collate([rows[0, index]]))
        yield {name: value.to(device) for name, value in batch.items() if name not in ("epoch", "example_index")}
