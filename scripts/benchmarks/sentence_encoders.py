"""Sentence encoders of the suite `recurrent`: a family's, and the same equations in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.recurrent_cases import Case, Sides
from benchmarks.recurrent_peers import demo_lengths, pack, random_texts, torch_layers, unpack
from hf_ctxmodels.registry import get_family


def encoder_sides(case: Case, device: torch.device, dtype: torch.dtype) -> Sides:
    """(rows, hidden) `pooler_output` of the family's encoder, by either side."""
    family = get_family(case.what)
    model = family.models["AutoModel"](family.config(**family.sizes[case.size])).to(device, dtype).eval()
    lengths = demo_lengths(case.rows, case.length)
    ids = pad_sequence(random_texts(lengths, model.config.vocab_size), batch_first=True).to(device)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)
    return lambda: model(input_ids=ids, attention_mask=mask).pooler_output, plain_encoder(model, ids, lengths)


def plain_encoder(model: Any, ids: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    """A sentence encoder in torch's own layers.

    Args:
        model: A `RecurrentSentenceEncoder` that pools by "max" or "ends"; the table of vectors is shared with it.
        ids: (rows, length), padded on the right, no unknown words.
        lengths: (rows,) on the CPU.

    Returns:
        What gives (rows, hidden), a vector for each sentence.
    """
    layers, look_up = torch_layers(model.layers), model.get_input_embeddings()

    def largest() -> Tensor:
        return unpack(layers(pack(look_up(ids), lengths))[0], float("-inf")).amax(1)

    def ends() -> Tensor:
        last = layers(pack(look_up(ids), lengths))[1]
        hidden = last[0] if isinstance(last, tuple) else last  # an LSTM's cell is beside it
        return torch.cat([hidden[-2], hidden[-1]], -1)

    return {"max": largest, "ends": ends}[model.config.pooling]
