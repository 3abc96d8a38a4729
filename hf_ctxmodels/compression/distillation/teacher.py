"""Teachers loaded from directories, students made of a model's layers, and losses from the command line."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.compression.distillation.model import DISTILLATION_LOSSES
from hf_ctxmodels.compression.distillation.prediction_losses import DistillationLoss
from hf_ctxmodels.core.adapter_support import ADAPTERS_FOLDER, STACK_FILE, is_adapter_parameter
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import parse_choice, split_choice
from hf_ctxmodels.downstream.adapters.save_load import load_model_with_adapters
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, tokenizer_digest
from hf_ctxmodels.training.model_loading import load_config, load_family_config, load_tokenizer, require_single_task


@dataclass(frozen=True)
class Teacher:
    """A teacher whose weights are not loaded yet.

    Attributes:
        source: Directory or Hub id.
        config, tokenizer: The teacher's configuration and tokenizer.
    """

    source: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def open(cls, source: str, *, split_words: bool = False) -> "Teacher":
        """Load configuration and tokenizer; the corresponding family opens a checkpoint of transformers.

        Raises:
            CtxError: There is no such model, it has several tasks or belongs to no family, or its tokenizer does not
                match it.
        """
        require_single_task(load_config(source), source)
        config = load_family_config(source)
        tokenizer = load_tokenizer(source, split_words=split_words)
        check_tokenizer_matches_model(tokenizer, config, location=f"--teacher {source}")
        return cls(source, config, tokenizer)

    def load(self, auto_class: str) -> PreTrainedModel:
        """The model with the head of an Auto class and its saved adapters, in evaluation mode.

        Raises:
            CtxError: As `load_model_with_adapters`.
        """
        return load_model_with_adapters(self.source, auto_class, self.config).eval()

    def has_same_tokens(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether a tokenizer has the teacher's tokens, ids, normalisation and pre-tokenisation."""
        return tokenizer_digest(tokenizer) == tokenizer_digest(self.tokenizer) and _describe_backend(
            tokenizer
        ) == _describe_backend(self.tokenizer)

    @property
    def digest(self) -> str:
        """Identifies the weights: SHA-256 of the files of a directory, otherwise the name."""
        patterns = ("*.safetensors", f"{ADAPTERS_FOLDER}/*/*.safetensors", f"{ADAPTERS_FOLDER}/{STACK_FILE}")
        files = [path for pattern in patterns for path in sorted(Path(self.source).glob(pattern))]
        if not files:
            return self.source
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _describe_backend(tokenizer: Any) -> str:
    backend = tokenizer.backend_tokenizer
    return f"{backend.normalizer!r} {backend.pre_tokenizer!r} {backend.post_processor!r}"


def copy_layers(student: PreTrainedModel, source: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy the weights of the source's layer `layers[i]` to the student's layer i, both from 0.

    Raises:
        CtxError: A model shares layers, a layer does not exist, or shapes differ.
    """
    student_layers: Any = getattr(student.base_model, "layers", None)
    source_layers: Any = getattr(source.base_model, "layers", None)
    are_lists = isinstance(student_layers, nn.ModuleList) and isinstance(source_layers, nn.ModuleList)
    if not are_lists or len(student_layers) != len(layers):
        raise CtxError(
            f"{len(layers)} layers cannot be copied to {type(student).__name__}.",
            location=f"--student_layers {' '.join(map(str, layers))}",
            hint="use one layer of the teacher for each layer of the student; models that share layers have none.",
        )
    for student_layer, index in zip(student_layers, layers, strict=True):
        weights = {
            name: tensor for name, tensor in source_layers[index].state_dict().items() if not is_adapter_parameter(name)
        }
        try:
            student_layer.load_state_dict(weights)
        except RuntimeError as error:
            raise CtxError(
                "The layers of teacher and student have different shapes.",
                location=f"--student_layers {' '.join(map(str, layers))}",
                hint="remove --config_options that change the width.",
            ) from error


def check_layers(layers: Sequence[int], config: PreTrainedConfig) -> None:
    """Raise CtxError if one of the layers, from 0, does not exist in a model of a configuration."""
    num_layers = getattr(config, "num_hidden_layers", 0)
    if missing := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise CtxError(
            f"There is no layer {missing[0]}: the model has {num_layers} layers, counted from 0.",
            location=f"--student_layers {' '.join(map(str, layers))}",
            hint=f"use layers from 0 to {num_layers - 1}.",
        )


def parse_losses(texts: Sequence[str]) -> list[DistillationLoss]:
    """Losses from `["soft-targets:weight=5,temperature=2", "cosine:weight=1"]`.

    Raises:
        CtxError: There is no loss, a loss is unknown or occurs twice, or an option is unknown or has the wrong type.
    """
    if not texts:
        raise CtxError(
            "Expected one or more losses.", location="--losses", hint=f"use NAME:weight=W of: {_list_losses()}"
        )
    names = [split_choice(text)[0] for text in texts]
    if len(set(names)) < len(names):
        raise CtxError("A loss occurs twice.", location=f"--losses {' '.join(texts)}", hint="remove one of them.")
    return [parse_choice(text, DISTILLATION_LOSSES, "--losses") for text in texts]


def _list_losses() -> str:
    return "".join(
        f"\n    {name}: {(loss.__doc__ or '').partition(chr(10))[0]}" for name, loss in DISTILLATION_LOSSES.items()
    )
