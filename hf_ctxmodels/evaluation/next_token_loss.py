"""Summed cross-entropy of next-token prediction over many sequences."""

import inspect
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.heads import ForCausalLM


def is_permutation_lm(model: PreTrainedModel) -> bool:
    """Whether the model is a permutation language model (XLNet), whose inputs name the factorization order."""
    return model.can_generate() and "permutation_order" in inspect.signature(model.forward).parameters


def predicts_next_tokens(model: PreTrainedModel) -> bool:
    """Whether `sum_next_token_loss` supports the model."""
    return (isinstance(model, ForCausalLM) and not model.is_backward) or is_permutation_lm(model)


def sum_next_token_loss(
    model: PreTrainedModel,
    sequences: Iterable[tuple[Tensor, Tensor]],
    *,
    batch_size: int,
    padding: int = 0,
) -> tuple[float, int]:
    """Sum the cross-entropy of all targets.

    Args:
        model: A causal language model, or XLNet, whose query stream predicts the tokens from left to right.
        sequences: Pairs of (tokens,) ids and (tokens,) next tokens, -100 where there is no target; the last next token
            is a target.
        batch_size: Sequences per batch, padded to the longest one.
        padding: Token id at padding positions.

    Returns:
        The summed cross-entropy in nats, and the number of targets.
    """
    make_inputs = _permutation_lm_inputs if is_permutation_lm(model) else _causal_lm_inputs
    iterator, total_loss, num_targets = iter(sequences), 0.0, 0
    with evaluation_mode(model):
        while batch := list(islice(iterator, batch_size)):
            input_ids = pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=padding)
            attention_mask = pad_sequence([torch.ones_like(ids) for ids, _ in batch], batch_first=True)
            targets = pad_sequence([next_ids for _, next_ids in batch], batch_first=True, padding_value=IGNORE_INDEX)
            inputs = make_inputs(input_ids, attention_mask, targets)
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            loss = model(**inputs, return_logits=False).loss
            count = int((targets != IGNORE_INDEX).sum())
            total_loss, num_targets = total_loss + float(loss) * count, num_targets + count
    return total_loss, num_targets


def _causal_lm_inputs(input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"input_ids": input_ids, "attention_mask": attention_mask, "shift_labels": targets}


def _permutation_lm_inputs(input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Inputs with the last target appended: the query stream predicts a token at its own position."""
    lengths = attention_mask.sum(1, keepdim=True)
    input_ids = F.pad(input_ids, (0, 1)).scatter(1, lengths, targets.gather(1, lengths - 1))
    positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
    return {
        "input_ids": input_ids,
        "attention_mask": F.pad(attention_mask, (1, 0), value=1),
        "token_type_ids": torch.zeros_like(input_ids),
        "permutation_order": positions,
        "target_positions": positions[:, 1:].masked_fill(targets == IGNORE_INDEX, -1),
        "labels": targets,
    }
