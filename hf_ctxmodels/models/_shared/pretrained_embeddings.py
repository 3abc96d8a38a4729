"""Families that read the fixed vectors of another model: their part of the model base, and where the vectors are from.

A family derives its `...PreTrainedModel` from `PretrainedEmbeddingPreTrainedModel` and its encoder from
`PretrainedEmbeddingEncoder`.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models._shared.recurrent import RecurrentPreTrainedModel

_SPREAD = 0.4  # of random vectors, in every dimension: about that of released ones


class NamesVectors(Protocol):
    """What a configuration says of the vectors.

    Attributes:
        pretrained_embeddings: A directory or Hub id of a family with one vector for each word; None for random ones.
        train_vectors: Train the vectors too.
        vocab_size, embedding_size: Their number and width.
        pad_token_id, unk_token_id: Tokens whose vectors are zero.
    """

    pretrained_embeddings: str | None
    train_vectors: bool
    vocab_size: int
    embedding_size: int
    pad_token_id: int | None
    unk_token_id: int | None


class PretrainedEmbedding(nn.Embedding):
    """The table of word vectors; its own class, that it be filled and not drawn like other embeddings.

    Args:
        words, width: Shape.
        trainable: Whether the vectors are trained.
    """

    def __init__(self, words: int, width: int, trainable: bool) -> None:
        super().__init__(words, width)
        self.fixed_parameters = () if trainable else ("weight",)
        self.weight.requires_grad_(trainable)


class PretrainedEmbeddingPreTrainedModel(RecurrentPreTrainedModel):
    """The part of the model base that such families share."""

    config: Any

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PretrainedEmbedding):
            if not getattr(module.weight, "_is_hf_initialized", False):
                _fill(module, self.config)
        else:
            super()._init_weights(module)


class PretrainedEmbeddingEncoder(PretrainedEmbeddingPreTrainedModel):
    """Looks words up.

    Attributes:
        word_embeddings: (vocabulary, embedding) table.
    """

    word_embeddings: nn.Embedding

    def build_vectors(self, config: NamesVectors) -> None:
        """Create the table."""
        self.word_embeddings = PretrainedEmbedding(config.vocab_size, config.embedding_size, config.train_vectors)

    def get_input_embeddings(self) -> nn.Module:
        """The fixed vectors."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the fixed vectors."""
        self.word_embeddings = value.requires_grad_(self.config.train_vectors)


def _fill(module: PretrainedEmbedding, config: NamesVectors) -> None:
    """The vectors of `config.pretrained_embeddings`, or random ones; those of padding and unknown words are zero."""
    if config.pretrained_embeddings is None:
        init.normal_(module.weight, std=_SPREAD)
    else:
        init.copy_(module.weight, _vectors_of(config.pretrained_embeddings, config))
    for token in (config.pad_token_id, config.unk_token_id):
        if token is not None and token < module.num_embeddings:
            init.zeros_(module.weight[token])


def open_pretrained_embeddings(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of fixed vectors in a directory or of a Hub id, and its tokenizer.

    Raises:
        CtxError: They cannot be opened.
    """
    try:
        return AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CtxError(
            f"Cannot open the model of the fixed vectors: {error}",
            location=source,
            hint="name one that is there, with its tokenizer.",
        ) from error


def _vectors_of(source: str, config: NamesVectors) -> Tensor:
    """(vocabulary, embedding) of a model.

    Raises:
        CtxError: It cannot be opened, or its vectors are of another number or width.
    """
    model, tokenizer = open_pretrained_embeddings(source)
    if not hasattr(model, "vectors"):
        raise CtxError(f"{type(model).__name__} has no fixed vector for each word.", location=source)
    vectors = model.vectors().detach()
    expected = (config.vocab_size, config.embedding_size)
    if tuple(vectors.shape) != expected or len(tokenizer) != config.vocab_size:
        raise CtxError(
            f"The vectors are {tuple(vectors.shape)}, but vocab_size and embedding_size are {expected}.",
            location=source,
            hint="train the tokenizer with pretrained_embeddings=..., so that its words are those of the vectors, and "
            "set embedding_size to their width.",
        )
    return vectors
