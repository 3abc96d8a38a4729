"""Conversion of the weights of a bidirectional `torch.nn.LSTM` to native names and shapes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import safe_globals

from hf_ctxmodels.core.errors import CtxError, wrap_errors

_PARTS = {"input_weight": "weight_ih", "state_weight": "weight_hh", "bias": "bias_ih", "state_bias": "bias_hh"}
_DIRECTIONS = ("", "_reverse")
_SPECIAL = 2  # zero vectors of padding and unknown words


def read_torch_file(file: str | Path, allowed: Sequence[type] = ()) -> Any:
    """The content of a pickle of tensors and plain values.

    Args:
        file: Its path.
        allowed: Further types of values that run no code when they are read.

    Raises:
        CtxError: It cannot be read, or holds other objects.
    """
    hint = "give the released file, or a state dict: torch.save(model.state_dict(), ...)."
    with wrap_errors("Cannot read the weights", location=str(file), hint=hint), safe_globals([*allowed]):
        return torch.load(file, map_location="cpu", weights_only=True)


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """The weights of a file, without the prefixes of their names (`rnn.`, `enc_lstm.`).

    Raises:
        CtxError: As `read_torch_file`, or the file is no state dict.
    """
    found = read_torch_file(file)
    if not isinstance(found, Mapping) or not all(torch.is_tensor(value) for value in found.values()):
        raise CtxError(f"The file holds a {type(found).__name__}, not a state dict.", location=str(file))
    return {name.rpartition(".")[2]: value for name, value in found.items()}


def convert_layers(weights: Mapping[str, Tensor], location: str | None = None) -> dict[str, Tensor]:
    """Native name -> weight of a bidirectional LSTM; raises CtxError if a weight is missing or unexpected."""
    depths = {int(name.rpartition("_l")[2]) for name in weights if name.rpartition("_l")[2].isdigit()}
    expected = {
        f"layers.{depth}.{own}": [f"{part}_l{depth}{direction}" for direction in _DIRECTIONS]
        for depth in range(1 + max(depths, default=0))
        for own, part in _PARTS.items()
    }
    names = {name for pair in expected.values() for name in pair}
    if names != set(weights):
        missing, more = sorted(names - set(weights)), sorted(set(weights) - names)
        raise CtxError(
            f"Not the weights of a bidirectional LSTM: missing {missing[:4]}, unexpected {more[:4]}.",
            location=location,
            hint="give the weights of the encoder only.",
        )
    return {own: torch.stack([weights[name].float() for name in pair]) for own, pair in expected.items()}


def layer_fields(layers: Mapping[str, Tensor]) -> dict[str, int]:
    """Configuration fields of converted layers."""
    return {
        "embedding_size": layers["layers.0.input_weight"].shape[2],
        "hidden_size": 2 * layers["layers.0.state_weight"].shape[2],
        "num_hidden_layers": len(layers) // len(_PARTS),
    }


def model_on_vectors(
    model_class: type, weights: Mapping[str, Tensor], vectors: np.ndarray, location: str | None = None, **fields: Any
) -> Any:
    """A model of these layers on a table of word vectors.

    Args:
        model_class: A base model with `word_embeddings` and `layers`.
        weights: From `read_state_dict`.
        vectors: (words, width); zero vectors of padding and unknown words are prepended.
        location: The file, for errors.
        fields: Other fields of the configuration.

    Raises:
        CtxError: The weights are not an encoder's, or need vectors of another width.
    """
    layers = convert_layers(weights, location)
    shape = layer_fields(layers)
    width = shape["embedding_size"]
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise CtxError(
            f"The vectors are {vectors.shape}; the weights need vectors of width {width}.", location=location
        )
    config_class: Any = model_class.config_class  # type: ignore[attr-defined]
    model = model_class(config_class(vocab_size=_SPECIAL + len(vectors), **shape, **fields))
    table = torch.cat([torch.zeros(_SPECIAL, width), torch.from_numpy(np.asarray(vectors, dtype=np.float32))])
    model.load_state_dict({**layers, "word_embeddings.weight": table})
    return model.eval()
