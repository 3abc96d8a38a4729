"""The summed next-token loss of many rows."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_ctxmodels.core.constants import IGNORED
from hf_ctxmodels.core.evaluation_mode import evaluation_mode


def sum_next_token_loss(
    model: PreTrainedModel, rows: Iterable[tuple[Tensor, Tensor]], *, batch_size: int, padding: int = 0
) -> tuple[float, int]:
    """The cross-entropy of all targets in nats, and their number.

    Args:
        model: A causal language model.
        rows: Of each row the (tokens,) ids, and the (tokens,) token that follows each, -100 where it is no target;
            every row has a target.
        batch_size: Rows at a time; rows are padded to the longest of their batch.
        padding: The id at padding positions.
    """
    rows, nats, tokens = iter(rows), 0.0, 0
    with evaluation_mode(model):
        while batch := list(islice(rows, batch_size)):
            targets = pad_sequence([each for _, each in batch], batch_first=True, padding_value=IGNORED)
            given = {
                "input_ids": pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=padding),
                "attention_mask": pad_sequence([torch.ones_like(ids) for ids, _ in batch], batch_first=True),
                "shift_labels": targets,
            }
            loss = model(**{name: each.to(model.device) for name, each in given.items()}, return_logits=False).loss
            count = int((targets != IGNORED).sum())
            nats, tokens = nats + float(loss) * count, tokens + count
    return nats, tokens
