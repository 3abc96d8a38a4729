r"""Convert an AWD-LSTM of fastai, a language model or a text classifier (.pth and its list of words), to a model and
its tokenizer.

hf-ctxmodels convert ulmfit --weights wt103-fwd/lstm_fwd.pth --vocabulary itos.json --output runs/ulmfit
"""

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import Conversion, load_weights, read_tensors
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig
from hf_ctxmodels.models.ulmfit.modeling_ulmfit import CtxUlmfitForCausalLM, CtxUlmfitForSequenceClassification
from hf_ctxmodels.models.ulmfit.tokenization_ulmfit import CtxUlmfitTokenizer

# Names of fastai 1 and 2, and of the release of 2018. A saved encoder has no prefix `0.`; in a classifier, the encoder
# is in `0.module`.
_PREFIX = r"^(?:0\.)?(?:module\.)?"
_EMBEDDINGS = re.compile(_PREFIX + r"encoder\.weight$")
_LAYER = re.compile(_PREFIX + r"rnns\.(\d+)\.(?:module\.)?(weight_ih|weight_hh|bias_ih|bias_hh)_l0(_raw)?$")
_CLASSIFIER = re.compile(r"^1\.layers\.(\d+)\.(?:(\d+|bn|lin)\.)?(\w+)$")
_BLOCK_SIZE = 4  # modules in a block of a classifier: normalization, dropout, linear layer, activation
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


def read_fastai(file: str | Path) -> CtxUlmfitForCausalLM | CtxUlmfitForSequenceClassification:
    """Load the language model or the text classifier of a .pth file.

    The file of an encoder gives a language model whose output bias is 0.

    Raises:
        CtxError: The file has no AWD-LSTM, or a classifier without exactly one hidden layer.
    """
    content = read_tensors(file, "model")  # may be next to an optimizer's state
    embeddings = next((value for name, value in content.items() if _EMBEDDINGS.match(name)), None)
    if embeddings is None:
        raise CtxError(
            f"The file has no encoder.weight; it has {', '.join(sorted(content)[:6])}, ...",
            location=str(file),
            hint="use the weights of an AWD-LSTM language model, of its encoder or of a text classifier.",
        )
    weights = _layer_weights(content)
    if "ulmfit.layers.0.state_weight" not in weights:
        hint = "use an AWD-LSTM; QRNNs and Transformers are not supported."
        raise CtxError("The file has no LSTM.", location=str(file), hint=hint)
    depth = 1 + max(int(name.split(".")[2]) for name in weights)
    cell_size = weights["ulmfit.layers.0.state_weight"].shape[2]
    config = CtxUlmfitConfig(
        vocab_size=len(embeddings),
        hidden_size=embeddings.shape[1],
        cell_size=cell_size if depth > 1 else CtxUlmfitConfig().cell_size,
        num_hidden_layers=depth,
    )
    weights["ulmfit.word_embeddings.weight"] = embeddings
    model_class: type[CtxUlmfitForCausalLM | CtxUlmfitForSequenceClassification] = CtxUlmfitForCausalLM
    if classifier := _classifier_weights(content):
        model_class = CtxUlmfitForSequenceClassification
        sizes = [len(value) for value in classifier.values() if value.dim() == 2]
        if len(sizes) != 2:
            raise CtxError(
                f"The classifier has {len(sizes)} linear layers, expected 2.",
                location=str(file),
                hint="use a text classifier with one hidden layer, the default of fastai.",
            )
        config.classifier_size, config.num_labels = sizes
        weights |= classifier
    else:
        weights["decoder.weight"] = content.get("1.decoder.weight", embeddings)
        config.tie_word_embeddings = torch.equal(weights["decoder.weight"].float(), embeddings.float())
        weights["decoder.bias"] = content.get("1.decoder.bias", embeddings.new_zeros(len(embeddings)))
    weights = {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    return load_weights(model_class(config), weights, str(file))


def _layer_weights(content: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the LSTM layers. If recurrent weights are saved before and after weight dropout, the former
    (`_raw`) are used."""
    with_dropout = {name.removesuffix("_raw").replace(".module.", ".") for name in content if name.endswith("_raw")}
    return {
        f"ulmfit.layers.{match[1]}.{_LAYER_NAMES[match[2]]}": value[None]
        for name, value in content.items()
        if (match := _LAYER.match(name)) and (match[3] or name.replace(".module.", ".") not in with_dropout)
    }


def _classifier_weights(content: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a classifier; linear layers of fastai 2 have no bias."""
    weights: dict[str, Tensor] = {}
    for name, value in content.items():
        if match := _CLASSIFIER.match(name):
            block, module, parameter = match.groups()
            index = int(block)  # of a module in fastai 1, otherwise of a block
            if module is not None:
                index = _BLOCK_SIZE * index + (0 if module in ("0", "bn") else 2)
            weights[f"classifier.{index}.{parameter}"] = value
    for name, value in [*weights.items()]:
        prefix = name.removesuffix("weight")
        if prefix != name and value.dim() == 2:
            weights.setdefault(f"{prefix}bias", value.new_zeros(len(value)))
        elif prefix != name:  # files of 2018 do not count the batches
            weights.setdefault(f"{prefix}num_batches_tracked", torch.tensor(0))
    return weights


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

    weights: str = flag(REQUIRED, "Weights (.pth) of a language model, of its encoder or of a text classifier.")
    vocabulary: str = flag(REQUIRED, "Words by id (itos): .json, .txt with one word per line, or .pkl.")
    allow_pickle: bool = flag(
        False, "Load a .pkl; pickles can execute code, so the file must come from a trusted source."
    )

    def convert(
        self,
    ) -> tuple[CtxUlmfitForCausalLM | CtxUlmfitForSequenceClassification, CtxUlmfitTokenizer, str]:
        """The model, its tokenizer and the file of the weights."""
        tokenizer = build_ulmfit_tokenizer(read_words(self.vocabulary, self.allow_pickle))
        model = read_fastai(self.weights)
        model.config.pad_token_id, model.config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
        return model, tokenizer, self.weights
