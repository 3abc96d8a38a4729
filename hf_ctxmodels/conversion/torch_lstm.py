"""Conversion of the weights of a bidirectional `torch.nn.LSTM` to native names and shapes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import safe_globals

from hf_ctxmodels.core.errors import CtxError, wrap_errors

_WEIGHT_NAMES = {"input_weight": "weight_ih", "state_weight": "weight_hh", "bias": "bias_ih", "state_bias": "bias_hh"}
_DIRECTIONS = ("", "_reverse")
_NUM_SPECIAL_WORDS = 2  # padding and unknown words, with zero vectors


def read_torch_file(file: str | Path, allowed: Sequence[type] = ()) -> Any:
    """Read a pickle file of tensors and plain values.

    Args:
        file: Its path.
        allowed: Further types of values, whose unpickling must not execute code.

    Raises:
        CtxError: The file cannot be read, or contains objects of other types.
    """
    hint = "use the released file, or a state dict: torch.save(model.state_dict(), ...)."
    with wrap_errors("Cannot read the weights", location=str(file), hint=hint), safe_globals([*allowed]):
        return torch.load(file, map_location="cpu", weights_only=True)


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """Read a state dict and remove the prefixes of its names (`rnn.`, `enc_lstm.`).

    Raises:
        CtxError: The file cannot be read, or is not a state dict.
    """
    weights = read_torch_file(file)
    if not isinstance(weights, Mapping) or not all(torch.is_tensor(value) for value in weights.values()):
        raise CtxError(f"The file contains a {type(weights).__name__}, not a state dict.", location=str(file))
    return {name.rpartition(".")[2]: value for name, value in weights.items()}


def convert_layers(weights: Mapping[str, Tensor], location: str | None = None) -> dict[str, Tensor]:
    """Convert the weights of a bidirectional LSTM.

    Args:
        weights: Name in `torch.nn.LSTM` -> weight.
        location: The file, for error messages.

    Returns:
        Native name -> weight.

    Raises:
        CtxError: A weight is missing or unexpected.
    """
    layers = {int(name.rpartition("_l")[2]) for name in weights if name.rpartition("_l")[2].isdigit()}
    expected = {
        f"layers.{layer}.{native_name}": [f"{torch_name}_l{layer}{direction}" for direction in _DIRECTIONS]
        for layer in range(1 + max(layers, default=0))
        for native_name, torch_name in _WEIGHT_NAMES.items()
    }
    names = {name for pair in expected.values() for name in pair}
    if names != set(weights):
        missing, unexpected = sorted(names - set(weights)), sorted(set(weights) - names)
        raise CtxError(
            f"Not the weights of a bidirectional LSTM: missing {missing[:4]}, unexpected {unexpected[:4]}.",
            location=location,
            hint="use the weights of the encoder only.",
        )
    return {
        native_name: torch.stack([weights[name].float() for name in torch_names])
        for native_name, torch_names in expected.items()
    }


def layer_fields(layers: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the configuration fields that follow from the shapes of converted weights."""
    return {
        "embedding_size": layers["layers.0.input_weight"].shape[2],
        "hidden_size": 2 * layers["layers.0.state_weight"].shape[2],
        "num_hidden_layers": len(layers) // len(_WEIGHT_NAMES),
    }


def model_on_vectors(
    model_class: type, weights: Mapping[str, Tensor], vectors: np.ndarray, location: str | None = None, **fields: Any
) -> Any:
    """Create a model from the weights of a bidirectional LSTM and word vectors.

    Args:
        model_class: A base model with `word_embeddings` and `layers`.
        weights: The output of `read_state_dict`.
        vectors: (words, width); zero vectors of padding and unknown words are prepended.
        location: The file, for error messages.
        fields: Further configuration fields.

    Raises:
        CtxError: The weights are not those of a bidirectional LSTM, or require vectors of another width.
    """
    layers = convert_layers(weights, location)
    shape = layer_fields(layers)
    width = shape["embedding_size"]
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise CtxError(
            f"The vectors are {vectors.shape}; the weights require vectors of width {width}.", location=location
        )
    config_class: Any = model_class.config_class  # type: ignore[attr-defined]
    model = model_class(config_class(vocab_size=_NUM_SPECIAL_WORDS + len(vectors), **shape, **fields))
    embeddings = torch.cat(
        [torch.zeros(_NUM_SPECIAL_WORDS, width), torch.from_numpy(np.asarray(vectors, dtype=np.float32))]
    )
    model.load_state_dict({**layers, "word_embeddings.weight": embeddings})
    return model.eval()
