"""The summed loss of predicting each token from those before it, of many rows."""

import inspect
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.model_modes import evaluation_mode
from hf_ctxmodels.heads import ForCausalLM


def predicts_in_any_order(model: PreTrainedModel) -> bool:
    """Whether it is a permutation language model (XLNet), which predicts tokens in an order that its input names."""
    return model.can_generate() and "permutation_order" in inspect.signature(model.forward).parameters


def predicts_next_tokens(model: PreTrainedModel) -> bool:
    """Whether `sum_next_token_loss` takes it."""
    return (isinstance(model, ForCausalLM) and not model.is_backward) or predicts_in_any_order(model)


def sum_next_token_loss(
    model: PreTrainedModel, rows: Iterable[tuple[Tensor, Tensor]], *, batch_size: int, padding: int = 0
) -> tuple[float, int]:
    """The cross-entropy of all targets in nats, and their number.

    Args:
        model: A causal language model, or XLNet, which predicts each token by its query stream in the order of the
            text.
        rows: Of each row the (tokens,) ids, and the (tokens,) token that follows each, -100 where it is no target; the
            last one is a target.
        batch_size: Rows at a time; rows are padded to the longest of their batch.
        padding: The id at padding positions.
    """
    prepare = _in_order if predicts_in_any_order(model) else _causal
    rows, nats, tokens = iter(rows), 0.0, 0
    with evaluation_mode(model):
        while batch := list(islice(rows, batch_size)):
            inputs = pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=padding)
            present = pad_sequence([torch.ones_like(ids) for ids, _ in batch], batch_first=True)
            targets = pad_sequence([each for _, each in batch], batch_first=True, padding_value=IGNORE_INDEX)
            given = prepare(inputs, present, targets)
            loss = model(**{name: each.to(model.device) for name, each in given.items()}, return_logits=False).loss
            count = int((targets != IGNORE_INDEX).sum())
            nats, tokens = nats + float(loss) * count, tokens + count
    return nats, tokens


def _causal(ids: Tensor, mask: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": mask, "shift_labels": targets}


def _in_order(ids: Tensor, mask: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """A permutation language model reads the last target too: its query stream predicts a token at its own position."""
    lengths = mask.sum(1, keepdim=True)
    ids = F.pad(ids, (0, 1)).scatter(1, lengths, targets.gather(1, lengths - 1))
    columns = torch.arange(ids.shape[1]).expand(ids.shape)
    return {
        "input_ids": ids,
        "attention_mask": F.pad(mask, (1, 0), value=1),
        "token_type_ids": torch.zeros_like(ids),
        "permutation_order": columns,
        "target_positions": columns[:, 1:].masked_fill(targets == IGNORE_INDEX, -1),
        "labels": targets,
    }
