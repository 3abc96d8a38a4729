"""Opening models and tokenizers for the scripts, with errors that say what to do."""

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.errors import CtxError

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or Hub id.

    Raises:
        CtxError: there is no such tokenizer, or its files are missing or damaged.
    """
    directory = Path(path)
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise CtxError(
            f"The directory holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}.",
            where=str(path),
            mend="train one with scripts/train_tokenizer.py, or copy the missing file from where the model came from.",
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise CtxError(
            f"The tokenizer cannot be opened: {_first_line(error)}",
            where=str(path),
            mend="check the name; a damaged tokenizer.json has to be copied or trained again.",
        ) from error


def load_model(path: str | Path, auto_class: str, **config_changes: Any) -> PreTrainedModel:
    """The model of a directory or Hub id, with the head of an Auto class.

    Weights that the checkpoint lacks are initialised (a new head), and those the head does not have are left out; both
    are reported on stderr.

    Args:
        path: directory or Hub id.
        auto_class: for example "AutoModelForSequenceClassification".
        config_changes: configuration fields to change, for example `num_labels=3`.

    Raises:
        CtxError: there is no such model, it has no such head, or its files are missing or damaged.
    """
    try:
        # transformers reports missing and unexpected weights, but raises for neither.
        model, report = getattr(transformers, auto_class).from_pretrained(
            path, output_loading_info=True, **config_changes
        )
    except SafetensorError as error:
        raise CtxError(
            f"The weights are damaged: {error}.",
            where=str(Path(path) / "model.safetensors"),
            mend="copy or download the file again; a checkpoint-<step> directory beside it may hold good weights.",
        ) from error
    except CtxError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CtxError(
            f"The model cannot be opened with {auto_class}: {_first_line(error)}",
            where=str(path),
            mend="give a directory with config.json and model.safetensors, or a Hub id, of a model with that head.",
        ) from error
    for kind, meaning in (("missing_keys", "newly initialised"), ("unexpected_keys", "left out")):
        if names := sorted(report[kind]):
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            print(f"{path}: {len(names)} weights {meaning}: {shown}", file=sys.stderr)
    return model


def load_config(config_class: type[PreTrainedConfig], file: str | Path) -> PreTrainedConfig:
    """A configuration from a JSON file of the class's fields.

    Raises:
        CtxError: no such file, no JSON, or not a configuration of this class.
    """
    try:
        fields = json.loads(Path(file).read_text(encoding="utf-8"))
        return config_class(**{name: value for name, value in fields.items() if name != "architectures"})
    except FileNotFoundError as error:
        raise CtxError("No such configuration file.", where=str(file), mend="check --config.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CtxError(
            f"Not a configuration of {config_class.__name__}: {_first_line(error)}",
            where=str(file),
            mend="correct the field, or start from a named size.",
        ) from error


def check_fit(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int | None = None, *, where: str
) -> None:
    """Hold tokenizer, model and input length against each other before hours of training.

    Raises:
        CtxError: the tokenizer has more tokens than the model has embeddings, or inputs are longer than its positions.
    """
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise CtxError(
            f"The vocabulary does not fit the model: the tokenizer has {len(tokenizer)} tokens, the model embeds "
            f"{vocabulary} (vocab_size).",
            where=where,
            mend="use the tokenizer the model was trained with, or a configuration with a larger vocab_size.",
        )
    limit = getattr(config, "max_position_embeddings", None)
    if max_length is not None and limit is not None and max_length > limit:
        raise CtxError(
            f"Inputs of {max_length} tokens are over the model's limit of {limit} (max_position_embeddings).",
            where=f"--max_length {max_length}",
            mend=f"use --max_length {limit} or less, or a configuration with more positions.",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
