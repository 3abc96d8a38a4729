"""Opening a checkpoint for further training, with errors a user can mend."""

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.errors import CtxError


def open_config(source: str) -> PreTrainedConfig:
    """The configuration of a checkpoint directory or Hub id.

    Raises:
        CtxError: there is no such checkpoint, or its `config.json` cannot be used.
    """
    try:
        return AutoConfig.from_pretrained(source)
    except CtxError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise CtxError(
            f"No usable model configuration: {error}",
            where=source,
            mend="give a directory with a config.json, or a Hub id.",
        ) from error


def open_tokenizer(source: str, config: PreTrainedConfig, split_words: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer saved beside a model.

    Args:
        source: checkpoint directory or Hub id.
        config: of the model.
        split_words: it will be given single words. Byte-level tokenizers are then told to put a space before each, as
            they were trained, and keep this setting when they are saved.

    Raises:
        CtxError: its files are missing or damaged, it is not backed by the tokenizers library, or it has more entries
            than the model has embeddings.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if split_words and _omits_prefix_space(tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(source, add_prefix_space=True)
    except CtxError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions for damaged files
        raise CtxError(
            f"No usable tokenizer: {error}",
            where=source,
            mend="save it beside the model: tokenizer.save_pretrained(directory) writes tokenizer.json.",
        ) from error
    if not tokenizer.is_fast:
        raise CtxError(
            f"{type(tokenizer).__name__} does not say which characters its tokens come from.",
            where=source,
            mend="use a tokenizer with a tokenizer.json.",
        )
    if len(tokenizer) > config.vocab_size:
        raise CtxError(
            f"The tokenizer has {len(tokenizer)} entries, the model only {config.vocab_size} embeddings.",
            where=source,
            mend="put the tokenizer the model was trained with beside it, or resize the model: "
            "model.resize_token_embeddings(len(tokenizer)).",
        )
    return tokenizer


def _omits_prefix_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    if not tokenizer.is_fast:
        return False
    splitting = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
    return '"add_prefix_space": false' in json.dumps(splitting)


def open_head(source: str, auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with the head that `auto_class` names, its encoder from the checkpoint.

    A head that the checkpoint lacks, or has for another number of labels, starts anew.

    Raises:
        CtxError: the weights are missing, damaged or of another shape, no weight of the encoder is among them, or the
            family has no such head.
    """
    try:
        model, report = getattr(transformers, auto_class).from_pretrained(
            source, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except CtxError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise CtxError(
            f"The weights cannot be loaded into {auto_class}: {error}",
            where=source,
            mend="check that model.safetensors is whole and belongs to the config.json beside it.",
        ) from error
    _check_encoder(model, report, source)
    return model


def _check_encoder(model: PreTrainedModel, report: dict[str, Any], source: str) -> None:
    """A head may be new; an encoder that comes out of the blue is a mistake that only bad metrics would show."""
    prefix = f"{model.base_model_prefix}."
    # A pooler is part of the encoder by name, but checkpoints of token-level heads have none.
    encoder = {name for name in model.state_dict() if name.startswith(prefix) and ".pooler." not in name}
    mismatched = [entry for entry in report["mismatched_keys"] if entry[0].startswith(prefix)]
    missing = sorted(encoder & set(report["missing_keys"]))
    if not mismatched and not missing:
        return
    what = (
        f"{mismatched[0][0]} is {tuple(mismatched[0][1])} in the file and {tuple(mismatched[0][2])} by the config.json"
        if mismatched
        else f"{len(missing)} of {len(encoder)} weights of the encoder are not in the file, {missing[0]} for one"
    )
    raise CtxError(
        f"The weights do not belong to the configuration: {what}.",
        where=str(Path(source)),
        mend="put the model.safetensors and the config.json of one model together.",
    )
