r"""Convert an AWD-LSTM language model of fastai (.pth and its list of words) to a model and its tokenizer.

hf-ctxmodels convert ulmfit --weights wt103-fwd/lstm_fwd.pth --vocabulary itos.json --output runs/ulmfit
"""

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hf_ctxmodels.conversion.released_files import Conversion, load_weights, read_tensors
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig
from hf_ctxmodels.models.ulmfit.modeling_ulmfit import CtxUlmfitForCausalLM
from hf_ctxmodels.models.ulmfit.tokenization_ulmfit import CtxUlmfitTokenizer

# fastai 1 and 2, and the release of 2018; an encoder's file has no leading number
_LAYER = re.compile(r"^(?:0\.)?rnns\.(\d+)\.(?:module\.)?(weight_ih|weight_hh|bias_ih|bias_hh)_l0(_raw)?$")
_LAYER_NAMES = {"weight_ih": "input_weight", "weight_hh": "state_weight", "bias_ih": "bias", "bias_hh": "state_bias"}
_RENAMED_WORDS = {  # special words of the release of 2018
    "_unk_": "xxunk",
    "_pad_": "xxpad",
    "xbos": "xxbos",
    "xfld": "xxfld",
    "t_up": "xxup",
    "tk_rep": "xxrep",
    "tk_wrep": "xxwrep",
}


def read_fastai(file: str | Path) -> CtxUlmfitForCausalLM:
    """Load the language model of a .pth file, or of an encoder's file with a zero bias of the softmax."""
    content = read_tensors(file, "model")  # may be next to an optimizer's state
    embeddings = next((content[name] for name in ("0.encoder.weight", "encoder.weight") if name in content), None)
    if embeddings is None:
        raise CtxError(
            f"The file has no encoder.weight; it has {', '.join(sorted(content)[:6])}, ...",
            location=str(file),
            hint="use the weights of an AWD-LSTM language model or of its encoder.",
        )
    weights = {"ulmfit.word_embeddings.weight": embeddings}
    weights["decoder.weight"] = content.get("1.decoder.weight", embeddings)
    weights["decoder.bias"] = content.get("1.decoder.bias", embeddings.new_zeros(len(embeddings)))
    # if recurrent weights are saved before and after weight dropout, the former (`_raw`) are used
    with_dropout = {name.removesuffix("_raw").replace(".module.", ".") for name in content if name.endswith("_raw")}
    for name, value in content.items():
        match = _LAYER.match(name)
        if match and (match[3] or name.replace(".module.", ".") not in with_dropout):
            weights[f"ulmfit.layers.{match[1]}.{_LAYER_NAMES[match[2]]}"] = value[None]
    if "ulmfit.layers.0.state_weight" not in weights:
        hint = "use an AWD-LSTM; QRNNs and Transformers are not supported."
        raise CtxError("The file has no LSTM.", location=str(file), hint=hint)
    weights = {name: value.float() for name, value in weights.items()}
    depth = 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    vocab_size, width = weights["decoder.weight"].shape
    cell_size = weights["ulmfit.layers.0.state_weight"].shape[2]
    config = CtxUlmfitConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        cell_size=cell_size if depth > 1 else CtxUlmfitConfig().cell_size,
        num_hidden_layers=depth,
    )
    return load_weights(CtxUlmfitForCausalLM(config), weights, str(file))


def read_words(file: str | Path, allow_pickle: bool = False) -> list[str]:
    """Read the words of a model by id from a JSON list, lines of a .txt, or a pickled list.

    Pickles can execute code. Although all objects except lists, strings and numbers are rejected, pass `allow_pickle`
    only for a trusted source.

    Raises:
        CtxError: The file is missing, damaged or not a list of words, or is a pickle without `allow_pickle`.
    """
    path = Path(file)
    with wrap_errors("Cannot read the words", location=str(file), hint="use a list of words."):
        if path.suffix in (".pkl", ".pickle"):
            if not allow_pickle:
                raise CtxError(
                    "The file is a pickle, which can execute code when it is opened.",
                    location=str(file),
                    hint="pass --allow_pickle if you trust its source, or save the list as JSON.",
                )
            with path.open("rb") as opened:
                words = _PlainUnpickler(opened).load()
        elif path.suffix == ".json":
            words = json.loads(path.read_text(encoding="utf-8"))
        else:
            words = [line.rstrip("\r\n") for line in read_lines(path)]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CtxError(
            "The file is not a list of words.", location=str(file), hint="use itos, the words in the order of ids."
        )
    return words


class _PlainUnpickler(pickle.Unpickler):
    """Loads only lists, strings and numbers."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Reject all other objects."""
        raise pickle.UnpicklingError(f"it contains {module}.{name}, not only words")


def build_ulmfit_tokenizer(words: list[str], **options: Any) -> CtxUlmfitTokenizer:
    """Create a tokenizer of these words; repeated words, which pad the list, get a number as suffix."""
    vocab: dict[str, int] = {}
    for number, word in enumerate(words):
        name = _RENAMED_WORDS.get(word, word)
        vocab[f"{name}#{number}" if name in vocab else name] = number
    return CtxUlmfitTokenizer(vocab=vocab, **options)


@dataclass(kw_only=True)
class UlmfitConversion(Conversion):
    """Arguments of the conversion."""

    weights: str = flag(REQUIRED, "Weights (.pth) of a language model or of its encoder.")
    vocabulary: str = flag(REQUIRED, "Words by id (itos): .json, .txt with one word per line, or .pkl.")
    allow_pickle: bool = flag(
        False, "Load a .pkl; pickles can execute code, so the file must come from a trusted source."
    )

    def convert(self) -> tuple[CtxUlmfitForCausalLM, CtxUlmfitTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        tokenizer = build_ulmfit_tokenizer(read_words(self.vocabulary, self.allow_pickle))
        model = read_fastai(self.weights)
        model.config.pad_token_id, model.config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
        return model, tokenizer, self.weights
