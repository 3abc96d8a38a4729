"""The files of fastai's AWD-LSTM language models (.pth, and the list of words) -> model and tokenizer."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from hf_ctxmodels.architectures.torch_lstm_conversion import read_torch_file
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig
from hf_ctxmodels.models.ulmfit.modeling_ulmfit import CtxUlmfitForCausalLM
from hf_ctxmodels.models.ulmfit.tokenization_ulmfit import CtxUlmfitTokenizer

# fastai 1 and 2, and the release of 2018; a file of the encoder only has no leading number
_LAYER = re.compile(r"^(?:0\.)?rnns\.(\d+)\.(?:module\.)?(weight_ih|weight_hh|bias_ih|bias_hh)_l0(_raw)?$")
_NATIVE = {"weight_ih": "input_weight", "weight_hh": "state_weight", "bias_ih": "bias", "bias_hh": "state_bias"}
_RENAMED = {  # words of the release of 2018
    "_unk_": "xxunk",
    "_pad_": "xxpad",
    "xbos": "xxbos",
    "xfld": "xxfld",
    "t_up": "xxup",
    "tk_rep": "xxrep",
    "tk_wrep": "xxwrep",
}


def read_fastai(file: str | Path) -> CtxUlmfitForCausalLM:
    """The language model of a .pth file; for an encoder's file, with a zero bias of the softmax.

    Raises:
        CtxError: The file is missing or damaged, or holds no AWD-LSTM.
    """
    weights = _tensors(file)
    native = _native(weights, str(file))
    depth = 1 + max(int(name.split(".")[2]) for name in native if ".layers." in name)
    words, width = native["decoder.weight"].shape
    first = native["ulmfit.layers.0.state_weight"].shape[2]
    config = CtxUlmfitConfig(
        vocab_size=words,
        hidden_size=width,
        cell_size=first if depth > 1 else CtxUlmfitConfig().cell_size,
        num_hidden_layers=depth,
    )
    model = CtxUlmfitForCausalLM(config)
    expected = model.state_dict()
    for name in sorted({*native, *expected}):
        shape, required = (None if name not in some else tuple(some[name].shape) for some in (native, expected))
        if shape != required:
            raise CtxError(
                f"{name} is {shape}, expected {required} in an AWD-LSTM of {depth} layers of width {width}.",
                location=str(file),
                hint="give the weights of a forward LSTM language model.",
            )
    model.load_state_dict(native)
    return model.eval()


def _tensors(file: str | Path) -> Mapping[str, Tensor]:
    """The weights of a file."""
    loaded = read_torch_file(file)
    inside = loaded.get("model", loaded) if isinstance(loaded, Mapping) else loaded  # the file may hold an optimizer
    if not isinstance(inside, Mapping) or not all(torch.is_tensor(value) for value in inside.values()):
        raise CtxError("The file holds no dictionary of weights.", location=str(file), hint="give a state_dict.")
    return inside


def _native(weights: Mapping[str, Tensor], location: str) -> dict[str, Tensor]:
    """Native name -> weight. Of recurrent weights before and after weight dropout, those before it are taken."""
    embeddings = next((weights[name] for name in ("0.encoder.weight", "encoder.weight") if name in weights), None)
    if embeddings is None:
        raise CtxError(
            f"The file has no encoder.weight; it has {', '.join(sorted(weights)[:6])}, ...",
            location=location,
            hint="give the weights of an AWD-LSTM language model or of its encoder.",
        )
    native = {"ulmfit.word_embeddings.weight": embeddings}
    native["decoder.weight"] = weights.get("1.decoder.weight", embeddings)
    native["decoder.bias"] = weights.get("1.decoder.bias", embeddings.new_zeros(len(embeddings)))
    raw = {name.removesuffix("_raw") for name in weights if name.endswith("_raw")}
    plain = {name.replace(".module.", ".") for name in raw}
    for name, value in weights.items():
        match = _LAYER.match(name)
        if match and (match[3] or name.replace(".module.", ".") not in plain):
            native[f"ulmfit.layers.{match[1]}.{_NATIVE[match[2]]}"] = value[None]
    if "ulmfit.layers.0.state_weight" not in native:
        raise CtxError("The file has no LSTM.", location=location, hint="QRNNs and Transformers are not supported.")
    return {name: value.float() for name, value in native.items()}


def read_words(file: str | Path, allow_pickle: bool = False) -> list[str]:
    """The words of a model in the order of their ids: a JSON list, one word per line, or a pickled list.

    Args:
        file: .json, .txt or .pkl.
        allow_pickle: Allow a pickle, which can execute code in general. This function refuses all objects but lists,
            strings and numbers, but the file should come from a trusted source.

    Raises:
        CtxError: The file is missing or damaged, holds something else, or is a pickle and `allow_pickle` is False.
    """
    path = Path(file)
    with wrap_errors("Cannot read the words", location=str(file), hint="give a list of words."):
        if path.suffix in (".pkl", ".pickle"):
            if not allow_pickle:
                raise CtxError(
                    "The file is a pickle, which can execute code when it is opened.",
                    location=str(file),
                    hint="if you trust its source, give --allow_pickle; or save the list as JSON.",
                )
            with path.open("rb") as opened:
                words = _PlainUnpickler(opened).load()
        elif path.suffix == ".json":
            words = json.loads(path.read_text(encoding="utf-8"))
        else:
            words = path.read_text(encoding="utf-8").splitlines()
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CtxError(
            "The file holds no list of words.", location=str(file), hint="give itos, the words in the order of ids."
        )
    return words


class _PlainUnpickler(pickle.Unpickler):
    """Loads lists, strings and numbers only."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse all other objects."""
        raise pickle.UnpicklingError(f"it holds {module}.{name}, not only words")


def build_ulmfit_tokenizer(words: list[str], **options: Any) -> CtxUlmfitTokenizer:
    """A tokenizer with these words; repeated words, which pad the list, are numbered."""
    vocab: dict[str, int] = {}
    for number, word in enumerate(words):
        name = _RENAMED.get(word, word)
        vocab[f"{name}#{number}" if name in vocab else name] = number
    return CtxUlmfitTokenizer(vocab=vocab, **options)
