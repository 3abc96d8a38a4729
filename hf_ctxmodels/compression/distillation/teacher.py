"""Teachers from directories, students from layers of other models, and terms from a command line."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.model import TERMS
from hf_ctxmodels.compression.distillation.prediction_losses import Term
from hf_ctxmodels.core.adapter_files import ADAPTERS_FOLDER, STACK_FILE, is_adapter_parameter
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, tokenizer_digest
from hf_ctxmodels.training.model_loading import load_config, load_family_config, load_tokenizer, require_single_task
from hf_ctxmodels.training.pretraining import typed_options


@dataclass(frozen=True)
class Teacher:
    """A teacher whose weights are not read yet.

    Attributes:
        source: Directory or Hub id.
        config, tokenizer: Its own.
    """

    source: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def open(cls, source: str, *, split_words: bool = False) -> "Teacher":
        """Read configuration and tokenizer; a reference checkpoint is opened by the family whose peer it is.

        Raises:
            CtxError: There is no such model, it has several tasks or is of no family, or its tokenizer does not fit it.
        """
        require_single_task(load_config(source), source)
        config = load_family_config(source)
        tokenizer = load_tokenizer(source, split_words=split_words)
        check_tokenizer_matches_model(tokenizer, config, location=f"--teacher {source}")
        return cls(source, config, tokenizer)

    def load(self, auto_class: str) -> PreTrainedModel:
        """The model with the head of an Auto class and the adapters beside it, in evaluation mode; raises CtxError as
        `load_model_with_adapters`."""
        return load_model_with_adapters(self.source, auto_class, self.config).eval()

    def shares_tokens(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether a tokenizer has the teacher's tokens and ids, and the same way to split text into them."""
        return tokenizer_digest(tokenizer) == tokenizer_digest(self.tokenizer) and _splitting(tokenizer) == _splitting(
            self.tokenizer
        )

    @property
    def digest(self) -> str:
        """What tells its weights from others: of a directory the SHA-256 of the files, else the name."""
        kinds = ("*.safetensors", f"{ADAPTERS_FOLDER}/*/*.safetensors", f"{ADAPTERS_FOLDER}/{STACK_FILE}")
        files = [path for kind in kinds for path in sorted(Path(self.source).glob(kind))]
        if not files:
            return self.source
        whole = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()


def _splitting(tokenizer: Any) -> str:
    """How a tokenizer normalises and splits text, as text."""
    backend = tokenizer.backend_tokenizer
    return f"{backend.normalizer!r} {backend.pre_tokenizer!r} {backend.post_processor!r}"


def copy_layers(student: PreTrainedModel, source: PreTrainedModel, layers: Sequence[int]) -> None:
    """Give the student's layer i the weights of the source's layer `layers[i]`, counted from 0.

    Raises:
        CtxError: A model has no layers of its own for each depth, a layer does not exist, or shapes differ.
    """
    own, others = (getattr(model.base_model, "layers", None) for model in (student, source))
    if not isinstance(own, nn.ModuleList) or not isinstance(others, nn.ModuleList) or len(own) != len(layers):
        raise CtxError(
            f"{len(layers)} layers cannot be copied to {type(student).__name__}.",
            location=f"--student_layers {' '.join(map(str, layers))}",
            hint="give the teacher's layers, one for each layer of the student; models that share layers have none.",
        )
    for mine, number in zip(own, layers, strict=True):
        try:
            weights = others[number].state_dict()
            mine.load_state_dict({name: each for name, each in weights.items() if not is_adapter_parameter(name)})
        except RuntimeError as error:
            raise CtxError(
                "The layers of teacher and student have different shapes.",
                location=f"--student_layers {' '.join(map(str, layers))}",
                hint="leave out --config_options that change the width.",
            ) from error


def check_layers(layers: Sequence[int], config: PreTrainedConfig) -> None:
    """Raise CtxError if one of the layers, counted from 0, is beyond those of a configuration."""
    number = getattr(config, "num_hidden_layers", 0)
    if beyond := [layer for layer in layers if not 0 <= layer < number]:
        raise CtxError(
            f"There is no layer {beyond[0]}: the model has {number}, counted from 0.",
            location=f"--student_layers {' '.join(map(str, layers))}",
            hint=f"give numbers from 0 to {number - 1}.",
        )


def parse_terms(weights: Sequence[str], options: Sequence[str] = ()) -> list[Term]:
    """`["soft-targets=5"]` and `["soft-targets.temperature=2"]` as terms.

    Args:
        weights: NAME=WEIGHT of each term.
        options: NAME.OPTION=VALUE.

    Raises:
        CtxError: A text has another form, a term or an option is unknown, or a value is of another type. An option of a
            term that is not given is no error: it is said to have no effect.
    """
    if not weights:
        raise CtxError("There is nothing to learn.", location="--terms", hint=f"give NAME=WEIGHT of: {_listed()}")
    given: dict[str, dict[str, str]] = {}
    for text in weights:
        name, _, weight = text.partition("=")
        if name not in TERMS or not weight or name in given:
            raise CtxError(f"{text!r} is no weight of a term.", location="--terms", hint=f"NAME=WEIGHT of: {_listed()}")
        given[name] = {"weight": weight}
    for text in options:
        key, _, value = text.partition("=")
        name, _, option = key.partition(".")
        if name not in given and name in TERMS and option in TERMS[name].option_help():  # of a recipe, for example
            print_status(f"{key} has no effect: the term {name} is not learned")
            continue
        if name not in given or option not in TERMS[name].option_help() or not value:
            known = [f"{term}.{each}" for term in given for each in TERMS[term].option_help()]
            raise CtxError(
                f"{text!r} is no option of the terms {', '.join(given)}.",
                location="--term_options",
                hint=f"give NAME.OPTION=VALUE with one of: {', '.join(known) or 'none'}.",
            )
        given[name][option] = value
    return [
        TERMS[name](**typed_options(TERMS[name], values, location=f"--terms {name}")) for name, values in given.items()
    ]


def _listed() -> str:
    return "".join(f"\n    {name}: {(term.__doc__ or '').partition(chr(10))[0]}" for name, term in TERMS.items())
