"""Base classes of families on pretrained word vectors.

A new model has empty embeddings; `load_pretrained_embeddings` copies the vectors in an explicit step, which the scripts
run. Saved models contain their vectors.
"""

from collections.abc import Callable, Container
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.core.model import CtxPreTrainedModel

_RANDOM_VECTOR_STD = 0.4  # about the standard deviation of released vectors


class PretrainedEmbeddingConfig(Protocol):
    """The configuration fields of pretrained word vectors.

    Attributes:
        pretrained_embeddings: Directory or Hub id of static word embeddings; None for random vectors.
        train_pretrained_embeddings: Whether the vectors are trained.
        vocab_size, embedding_size: Number and width of the vectors.
        pad_token_id, unk_token_id: Tokens with zero vectors.
    """

    pretrained_embeddings: str | None
    train_pretrained_embeddings: bool
    vocab_size: int
    embedding_size: int
    pad_token_id: int | None
    unk_token_id: int | None


def open_pretrained_embeddings(source: str, auto_class: Any = AutoModel) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load static word embeddings (with `AutoConfig`, only the configuration) and their tokenizer.

    Raises:
        CtxError: The model or the tokenizer cannot be loaded.
    """
    model = load_pretrained(auto_class, source, "the model of the word vectors")
    return model, load_pretrained(AutoTokenizer, source, "the tokenizer of the word vectors")


def load_word_vectors(
    model: CtxPreTrainedModel,
    source: str | None,
    embedding_class: type[nn.Module],
    copy_vectors: Callable[[Any, PreTrainedModel, PreTrainedTokenizerBase], None],
) -> None:
    """Copy the word vectors of another model into all embeddings of a class.

    Args:
        model: The model with the embeddings.
        source: Directory or Hub id of static word embeddings; None for `config.pretrained_embeddings`. The field is set
            to the source.
        embedding_class: Class of the embeddings.
        copy_vectors: Copies the vectors of a model with its tokenizer into an embedding module.

    Raises:
        CtxError: There is no source, it cannot be opened, or its vectors do not fit the model.
    """
    source = model.config.pretrained_embeddings if source is None else source
    if source is None:
        raise CtxError("pretrained_embeddings is None.", hint="name the model of the word vectors.")
    embeddings = [module for module in model.modules() if isinstance(module, embedding_class)]
    if not embeddings:
        raise CtxError(f"{type(model).__name__} has no embeddings for word vectors.", location=source)
    vectors_and_tokenizer = open_pretrained_embeddings(source)
    with torch.no_grad():
        for module in embeddings:
            copy_vectors(module, *vectors_and_tokenizer)
    model.config.pretrained_embeddings = source


def lacks_word_vectors(
    model: CtxPreTrainedModel, embedding_class: type[nn.Module], missing: Container[str] | None
) -> bool:
    """Whether `config.pretrained_embeddings` names word vectors that the checkpoint lacks; arguments as in
    `CtxPreTrainedModel.load_pretrained_components` and `load_word_vectors`."""
    names = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, embedding_class)
        for name, _ in module.named_parameters()
    ]
    has_missing = any(missing is None or name in missing for name in names)
    return model.config.pretrained_embeddings is not None and has_missing


class PretrainedEmbedding(nn.Embedding):
    """Word embeddings with pretrained vectors.

    Args:
        words, width: Number and width of the vectors.
        trainable: Whether the vectors are trained.
    """

    def __init__(self, words: int, width: int, trainable: bool) -> None:
        super().__init__(words, width)
        self.fixed_parameters = () if trainable else ("weight",)
        self.weight.requires_grad_(trainable)


class PretrainedEmbeddingPreTrainedModel(CtxPreTrainedModel):
    """Base class of recurrent families whose vocabulary is the vocabulary of pretrained word vectors."""

    config: Any
    supports_gradient_checkpointing = False  # the recurrence stores little more than its outputs

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module: random vectors, or zeros until they are copied; zeros for padding and unknown words."""
        if not isinstance(module, PretrainedEmbedding):
            super()._init_weights(module)
        elif self.config.pretrained_embeddings is not None:
            init.zeros_(module.weight)
        else:
            init.normal_(module.weight, std=_RANDOM_VECTOR_STD)
            if not getattr(module.weight, "_is_hf_initialized", False):
                _zero_special_tokens(module, self.config)

    def load_pretrained_embeddings(self, source: str | None = None) -> None:
        """Copy the word vectors of another model; arguments and errors as in `load_word_vectors`."""
        load_word_vectors(self, source, PretrainedEmbedding, self._copy_vectors)

    def load_pretrained_components(self, missing: Container[str] | None = None) -> None:
        """Copy the word vectors, unless they are in the checkpoint; see the base class."""
        super().load_pretrained_components(missing)
        if lacks_word_vectors(self, PretrainedEmbedding, missing):
            self.load_pretrained_embeddings()

    def _copy_vectors(self, embedding: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy all vectors, with zeros for padding and unknown words.

        Raises:
            CtxError: The model has no word vectors, or they have another number or width.
        """
        embedding.weight.copy_(_checked_vectors(model, tokenizer, self.config))
        _zero_special_tokens(embedding, self.config)


class PretrainedEmbeddingEncoder(PretrainedEmbeddingPreTrainedModel):
    """An encoder on pretrained word vectors.

    Attributes:
        word_embeddings: (vocabulary, embedding) vectors.
    """

    _input_embed_layer = "word_embeddings"
    word_embeddings: nn.Embedding

    def build_embeddings(self, config: PretrainedEmbeddingConfig) -> None:
        """Create the word embeddings."""
        trainable = config.train_pretrained_embeddings
        self.word_embeddings = PretrainedEmbedding(config.vocab_size, config.embedding_size, trainable)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings."""
        self.word_embeddings = value.requires_grad_(self.config.train_pretrained_embeddings)


def _zero_special_tokens(embedding: nn.Embedding, config: PretrainedEmbeddingConfig) -> None:
    for token_id in (config.pad_token_id, config.unk_token_id):
        if token_id is not None and token_id < embedding.num_embeddings:
            embedding.weight[token_id] = 0


def _checked_vectors(model: Any, tokenizer: PreTrainedTokenizerBase, config: PretrainedEmbeddingConfig) -> Tensor:
    """(vocabulary, embedding) vectors of static word embeddings."""
    source = model.config.name_or_path
    if not hasattr(model, "vectors"):
        raise CtxError(f"{type(model).__name__} has no static word embeddings.", location=source)
    vectors = model.vectors()
    expected = (config.vocab_size, config.embedding_size)
    if tuple(vectors.shape) != expected or len(tokenizer) != config.vocab_size:
        raise CtxError(
            f"The vectors are {tuple(vectors.shape)}, but vocab_size and embedding_size are {expected}.",
            location=source,
            hint="train the tokenizer with pretrained_embeddings=..., and set embedding_size to their width.",
        )
    return vectors
