r"""Convert released ELMo weights (AllenNLP's options.json and HDF5 file) to a model and its tokenizer.

hf-ctxmodels convert elmo --options options.json --weights weights.hdf5 --output runs/elmo
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import Conversion, load_weights
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig
from hf_ctxmodels.models.elmo.modeling_elmo import CtxElmoModel
from hf_ctxmodels.models.elmo.tokenization_elmo import CtxElmoTokenizer

_FORGET_BIAS = 1.0  # AllenNLP adds it to the forget gate at run time
_NUM_CHARACTERS = (261, 262)  # without and with the padding id


def config_from_options(options: Mapping[str, Any], location: str | None = None) -> CtxElmoConfig:
    """Create the configuration from an options.json; raises CtxError for missing entries and unsupported values."""
    with wrap_errors("Invalid ELMo options", location=location, hint="use the model's options.json."):
        lstm, cnn = options["lstm"], options["char_cnn"]
        if (count := cnn["n_characters"]) not in _NUM_CHARACTERS:
            raise CtxError(
                f"n_characters={count}; expected 261 or 262: bytes and special ids.",
                location=location,
                hint="use the options.json of a released model.",
            )
        return CtxElmoConfig(
            hidden_size=2 * lstm["projection_dim"],
            cell_size=lstm["dim"],
            num_hidden_layers=lstm["n_layers"],
            max_characters_per_token=cnn["max_characters_per_token"],
            character_embedding_size=cnn["embedding"]["dim"],
            filters=[list(pair) for pair in cnn["filters"]],
            num_highway_layers=cnn["n_highway"],
            hidden_act=cnn["activation"],
            residual=lstm["use_skip_connections"],
            cell_clip=lstm.get("cell_clip"),
            projection_clip=lstm.get("proj_clip"),
        )


def read_allennlp(options_file: str | Path, weights_file: str | Path) -> CtxElmoModel:
    """Load the model of an options.json and an HDF5 file; raises CtxError if they do not match, or h5py is not
    installed."""
    try:
        import h5py
    except ImportError as error:
        raise CtxError("h5py is not installed.", hint="pip install 'hf_ctxmodels[hdf5]'.") from error
    options = read_json(options_file, hint="use the model's options.json.")
    model, location = CtxElmoModel(config_from_options(options, str(options_file))), str(weights_file)
    hint = "use a complete HDF5 file."
    with wrap_errors("Cannot read the weights", location=location, hint=hint), h5py.File(weights_file, "r") as arrays:
        weights = _convert_weights(arrays, model.config, location)
    return load_weights(model, weights, location)


def _convert_weights(arrays: Mapping[str, Any], config: CtxElmoConfig, location: str) -> dict[str, Tensor]:
    """Parameter name -> weight."""

    def array(name: str) -> Tensor:
        if name not in arrays:
            raise CtxError(
                f"The file has no {name!r}; it has {', '.join(sorted(arrays)[:6])}, ...",
                location=location,
                hint="use the weights and the options of the same model.",
            )
        return torch.from_numpy(np.asarray(arrays[name]).astype(np.float32, casting="same_kind"))  # not from text

    characters = array("char_embed")
    weights = {"characters.embeddings.weight": torch.cat([torch.zeros_like(characters[:1]), characters])}
    for number in range(len(config.filters or [])):
        convolution = f"characters.convolutions.{number}"
        weights[f"{convolution}.weight"] = array(f"CNN/W_cnn_{number}")[0].permute(2, 1, 0)
        weights[f"{convolution}.bias"] = array(f"CNN/b_cnn_{number}")
    for number in range(config.num_highway_layers):
        layer, source = f"characters.highway.layers.{number}", f"CNN_high_{number}"
        # the file's gate is the transform gate; this package's is the carry gate
        weights[f"{layer}.weight"] = torch.cat([array(f"{source}/W_transform").T, -array(f"{source}/W_carry").T])
        weights[f"{layer}.bias"] = torch.cat([array(f"{source}/b_transform"), -array(f"{source}/b_carry")])
    weights["characters.projection.weight"] = array("CNN_proj/W_proj").T
    weights["characters.projection.bias"] = array("CNN_proj/b_proj")
    for depth in range(config.num_hidden_layers):
        paths = [f"RNN_{direction}/RNN/MultiRNNCell/Cell{depth}/LSTMCell" for direction in range(2)]
        gates = torch.stack([_reorder_gates(array(f"{path}/W_0").T) for path in paths])
        bias = torch.stack([_reorder_gates(array(f"{path}/B")) for path in paths])
        bias[:, config.cell_size : 2 * config.cell_size] += _FORGET_BIAS
        layer, width = f"layers.{depth}", config.projection_size
        weights[f"{layer}.input_weight"], weights[f"{layer}.state_weight"] = gates[..., :width], gates[..., width:]
        weights[f"{layer}.bias"] = bias
        weights[f"{layer}.projection"] = torch.stack([array(f"{path}/W_P_0").T for path in paths])
    return weights


def _reorder_gates(gates: Tensor) -> Tensor:
    """Reorder gates from input, candidate, forget, output to input, forget, candidate, output."""
    in_gate, candidate, forget, out_gate = gates.chunk(4)
    return torch.cat([in_gate, forget, candidate, out_gate])


@dataclass(kw_only=True)
class ElmoConversion(Conversion):
    """Arguments of the conversion."""

    options: str = flag(REQUIRED, "The model's options.json.")
    weights: str = flag(REQUIRED, "The model's HDF5 file.")
    vocabulary: str | None = flag(
        None, "Output vocabulary of the language model, one word per line, most frequent first."
    )

    def convert(self) -> tuple[CtxElmoModel, CtxElmoTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        words = [] if self.vocabulary is None else "".join(read_lines(self.vocabulary)).split()
        model = read_allennlp(self.options, self.weights)
        # the released models were trained on tokenized text
        tokenizer = CtxElmoTokenizer.from_words(
            [word for word in words if word not in {*CtxElmoTokenizer.special_tokens, "<UNK>"}],
            split_punctuation=False,
            max_characters=model.config.max_characters_per_token,
        )
        model.config.vocab_size = len(tokenizer)
        return model, tokenizer, self.weights
