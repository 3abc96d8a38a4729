"""The base of families on pretrained word embeddings.

A new model has an empty table; `load_pretrained_embeddings` fills it in an explicit step, which the scripts run. Saved
models hold their vectors.
"""

from collections.abc import Container
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.architectures.recurrent import RecurrentPreTrainedModel
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained

_SPREAD = 0.4  # standard deviation of random vectors, about that of released ones


class PretrainedEmbeddingConfig(Protocol):
    """The configuration fields of the vectors.

    Attributes:
        pretrained_embeddings: Directory or Hub id of static word embeddings; None for random vectors.
        train_pretrained_embeddings: Train the vectors too.
        vocab_size, embedding_size: Their number and width.
        pad_token_id, unk_token_id: Tokens with zero vectors.
    """

    pretrained_embeddings: str | None
    train_pretrained_embeddings: bool
    vocab_size: int
    embedding_size: int
    pad_token_id: int | None
    unk_token_id: int | None


def open_pretrained_embeddings(source: str, auto_class: Any = AutoModel) -> tuple[Any, PreTrainedTokenizerBase]:
    """The static word embeddings of a directory or Hub id (with `AutoConfig`, their configuration), and the tokenizer.

    Raises:
        CtxError: They cannot be opened.
    """
    what = "the model of the word vectors"
    return load_pretrained(auto_class, source, what), load_pretrained(AutoTokenizer, source, f"the tokenizer of {what}")


class EmbeddingLoaderPreTrainedModel(RecurrentPreTrainedModel):
    """The model base of all families that copy word vectors from another model.

    Attributes:
        table_class: The module of the vectors.
    """

    config: Any
    table_class: ClassVar[type[nn.Module]]

    def copy_vectors(self, table: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy the vectors of a model into `table`; raises CtxError if they are not word vectors, or do not fit."""
        raise NotImplementedError

    def load_pretrained_embeddings(self, source: str | None = None) -> None:
        """Copy the word vectors of another model into this one.

        Args:
            source: Directory or Hub id of static word embeddings; None for `config.pretrained_embeddings`, which is set
                to it.

        Raises:
            CtxError: There is no source, it cannot be opened, or its vectors do not fit this model.
        """
        source = self.config.pretrained_embeddings if source is None else source
        if source is None:
            raise CtxError("pretrained_embeddings is None.", hint="name the model of the word vectors.")
        tables = [module for module in self.modules() if isinstance(module, self.table_class)]
        if not tables:
            raise CtxError(f"{type(self).__name__} has no table for word vectors.", location=source)
        found = open_pretrained_embeddings(source)
        with torch.no_grad():
            for table in tables:
                self.copy_vectors(table, *found)
        self.config.pretrained_embeddings = source

    def load_pretrained_components(self, missing: Container[str] | None = None) -> None:
        """Copy the vectors, unless a checkpoint has them; see `CtxPreTrainedModel.load_pretrained_components`."""
        super().load_pretrained_components(missing)
        names = [
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, self.table_class)
            for name, _ in module.named_parameters()
        ]
        if self.config.pretrained_embeddings is not None and any(missing is None or name in missing for name in names):
            self.load_pretrained_embeddings()


class PretrainedEmbedding(nn.Embedding):
    """The table of word vectors.

    Args:
        words, width: Shape of the table.
        trainable: Whether the vectors are trained.
    """

    def __init__(self, words: int, width: int, trainable: bool) -> None:
        super().__init__(words, width)
        self.fixed_parameters = () if trainable else ("weight",)
        self.weight.requires_grad_(trainable)


class PretrainedEmbeddingPreTrainedModel(EmbeddingLoaderPreTrainedModel):
    """The model base of families whose vocabulary is that of the pretrained embeddings."""

    table_class = PretrainedEmbedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Random vectors, or zeros before they are copied; zeros for padding and unknown words."""
        if not isinstance(module, PretrainedEmbedding):
            super()._init_weights(module)
        elif self.config.pretrained_embeddings is not None:
            init.zeros_(module.weight)
        else:
            init.normal_(module.weight, std=_SPREAD)
            if not getattr(module.weight, "_is_hf_initialized", False):
                _zero_special_tokens(module, self.config)

    def copy_vectors(self, table: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy all vectors; those of padding and unknown words are zero.

        Raises:
            CtxError: The model has no word vectors, or they have another number or width.
        """
        table.weight.copy_(_checked_vectors(model, tokenizer, self.config))
        _zero_special_tokens(table, self.config)


class PretrainedEmbeddingEncoder(PretrainedEmbeddingPreTrainedModel):
    """An encoder on a table of word vectors.

    Attributes:
        word_embeddings: (vocabulary, embedding) table.
    """

    _input_embed_layer = "word_embeddings"
    word_embeddings: nn.Embedding

    def build_embeddings(self, config: PretrainedEmbeddingConfig) -> None:
        """Create the table."""
        trainable = config.train_pretrained_embeddings
        self.word_embeddings = PretrainedEmbedding(config.vocab_size, config.embedding_size, trainable)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word vectors."""
        self.word_embeddings = value.requires_grad_(self.config.train_pretrained_embeddings)


def _zero_special_tokens(table: nn.Embedding, config: PretrainedEmbeddingConfig) -> None:
    for token in (config.pad_token_id, config.unk_token_id):
        if token is not None and token < table.num_embeddings:
            table.weight[token] = 0


def _checked_vectors(model: Any, tokenizer: PreTrainedTokenizerBase, config: PretrainedEmbeddingConfig) -> Tensor:
    """(vocabulary, embedding) vectors of a static word embedding."""
    source = model.config.name_or_path
    if not hasattr(model, "vectors"):
        raise CtxError(f"{type(model).__name__} is no static word embedding.", location=source)
    vectors = model.vectors()
    expected = (config.vocab_size, config.embedding_size)
    if tuple(vectors.shape) != expected or len(tokenizer) != config.vocab_size:
        raise CtxError(
            f"The vectors are {tuple(vectors.shape)}, but vocab_size and embedding_size are {expected}.",
            location=source,
            hint="train the tokenizer with pretrained_embeddings=..., and set embedding_size to the vectors' width.",
        )
    return vectors
