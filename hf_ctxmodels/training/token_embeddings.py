"""New token embeddings for a pretrained model: training them in a frozen body, and replacing them (Artetxe, Ruder &
Yogatama 2020, arXiv 1910.11856)."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.tokenizers.base import record_tokenizer_digest, tokenizer_digest
from hf_ctxmodels.training.model_loading import load_config, load_model, new_model_with_seed

# Configuration fields that must be equal where embeddings are exchanged.
_BODY_FIELDS = ("hidden_size", "embedding_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_TOKEN_ID_SUFFIX = "_token_id"


@dataclass
class EmbeddingTrainingArguments:
    """Part of the model to train."""

    train_only: Literal["embeddings"] | None = flag(
        None, "Train only the token embeddings of --model; the embeddings of another --tokenizer are re-initialized."
    )

    def apply(
        self,
        model: PreTrainedModel,
        model_tokenizer: PreTrainedTokenizerBase,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> PreTrainedModel:
        """The model with only the token embeddings trainable, re-initialized by `replace_vocabulary` if the tokenizers
        differ."""
        if tokenizer_digest(model_tokenizer) != tokenizer_digest(tokenizer):
            model = replace_vocabulary(model, model_tokenizer, tokenizer, seed)
        trainable = set(_token_embedding_parameters(model))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
        return model


def vocabulary_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters with a row for each token, tied parameters under both names."""
    if not hasattr(model.config, "vocab_size"):
        return []
    config = copy.deepcopy(model.config)
    config.vocab_size += getattr(config, "vocab_size_multiple", 1)
    with torch.device("meta"):
        larger_model = type(model)(config)
    shapes = {name: parameter.shape for name, parameter in larger_model.named_parameters(remove_duplicate=False)}
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if shapes.get(name, parameter.shape) != parameter.shape
    ]


@torch.no_grad()
def replace_vocabulary(
    model: PreTrainedModel,
    model_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> PreTrainedModel:
    """A copy of a model for another tokenizer (section 2.2, step 2).

    Parameters with a row for each token are re-initialized, except the rows of special tokens of both tokenizers. The
    global generators are not changed.

    Raises:
        CtxError: The model has no token embeddings, or its positions depend on the id of the padding token.

    Example:
        >>> german = replace_vocabulary(model, english_tokenizer, german_tokenizer, seed=0)  # doctest: +SKIP
        >>> german.save_pretrained("runs/german")  # doctest: +SKIP
    """
    vocabulary_names = set(_token_embedding_parameters(model))
    config = copy.deepcopy(model.config)
    multiple = getattr(config, "vocab_size_multiple", 1)
    config.vocab_size = -(-len(tokenizer) // multiple) * multiple
    for name, value in vars(model.config).items():
        if name.endswith(_TOKEN_ID_SUFFIX) and value is not None and getattr(tokenizer, name, None) is not None:
            setattr(config, name, getattr(tokenizer, name))
    record_tokenizer_digest(config, tokenizer)
    if getattr(config, "max_sequence_length", None) != getattr(model.config, "max_sequence_length", None):
        raise CtxError(
            f"The padding token has the id {config.pad_token_id}, but the model's positions are counted from its "
            f"padding token's id {model.config.pad_token_id}.",
            location=getattr(tokenizer, "name_or_path", ""),
            hint="train a tokenizer of the model's family.",
        )
    new_model = new_model_with_seed(type(model), config, seed).to(model.device, model.dtype)
    shared_tokens = [token for token in tokenizer.all_special_tokens if token in model_tokenizer.all_special_tokens]
    new_ids = [tokenizer.convert_tokens_to_ids(token) for token in shared_tokens]
    old_ids = [model_tokenizer.convert_tokens_to_ids(token) for token in shared_tokens]
    old_weights = model.state_dict()
    for name, weight in new_model.state_dict().items():
        if name in vocabulary_names:
            weight[new_ids] = old_weights[name][old_ids]
        else:
            weight.copy_(old_weights[name])
    return new_model


def freeze_token_embeddings(model: PreTrainedModel) -> None:
    """Freeze the token embeddings, to be replaced after training (step 3); raises CtxError if there are none."""
    frozen = set(_token_embedding_parameters(model))
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def check_embedding_compatibility(config: PreTrainedConfig, source: str | Path) -> None:
    """Raise CtxError if the token embeddings of a checkpoint do not match a model's configuration."""
    source_config = load_config(source)
    differing = [name for name in _BODY_FIELDS if getattr(source_config, name, None) != getattr(config, name, None)]
    if type(source_config) is not type(config):
        mismatch = f"of the type {source_config.model_type}, but this model is {config.model_type}"
    elif differing:
        name = differing[0]
        mismatch = f"with {name}={getattr(source_config, name, None)}, but this model has {getattr(config, name, None)}"
    else:
        return
    raise CtxError(
        f"The embeddings are for a model {mismatch}.",
        location=str(source),
        hint="use a checkpoint of `hf-ctxmodels pretrain --train_only embeddings` with the --model from which this "
        "model was fine-tuned.",
    )


@torch.no_grad()
def replace_token_embeddings(model: PreTrainedModel, source: str | Path) -> None:
    """Replace the token embeddings by the embeddings of another checkpoint with the same body (step 4); its tokenizer
    is to be used with the result. Raises CtxError if they do not match the model, or the model predicts tokens.

    Example:
        >>> replace_token_embeddings(tagger, "runs/german")  # doctest: +SKIP
        >>> tokenizer = AutoTokenizer.from_pretrained("runs/german")  # doctest: +SKIP
    """
    check_embedding_compatibility(model.config, source)
    base = model.base_model
    names = _token_embedding_parameters(base)
    if len(vocabulary_parameters(model)) > len(names):
        raise CtxError(
            f"{type(model).__name__} also predicts tokens: its output layer has a row for each.",
            location=str(source),
            hint="open that checkpoint itself.",
        )
    config = load_config(source)
    weights = load_model(source, "AutoModel", config).state_dict()
    for name in names:
        module_name, _, parameter_name = name.rpartition(".")
        module = base.get_submodule(module_name)
        getattr(module, parameter_name).data = weights[name].to(model.device, model.dtype)
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = len(weights[name]), config.pad_token_id
    for name, value in vars(config).items():
        if name.endswith(_TOKEN_ID_SUFFIX) or name in ("vocab_size", "tokenizer_digest"):
            setattr(model.config, name, value)
            setattr(base.config, name, value)


def _token_embedding_parameters(model: PreTrainedModel) -> list[str]:
    """`vocabulary_parameters` of a model with token embeddings; raises CtxError for others."""
    names = vocabulary_parameters(model)
    embeddings = model.get_input_embeddings() if names else None
    if embeddings is None or not any(model.get_parameter(name) is embeddings.weight for name in names):
        raise CtxError(
            f"{type(model).__name__} has no token embeddings.",
            hint="use a model that reads tokens; a character vocabulary fits all languages.",
        )
    return names
