"""Another vocabulary for a pretrained model: new embeddings of tokens below a body that stays as it is, and their
exchange (Artetxe, Ruder, Yogatama 2020, arXiv 1910.11856)."""

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
from hf_ctxmodels.training.model_loading import load_config, load_model

# Of the configuration: what must be equal where embeddings are exchanged, and what comes with them.
_BODY = ("hidden_size", "embedding_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_IDS = "_token_id"


@dataclass
class EmbeddingTrainingArguments:
    """Part of the model to train."""

    train_only: Literal["embeddings"] | None = flag(
        None, "Train only the token embeddings of --model; those of another --tokenizer are re-initialised."
    )

    def apply(
        self, model: PreTrainedModel, own: PreTrainedTokenizerBase, given: PreTrainedTokenizerBase, seed: int
    ) -> PreTrainedModel:
        """The model with the vocabulary of a tokenizer, whose embeddings are the only weights that are trained.

        Args:
            model: Pretrained.
            own: Its tokenizer.
            given: That of the text; embeddings are drawn anew unless it has the same vocabulary.
            seed: Of the new weights.

        Raises:
            CtxError: As `replace_vocabulary`.
        """
        if tokenizer_digest(own) != tokenizer_digest(given):
            model = replace_vocabulary(model, own, given, seed)
        tables = set(_tables_of_tokens(model))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in tables)
        return model


def vocabulary_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the parameters with a row for each token: embeddings, output layers and their biases, tied ones under
    both names."""
    if not hasattr(model.config, "vocab_size"):
        return []
    larger = copy.deepcopy(model.config)
    larger.vocab_size += getattr(larger, "vocab_size_multiple", 1)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in type(model)(larger).named_parameters(remove_duplicate=False)}
    own = model.named_parameters(remove_duplicate=False)
    return [name for name, each in own if shapes.get(name, each.shape) != each.shape]


@torch.no_grad()
def replace_vocabulary(
    model: PreTrainedModel, own: PreTrainedTokenizerBase, given: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """A copy of a model for another tokenizer (section 2.2, step 2).

    What has a row for each token is drawn anew as in a new model, except that special tokens of both tokenizers keep
    their rows: the body knows them by these. Positions, segments, layers and the rest of a head are the model's.

    Args:
        model: Pretrained, with or without a head.
        own: Its tokenizer.
        given: The other one.
        seed: Of the new weights; the global generators stay as they are.

    Raises:
        CtxError: The model reads characters, or it counts positions from another padding token.

    Example:
        >>> german = replace_vocabulary(model, english_tokenizer, german_tokenizer, seed=0)  # doctest: +SKIP
        >>> german.save_pretrained("runs/german")  # doctest: +SKIP
    """
    tables = set(_tables_of_tokens(model))
    config = _config_for(model.config, given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = type(model)(config).to(model.device, model.dtype)
    kept = [token for token in given.all_special_tokens if token in own.all_special_tokens]
    places = (
        [given.convert_tokens_to_ids(token) for token in kept],
        [own.convert_tokens_to_ids(token) for token in kept],
    )
    old = model.state_dict()
    for name, weight in found.state_dict().items():
        if name in tables:
            weight[places[0]] = old[name][places[1]]
        else:
            weight.copy_(old[name])
    return found


def freeze_token_embeddings(model: PreTrainedModel) -> None:
    """Freeze the embeddings of tokens, so that others can take their place (step 3).

    Raises:
        CtxError: The model reads characters.
    """
    tables = set(_tables_of_tokens(model))
    for name, parameter in model.named_parameters():
        if name in tables:
            parameter.requires_grad_(False)


def check_embedding_compatibility(config: PreTrainedConfig, source: str | Path) -> None:
    """Raise CtxError if the embeddings of a checkpoint are for another body than that of a configuration."""
    other = load_config(source)
    differing = [name for name in _BODY if getattr(other, name, None) != getattr(config, name, None)]
    if type(other) is type(config) and not differing:
        return
    what = f"of the type {other.model_type}, this is {config.model_type}"
    if type(other) is type(config):
        name = differing[0]
        what = f"with {name} {getattr(other, name, None)}, this one has {getattr(config, name, None)}"
    raise CtxError(
        f"The embeddings are for a model {what}.",
        location=str(source),
        hint="give a checkpoint of `hf-ctxmodels pretrain --train_only embeddings` whose --model was this one's start.",
    )


@torch.no_grad()
def replace_token_embeddings(model: PreTrainedModel, source: str | Path) -> None:
    """Put the embeddings of another checkpoint's tokens in the place of the model's (step 4); its tokenizer goes with
    them.

    Args:
        model: A fine-tuned one, say.
        source: Directory or Hub id of a checkpoint with the same body, see `EmbeddingTrainingArguments`.

    Raises:
        CtxError: The embeddings are for another model, or the model also writes tokens.

    Example:
        >>> replace_token_embeddings(tagger, "runs/german")  # doctest: +SKIP
        >>> tokenizer = AutoTokenizer.from_pretrained("runs/german")  # doctest: +SKIP
    """
    check_embedding_compatibility(model.config, source)
    base = model.base_model
    tables = _tables_of_tokens(base)
    if len(vocabulary_parameters(model)) > len(tables):
        raise CtxError(
            f"{type(model).__name__} also writes tokens, by an output layer with a row for each.",
            location=str(source),
            hint="open that checkpoint itself.",
        )
    config = load_config(source)
    given = load_model(source, "AutoModel", config).state_dict()
    for name in tables:
        owner, _, own = name.rpartition(".")
        module = base.get_submodule(owner)
        getattr(module, own).data = given[name].to(model.device, model.dtype)
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = len(given[name]), config.pad_token_id
    for name, value in vars(config).items():
        if name.endswith(_IDS) or name in ("vocab_size", "tokenizer_digest"):
            for each in (model.config, base.config):
                setattr(each, name, value)


def _tables_of_tokens(model: PreTrainedModel) -> list[str]:
    """`vocabulary_parameters` of a model with an embedding of each token; raises CtxError for others."""
    found = vocabulary_parameters(model)
    embeddings = model.get_input_embeddings() if found else None
    if embeddings is None or not any(model.get_parameter(name) is embeddings.weight for name in found):
        raise CtxError(
            f"{type(model).__name__} has no embedding of each token.",
            hint="take a model that reads tokens; characters serve every language.",
        )
    return found


def _config_for(own: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """A model's configuration with the size and the special ids of a tokenizer."""
    config = copy.deepcopy(own)
    multiple = getattr(config, "vocab_size_multiple", 1)
    config.vocab_size = -(-len(tokenizer) // multiple) * multiple
    for name, value in vars(own).items():
        if name.endswith(_IDS) and value is not None and getattr(tokenizer, name, None) is not None:
            setattr(config, name, getattr(tokenizer, name))
    record_tokenizer_digest(config, tokenizer)
    rooms = [getattr(each, "max_sequence_length", None) for each in (own, config)]
    if rooms[0] != rooms[1]:
        raise CtxError(
            f"The padding token has the id {config.pad_token_id}, the model's had {own.pad_token_id}, from which its "
            "positions are counted.",
            location=getattr(tokenizer, "name_or_path", ""),
            hint="train a tokenizer of the model's family.",
        )
    return config
