"""Reading of released weights and BPE codes, and the common parts of `hf-ctxmodels convert`."""

import pickle
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, flag, non_default_fields
from hf_ctxmodels.core.output_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    WEIGHT_SHARDS,
    check_output_directory,
    replacing_files,
)
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.tokenizers.base import limit_tokenizer_length, record_tokenizer_digest


class Placeholder:
    """Object of a class that `read_pickle` does not create; ignores its arguments, state and items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the item."""

    def append(self, value: Any) -> None:
        """Ignore the item."""


class PlaceholderUnpickler(pickle.Unpickler):
    """Unpickler that imports nothing and calls no function: all classes except `allowed` become `Placeholder`."""

    allowed: Mapping[tuple[str, str], type] = MappingProxyType(
        {(cls.__module__, cls.__name__): cls for cls in (Counter, OrderedDict)}
    )

    def find_class(self, module: str, name: str) -> type:
        """The class, or `Placeholder`."""
        return self.allowed.get((module, name), Placeholder)


def read_pickle(file: str | Path, *, message: str, hint: str) -> Any:
    """Read plain values of a pickle with `PlaceholderUnpickler`; raises CtxError, with `message` and `hint`, for a file
    that is missing, damaged or no pickle."""
    with wrap_errors(message, location=str(file), hint=hint), Path(file).open("rb") as opened:
        return PlaceholderUnpickler(opened).load()


def read_torch_file(
    file: str | Path,
    allowed: Sequence[type] = (),
    *,
    message: str = "Cannot read the weights",
    hint: str = "use the released file, or a state dict: torch.save(model.state_dict(), ...).",
) -> Any:
    """Read a pickle of tensors and plain values, and of `allowed` types, whose unpickling must not execute code; raises
    CtxError, with `message` and `hint`, for other files."""
    with wrap_errors(message, location=str(file), hint=hint), safe_globals([*allowed]):
        return torch.load(file, map_location="cpu", weights_only=True)


def read_tensors(file: str | Path, entry: str | None = None) -> dict[str, Tensor]:
    """Read a state dict, possibly in an entry of a dictionary; raises CtxError for other files."""
    content = read_torch_file(file)
    if entry is not None and isinstance(content, Mapping):
        content = content.get(entry, content)
    if not isinstance(content, Mapping) or not all(torch.is_tensor(value) for value in content.values()):
        raise CtxError(
            f"The file contains a {type(content).__name__}, not a state dict.",
            location=str(file),
            hint="use the weights of a model: torch.save(model.state_dict(), ...).",
        )
    return dict(content)


def read_codes(file: str | Path) -> list[tuple[str, str]]:
    """Read the merges of fastBPE or subword-nmt; raises CtxError unless each line is two subwords and maybe a count, or
    if there is no line."""
    merges = []
    for number, line in enumerate(read_lines(file), start=1):
        fields = line.split()
        if len(fields) not in (2, 3):
            raise CtxError(f"Not two subwords and a count: {line.strip()!r}.", location=f"{file}, line {number}")
        merges.append((fields[0], fields[1]))
    if not merges:
        raise CtxError("The file of BPE codes is empty.", location=str(file), hint="copy it again from its source.")
    return merges


def load_weights(model: Any, weights: dict[str, Tensor], location: str) -> Any:
    """Load weights with native names (tied weights may be listed once), and set the model to evaluation mode; raises
    CtxError if a weight is missing or unknown, or has another shape, or if tied weights differ."""
    expected = model.state_dict()
    for tied, source in (model.all_tied_weights_keys or {}).items():
        if tied not in expected or source not in weights:
            continue
        value = weights.setdefault(tied, weights[source])
        if value is not weights[source] and not torch.equal(value, weights[source]):
            raise CtxError(
                f"{tied} and {source}, which {type(model).__name__} shares, differ.",
                location=location,
                hint="use the weights of a released model.",
            )
    check_missing([name for name in expected if name not in weights], location)
    check_unknown([name for name in weights if name not in expected], location)
    for name, weight in expected.items():
        if weights[name].shape != weight.shape:
            raise CtxError(
                f"{name} is {tuple(weights[name].shape)}, expected {tuple(weight.shape)}.",
                location=location,
                hint="use the files of one model.",
            )
    model.load_state_dict(weights)
    return model.eval()


def check_missing(names: Sequence[str], location: str) -> None:
    """Raise CtxError if there are names of missing weights."""
    if names:
        problem = f"The checkpoint lacks {len(names)} weights (native names): {_first_names(names)}."
        raise CtxError(problem, location=location, hint="use all weights of a released model.")


def check_unknown(names: Sequence[str], location: str) -> None:
    """Raise CtxError if there are names of unknown weights."""
    if names:
        problem = f"The checkpoint has {len(names)} unknown weights: {_first_names(names)}."
        raise CtxError(problem, location=location, hint="use the weights of a released model only.")


def _first_names(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], *["..."][: len(names) > 4]])


@dataclass(kw_only=True)
class Conversion:
    """Base class of conversions: the flags, and the conversion."""

    output: str = flag(REQUIRED, "Directory for the model and its tokenizer.")
    overwrite: bool = flag(False, "Replace an existing model in --output.")

    def convert(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
        """The model, its tokenizer, and a description of the source."""
        raise NotImplementedError

    def check_output(self) -> None:
        """Raise CtxError if the output directory contains a model that may not be replaced."""
        files = (*MODEL_FILES, *TOKENIZER_FILES)
        check_output_directory(self.output, files, flag="--output", overwrite=self.overwrite)

    def save(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Save model and tokenizer; the configuration records the tokenizer's digest, and the tokenizer the
        model's maximum length."""
        record_tokenizer_digest(model.config, tokenizer)
        limit_tokenizer_length(tokenizer, model.config)
        with replacing_files(self.output, (*MODEL_FILES, WEIGHT_SHARDS, *TOKENIZER_FILES)) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    def run(self) -> None:
        """Convert, save, and print a summary.

        Raises:
            CtxError: The output contains a model, the files cannot be converted, or the model and its tokenizer have
                different vocabulary sizes.
        """
        self.check_output()
        inputs = non_default_fields(self) - {"output", "overwrite"}
        location = " ".join(f"--{name} {value}" for name, value in vars(self).items() if name in inputs)
        hint = "use the files of one released model, and copy damaged files again."
        with wrap_errors("The files cannot be converted", location=location, hint=hint):
            model, tokenizer, source = self.convert()
        if len(tokenizer) != model.config.vocab_size:
            raise CtxError(
                f"{len(tokenizer)} tokens for {model.config.vocab_size} embeddings.",
                location=source,
                hint="use the vocabulary and the weights of the same model.",
            )
        self.save(model, tokenizer)
        print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens: {source} -> {self.output}")
