"""Conversion of bidirectional `torch.nn.LSTM` encoders on word vectors (CoVe, InferSent) to native names and shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import Conversion, read_tensors
from hf_ctxmodels.conversion.word_vector_files import READERS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.word_level import SPECIAL_TOKENS

_WEIGHT_NAMES = {"input_weight": "weight_ih", "state_weight": "weight_hh", "bias": "bias_ih", "state_bias": "bias_hh"}
_NUM_SPECIAL_WORDS = 2  # padding and unknown words, with zero vectors


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """Read a state dict without the prefixes of its names (`rnn.`, `enc_lstm.`); raises CtxError for other files."""
    return {name.rpartition(".")[2]: value for name, value in read_tensors(file).items()}


def convert_layers(
    weights: Mapping[str, Tensor], location: str | None = None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Convert the weights of a bidirectional `torch.nn.LSTM`, by their names there.

    Returns:
        Native name -> weight, and the configuration fields that follow from the shapes.

    Raises:
        CtxError: A weight of the file `location` is missing or unexpected.
    """
    layers = {int(name.rpartition("_l")[2]) for name in weights if name.rpartition("_l")[2].isdigit()}
    expected = {
        f"layers.{layer}.{native_name}": [f"{torch_name}_l{layer}{direction}" for direction in ("", "_reverse")]
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
    converted = {
        native_name: torch.stack([weights[name].float() for name in torch_names])
        for native_name, torch_names in expected.items()
    }
    return converted, {
        "embedding_size": converted["layers.0.input_weight"].shape[2],
        "hidden_size": 2 * converted["layers.0.state_weight"].shape[2],
        "num_hidden_layers": len(converted) // len(_WEIGHT_NAMES),
    }


def model_on_vectors(
    model_class: Any, weights: Mapping[str, Tensor], vectors: np.ndarray, location: str | None = None, **fields: Any
) -> Any:
    """Create a base model with `word_embeddings` and `layers` from the weights (`read_state_dict`) of a bidirectional
    LSTM and (words, width) word vectors; zero vectors of padding and unknown words are prepended. `fields` are further
    configuration fields.

    Raises:
        CtxError: As `convert_layers`, or the weights require vectors of another width.
    """
    layers, sizes = convert_layers(weights, location)
    width = sizes["embedding_size"]
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise CtxError(
            f"The vectors are {vectors.shape}; the weights require vectors of width {width}.", location=location
        )
    model = model_class(model_class.config_class(vocab_size=_NUM_SPECIAL_WORDS + len(vectors), **sizes, **fields))
    table = torch.from_numpy(np.asarray(vectors, dtype=np.float32))
    embeddings = torch.cat([torch.zeros(_NUM_SPECIAL_WORDS, width), table])
    model.load_state_dict({**layers, "word_embeddings.weight": embeddings})
    return model.eval()


@dataclass(kw_only=True)
class VectorEncoderConversion(Conversion):
    """Arguments of the conversion."""

    weights: str = flag(REQUIRED, "State dict of the encoder.")
    vectors: str = flag(REQUIRED, "File of its word vectors.")
    vectors_format: str = flag("glove", "Format of --vectors.", choices=tuple(READERS))
    do_lower_case: bool = flag(False, "Lower-case text before words are looked up.")

    def convert_encoder(self, family: str, sentence_tokens: Sequence[str] = (), **fields: Any) -> tuple[Any, Any, str]:
        """The model of a family, its tokenizer and a description of the source.

        The tokenizer splits at white space, or as in the Penn Treebank, see `WordVectors.to_model`. Of the
        `sentence_tokens`, its begin and end token, those that have vectors are used. `fields` are fields of the
        configuration.
        """
        vectors, spec = READERS[self.vectors_format](self.vectors), get_family(family)
        rows = [row for row, word in enumerate(vectors.words) if word not in SPECIAL_TOKENS]
        special_tokens = {
            name: token
            for name, token in zip(("bos_token", "eos_token"), sentence_tokens)
            if token in vectors.word_to_index
        }
        weights = read_state_dict(self.weights)
        model = model_on_vectors(spec.models["AutoModel"], weights, vectors.matrix[rows], self.weights, **fields)
        words = [vectors.words[row] for row in rows]
        tokenizer = spec.tokenizer.from_words(
            words,
            do_lower_case=self.do_lower_case,
            split_punctuation=False,
            treebank_words=vectors.has_treebank_words,
            **special_tokens,
        )
        suffix = f", with {' and '.join(special_tokens.values())}" if special_tokens else ""
        return model, tokenizer, f"{self.weights} on {len(rows):,} vectors{suffix}"
