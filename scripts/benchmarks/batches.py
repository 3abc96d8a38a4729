"""Random batches for the model and for the reference."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.cases import Case
from hf_ctxmodels.objectives import expand_permutation
from hf_ctxmodels.registry import FAMILIES

_MASK_FRACTION = 0.15
_PERMUTATION_FRACTION = 1 / 6


def random_lengths(case: Case) -> Tensor:
    """(batch,) exponentially distributed lengths with the mean fill of the case; the longest is `case.length`."""
    if case.fill == 1:
        return torch.full((case.batch,), case.length)
    spread = torch.empty(case.batch).exponential_()
    lengths = spread / spread.mean() * case.fill * case.length
    for _ in range(50):  # clamping changes the mean
        lengths = (lengths * case.fill * case.length / lengths.mean()).clamp(4, case.length)
    lengths[lengths.argmax()] = case.length
    return lengths.long()


def predicted_tokens(lengths: Tensor, case: Case) -> int:
    """Number of predicted tokens in a batch of these lengths."""
    if not case.uses_pretraining_head:
        return 0
    fraction = _PERMUTATION_FRACTION if case.family == "xlnet" else _MASK_FRACTION
    return int((lengths * fraction).round().sum())


def random_batches(model: PreTrainedModel, lengths: Tensor, case: Case) -> dict[str, dict[str, Tensor]]:
    """Build a random batch for the model and an equal one for the reference.

    Args:
        model: Model of this package; its head determines the targets.
        lengths: (batch,) number of tokens of each sequence.
        case: Benchmark case.

    Returns:
        Arguments of `forward`, for "model" and "reference".
    """
    vocab_size, type_vocab_size = model.config.vocab_size, getattr(model.config, "type_vocab_size", 2)
    mask = (torch.arange(case.length) < lengths[:, None]).long()
    ids = torch.randint(vocab_size // 10, vocab_size, mask.shape)
    batch = {
        "input_ids": ids.where(
            mask == 1, model.config.pad_token_id or 0
        ),  # RoBERTa in transformers derives positions from padding ids
        "attention_mask": mask,
        "token_type_ids": (torch.arange(case.length) >= lengths[:, None] // 2).long() * mask % type_vocab_size,
    }
    if "token_type_ids" not in FAMILIES[case.family].tokenizer.model_input_names:
        del batch["token_type_ids"]
    if not case.uses_pretraining_head:
        return {"model": batch, "reference": batch}
    if case.family == "xlnet":
        compact, expanded = _permutation_targets(batch["input_ids"])
        return {"model": batch | compact, "reference": batch | expanded}
    if getattr(model, "shifts_labels", False):
        batch["labels"] = batch["input_ids"].where(mask == 1, -100)
        return {"model": batch, "reference": batch}
    masked = torch.rand(mask.shape).masked_fill(mask == 0, 2).argsort(1).argsort(1)
    batch["labels"] = batch["input_ids"].where(masked < (lengths[:, None] * _MASK_FRACTION).round(), -100)
    for target in model.loss_targets[1:]:
        per_token = target == "token_labels"
        batch[target] = batch["input_ids"].where(mask == 1, -100) if per_token else torch.randint(0, 2, (case.batch,))
    return {"model": batch, "reference": batch}


def _permutation_targets(input_ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random targets in a random order: the arguments of this package, and the masks of the reference."""
    batch_size, length = input_ids.shape
    count = round(length * _PERMUTATION_FRACTION)
    positions = torch.rand(batch_size, length).argsort(1)[:, :count].sort(1).values
    ranks = torch.rand(batch_size, count).argsort(1)
    order = torch.full((batch_size, length), -1).scatter(1, positions, ranks)
    labels = input_ids.gather(1, positions)
    perm_mask, target_mapping = expand_permutation(order, positions)
    compact = {"permutation_order": order, "target_positions": positions, "labels": labels}
    return compact, {"perm_mask": perm_mask, "target_mapping": target_mapping, "labels": labels}
