"""Random batches in the form each side of a comparison takes."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.cases import Case
from hf_ctxmodels.objectives import expand_permutation
from hf_ctxmodels.registry import FAMILIES

_MASKED_SHARE = 0.15
_PERMUTED_SHARE = 1 / 6


def random_lengths(case: Case) -> Tensor:
    """(batch,) exponentially spread lengths with the case's mean fill, the longest one full."""
    if case.fill == 1:
        return torch.full((case.batch,), case.length)
    spread = torch.empty(case.batch).exponential_()
    lengths = spread / spread.mean() * case.fill * case.length
    for _ in range(50):  # clamping moves the mean; move it back
        lengths = (lengths * case.fill * case.length / lengths.mean()).clamp(4, case.length)
    lengths[lengths.argmax()] = case.length
    return lengths.long()


def predicted_tokens(lengths: Tensor, case: Case) -> int:
    """Tokens that are predicted in a batch of these lengths."""
    if not case.pretrains:
        return 0
    share = _PERMUTED_SHARE if case.family == "xlnet" else _MASKED_SHARE
    return int((lengths * share).round().sum())


def random_batches(model: PreTrainedModel, lengths: Tensor, case: Case) -> dict[str, dict[str, Tensor]]:
    """One batch, as our side and as the peer takes it.

    Args:
        model: Our model; its head says which targets there are.
        lengths: (batch,) tokens of each row.
        case: What is run.

    Returns:
        "ours" and "peer" -> the arguments of `forward`.
    """
    vocab_size, types = model.config.vocab_size, getattr(model.config, "type_vocab_size", 2)
    mask = (torch.arange(case.length) < lengths[:, None]).long()
    ids = torch.randint(vocab_size // 10, vocab_size, mask.shape)
    batch = {
        "input_ids": ids.where(mask == 1, model.config.pad_token_id or 0),  # by which RoBERTa's peer counts positions
        "attention_mask": mask,
        "token_type_ids": (torch.arange(case.length) >= lengths[:, None] // 2).long() * mask % types,
    }
    if "token_type_ids" not in FAMILIES[case.family].tokenizer.model_input_names:
        del batch["token_type_ids"]
    if not case.pretrains:
        return {"ours": batch, "peer": batch}
    if case.family == "xlnet":
        compact, expanded = _permutation_targets(batch["input_ids"])
        return {"ours": batch | compact, "peer": batch | expanded}
    if getattr(model, "shifts_labels", False):
        batch["labels"] = batch["input_ids"].where(mask == 1, -100)
        return {"ours": batch, "peer": batch}
    masked = torch.rand(mask.shape).masked_fill(mask == 0, 2).argsort(1).argsort(1)
    batch["labels"] = batch["input_ids"].where(masked < (lengths[:, None] * _MASKED_SHARE).round(), -100)
    for target in model.loss_targets[1:]:
        per_token = target == "token_labels"
        batch[target] = batch["input_ids"].where(mask == 1, -100) if per_token else torch.randint(0, 2, (case.batch,))
    return {"ours": batch, "peer": batch}


def _permutation_targets(input_ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random targets and a random order of them: our compact form, and the masks of the reference."""
    batch_size, length = input_ids.shape
    count = round(length * _PERMUTED_SHARE)
    positions = torch.rand(batch_size, length).argsort(1)[:, :count].sort(1).values
    ranks = torch.rand(batch_size, count).argsort(1)
    order = torch.full((batch_size, length), -1).scatter(1, positions, ranks)
    labels = input_ids.gather(1, positions)
    hidden, mapping = expand_permutation(order, positions)
    compact = {"permutation_order": order, "target_positions": positions, "labels": labels}
    return compact, {"perm_mask": hidden, "target_mapping": mapping, "labels": labels}
