"""Sentence encoders of the suite `recurrent`, and references in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.recurrent_cases import Case, ForwardPair
from benchmarks.recurrent_references import demo_lengths, pack, random_sequences, torch_layers, unpack
from hf_ctxmodels.registry import get_family


def encoder_forwards(case: Case, device: torch.device, dtype: torch.dtype) -> ForwardPair:
    """Forward passes to the (batch, hidden) `pooler_output` of the model and of the reference."""
    family = get_family(case.architecture)
    model = family.models["AutoModel"](family.config(**family.sizes[case.size])).to(device, dtype).eval()
    lengths = demo_lengths(case.batch_size, case.length)
    ids = pad_sequence(random_sequences(lengths, model.config.vocab_size), batch_first=True).to(device)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)
    return lambda: model(input_ids=ids, attention_mask=mask).pooler_output, reference_encoder(model, ids, lengths)


def reference_encoder(model: Any, ids: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    """Build a sentence encoder of `torch.nn.LSTM` or `torch.nn.GRU`.

    Args:
        model: A `RecurrentSentenceEncoder` with pooling "max" or "ends"; its word embeddings are shared.
        ids: (batch, length) ids without unknown words, padded on the right.
        lengths: (batch,) lengths, on the CPU.

    Returns:
        Forward pass to (batch, hidden) sentence embeddings.
    """
    layers, embed = torch_layers(model.layers), model.get_input_embeddings()

    def max_pooling() -> Tensor:
        return unpack(layers(pack(embed(ids), lengths))[0], float("-inf")).amax(1)

    def final_states() -> Tensor:
        state = layers(pack(embed(ids), lengths))[1]
        hidden = state[0] if isinstance(state, tuple) else state  # (hidden, cell) of an LSTM
        return torch.cat([hidden[-2], hidden[-1]], -1)

    return {"max": max_pooling, "ends": final_states}[model.config.pooling]
