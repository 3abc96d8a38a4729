"""The released MT-LSTM weights (a state dict of `torch.nn.LSTM`) -> an encoder."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.errors import CtxError
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.modeling_cove import CtxCoveModel

_PARTS = {"input_weight": "weight_ih", "state_weight": "weight_hh", "bias": "bias_ih", "state_bias": "bias_hh"}
_DIRECTIONS = ("", "_reverse")
_SPECIAL = 2  # padding and unknown words, whose vectors are zero


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """The weights of a file, whatever stands in front of their names (`rnn.` in the released ones).

    The file is a pickle, of which tensors alone are read.

    Raises:
        CtxError: It cannot be read, or holds anything but tensors.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise CtxError(
            f"Cannot read the weights: {str(error).splitlines()[0] if str(error) else error!r}",
            where=str(file),
            mend="give the file as it was released: a state dict saved by torch.",
        ) from error
    if not isinstance(found, Mapping) or not all(torch.is_tensor(value) for value in found.values()):
        raise CtxError(f"The file holds a {type(found).__name__}, not a state dict.", where=str(file))
    return {name.rpartition(".")[2]: value for name, value in found.items()}


def layers_of(weights: Mapping[str, Tensor], where: str | None = None) -> dict[str, Tensor]:
    """Native name -> weight, of an LSTM of two directions.

    Raises:
        CtxError: A weight is missing, or there is one that does not belong there.
    """
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
            f"Not the weights of an LSTM of two directions: missing {missing[:4]}, unexpected {more[:4]}.",
            where=where,
            mend="give the weights of the encoder alone.",
        )
    return {own: torch.stack([weights[name].float() for name in pair]) for own, pair in expected.items()}


def cove_of_weights(weights: Mapping[str, Tensor], vectors: np.ndarray, where: str | None = None) -> CtxCoveModel:
    """The encoder of these weights on a table of vectors.

    Args:
        weights: As `read_state_dict` gives them.
        vectors: (words, width); those of padding and of unknown words are put before them.
        where: The file, for errors.

    Raises:
        CtxError: The weights are not an encoder's, or read vectors of another width.
    """
    layers = layers_of(weights, where)
    width, hidden = layers["layers.0.input_weight"].shape[2], layers["layers.0.state_weight"].shape[2]
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise CtxError(f"The vectors are {vectors.shape}; the weights read vectors of width {width}.", where=where)
    config = CtxCoveConfig(
        vocab_size=_SPECIAL + len(vectors),
        embedding_size=width,
        hidden_size=2 * hidden,
        num_hidden_layers=len(layers) // len(_PARTS),
    )
    table = torch.cat([torch.zeros(_SPECIAL, width), torch.from_numpy(np.asarray(vectors, dtype=np.float32))])
    model = CtxCoveModel(config)
    model.load_state_dict({**layers, "word_embeddings.weight": table})
    return model.eval()
