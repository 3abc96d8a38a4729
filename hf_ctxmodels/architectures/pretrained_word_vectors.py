"""Base classes of families on pretrained word vectors.

The embeddings of a new model are zeros until `load_pretrained_embeddings` copies the vectors, which the training
commands call. Saved models contain their vectors.
"""

from collections.abc import Container
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import load_pretrained
from hf_ctxmodels.core.model import CtxPreTrainedModel

_RANDOM_VECTOR_STD = 0.4  # about the standard deviation of released vectors


def open_pretrained_embeddings(source: str, auto_class: Any = AutoModel) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load static word embeddings (with `AutoConfig`, only the configuration) and their tokenizer."""
    model = load_pretrained(auto_class, source, "the model of the word vectors")
    return model, load_pretrained(AutoTokenizer, source, "the tokenizer of the word vectors")


def load_pretrained_embeddings(self: Any, source: str | None = None) -> None:
    """Copy the word vectors of another model into all modules of the class `vectors_class`, by their `copy_vectors`.

    Args:
        source: Directory or Hub id of static word embeddings, stored as `config.pretrained_embeddings`; None for the
            current value of this field.

    Raises:
        CtxError: There is no source, it cannot be opened, or its vectors do not fit the model.
    """
    source = self.config.pretrained_embeddings if source is None else source
    if source is None:
        raise CtxError("pretrained_embeddings is None.", hint="set it to the directory or Hub id of the word vectors.")
    modules = [module for module in self.modules() if isinstance(module, self.vectors_class)]
    if not modules:
        raise CtxError(
            f"{type(self).__name__} has no embeddings for word vectors.",
            location=source,
            hint="remove pretrained_embeddings from the configuration.",
        )
    vectors_and_tokenizer = open_pretrained_embeddings(source)
    for module in modules:
        module.copy_vectors(*vectors_and_tokenizer, self.config)
    self.config.pretrained_embeddings = source


def load_pretrained_components(self: Any, missing: Container[str] | None = None) -> None:
    """Copy the word vectors of `config.pretrained_embeddings`, unless they are in the checkpoint."""
    if self.config.pretrained_embeddings is not None and any(
        missing is None or f"{path}.{name}" in missing
        for path, module in self.named_modules()
        if isinstance(module, self.vectors_class)
        for name, _ in module.named_parameters()
    ):
        self.load_pretrained_embeddings()


class PretrainedEmbedding(nn.Embedding):
    """Word embeddings with pretrained vectors, which are trained if `trainable`."""

    def __init__(self, words: int, width: int, trainable: bool) -> None:
        super().__init__(words, width)
        self.fixed_parameters = () if trainable else ("weight",)
        self.weight.requires_grad_(trainable)

    @torch.no_grad()
    def copy_vectors(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        """Copy all vectors, with zeros for padding and unknown words; raises CtxError for vectors of another shape."""
        source = model.config.name_or_path
        if not hasattr(model, "vectors"):
            raise CtxError(f"{type(model).__name__} has no static word embeddings.", location=source)
        vectors, expected = model.vectors(), (config.vocab_size, config.embedding_size)
        if tuple(vectors.shape) != expected or len(tokenizer) != config.vocab_size:
            raise CtxError(
                f"The vectors are {tuple(vectors.shape)}, but vocab_size and embedding_size are {expected}.",
                location=source,
                hint="train the tokenizer with pretrained_embeddings=..., and set embedding_size to their width.",
            )
        self.weight.copy_(vectors)
        self.zero_special_tokens(config)

    def zero_special_tokens(self, config: Any) -> None:
        """Set the vectors of padding and unknown words to zero."""
        for token_id in (config.pad_token_id, config.unk_token_id):
            if token_id is not None and token_id < self.num_embeddings:
                self.weight[token_id] = 0


class PretrainedEmbeddingPreTrainedModel(CtxPreTrainedModel):
    """Base class of recurrent families whose vocabulary is the vocabulary of pretrained word vectors.

    The configuration has `pretrained_embeddings`, `train_pretrained_embeddings`, `vocab_size`, `embedding_size`,
    `pad_token_id` and `unk_token_id`.
    """

    config: Any
    supports_gradient_checkpointing = False  # the recurrence stores few activations besides its outputs
    vectors_class: ClassVar[type[nn.Module]] = PretrainedEmbedding
    load_pretrained_embeddings = load_pretrained_embeddings
    load_pretrained_components = load_pretrained_components

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # pretrained vectors are zeros until they are copied
        if not isinstance(module, PretrainedEmbedding):
            super()._init_weights(module)
        elif self.config.pretrained_embeddings is not None:
            init.zeros_(module.weight)
        else:
            init.normal_(module.weight, std=_RANDOM_VECTOR_STD)
            if not getattr(module.weight, "_is_hf_initialized", False):
                module.zero_special_tokens(self.config)


class PretrainedEmbeddingEncoder(PretrainedEmbeddingPreTrainedModel):
    """An encoder on pretrained word vectors."""

    _input_embed_layer = "word_embeddings"
    word_embeddings: nn.Embedding

    def build_embeddings(self, config: Any) -> None:
        """Create the word embeddings."""
        trainable = config.train_pretrained_embeddings
        self.word_embeddings = PretrainedEmbedding(config.vocab_size, config.embedding_size, trainable)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embeddings."""
        self.word_embeddings = value.requires_grad_(self.config.train_pretrained_embeddings)
