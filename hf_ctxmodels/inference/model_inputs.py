"""What a model takes of texts, beside or in place of what the tokenizer gives."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.heads import ForMultipleChoice, Seq2SeqHead

Batch = dict[str, Tensor]


def writes_target(model: PreTrainedModel) -> bool:
    """Whether it takes `decoder_input_ids` beside its input."""
    return bool(model.config.is_encoder_decoder) and isinstance(model, Seq2SeqHead)


def decoder_input_of(model: Any, ids: Tensor) -> Tensor:
    """(batch, length) texts -> (batch, length + 2) `decoder_input_ids` of a target two tokens longer."""
    return model.prepare_decoder_input_ids_from_labels(torch.cat([ids, ids[:, :2]], 1))


def inputs_of_texts(model: PreTrainedModel, batch: Batch) -> Batch:
    """The inputs with which a model reads texts: with a target if it writes one, with one choice for multiple choice.

    Args:
        model: With its head.
        batch: (batch, length) tensors of the tokenizer.
    """
    if writes_target(model):
        return batch | {"decoder_input_ids": decoder_input_of(model, batch["input_ids"])}
    if isinstance(model, ForMultipleChoice):
        return {name: tensor[:, None] for name, tensor in batch.items()}
    return batch
