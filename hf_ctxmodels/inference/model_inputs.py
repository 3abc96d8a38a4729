"""Model inputs for encoded texts."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ctxmodels.heads import ForMultipleChoice, Seq2SeqHead

Batch = dict[str, Tensor]


def has_generating_decoder(model: PreTrainedModel) -> bool:
    """Whether the model generates a target sequence and its forward takes `decoder_input_ids`."""
    return bool(model.config.is_encoder_decoder) and isinstance(model, Seq2SeqHead)


def example_decoder_input_ids(model: Any, input_ids: Tensor) -> Tensor:
    """(batch, length) token ids -> (batch, length + 2) `decoder_input_ids` of an example target."""
    return model.prepare_decoder_input_ids_from_labels(torch.cat([input_ids, input_ids[:, :2]], 1))


def inputs_for_texts(model: PreTrainedModel, batch: Batch) -> Batch:
    """Inputs for one forward pass over texts, with a target for an encoder-decoder and one choice for multiple choice.

    Args:
        model: A model with its head.
        batch: (batch, length) outputs of the tokenizer.
    """
    if has_generating_decoder(model):
        return batch | {"decoder_input_ids": example_decoder_input_ids(model, batch["input_ids"])}
    if isinstance(model, ForMultipleChoice):
        return {name: tensor[:, None] for name, tensor in batch.items()}
    return batch
