"""Words and their vectors outside a model: from files, gensim or a model."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.static_embeddings import StaticEmbeddingModel, get_words_and_vectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.tokenizers.word_level import SPECIAL_TOKENS, CtxWordTokenizer, check_unique_words


def gensim_models() -> Any:
    """The module `gensim.models`; raises CtxError if it is not installed."""
    try:
        return importlib.import_module("gensim.models")
    except ImportError as error:
        raise CtxError("gensim is not installed.", hint="pip install 'hf_ctxmodels[demo]'.") from error


@dataclass
class WordVectors:
    """A vector for each word.

    Attributes:
        words: Distinct words, by decreasing frequency if it is known.
        matrix: (words, dimensions) float32.
        counts: Frequency of each word, or None.
        lower_case: Whether the words are in lower case, so words must be lower-cased before the look-up.

    Raises:
        CtxError: The lengths differ, or words are repeated.
    """

    words: Sequence[str]
    matrix: np.ndarray
    counts: Sequence[int] | None = None
    lower_case: bool = False

    def __post_init__(self) -> None:
        self.word_to_index = {word: index for index, word in enumerate(self.words)}
        if self.matrix.ndim != 2 or len(self.words) != len(self.matrix):
            raise CtxError(f"{len(self.words)} words, but a matrix of shape {self.matrix.shape}.")
        check_unique_words(self.words)
        if self.counts is not None and len(self.counts) != len(self.words):
            raise CtxError(f"{len(self.counts)} counts for {len(self.words)} words.")

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The vectors of a model of a static family, without special tokens.

        Raises:
            CtxError: The model has no vector for each word, or the tokenizer is not a word tokenizer.
        """
        words, vectors, ids = get_words_and_vectors(model, tokenizer)
        word_tokenizer: Any = tokenizer  # checked by get_words_and_vectors
        counts = None if word_tokenizer.counts is None else [word_tokenizer.counts[number] for number in ids]
        return cls(words, vectors.numpy(), counts, word_tokenizer.do_lower_case)

    def to_model(self, family: str) -> tuple[PreTrainedModel, CtxWordTokenizer]:
        """A model of a static family with these vectors, and its tokenizer, which splits only at white space.

        The vectors of padding and, unless "[UNK]" is one of the words, of unknown words are zero.

        Raises:
            CtxError: The family is not static.
        """
        row = get_family(family)
        if not issubclass(row.models["AutoModel"], StaticEmbeddingModel):
            static = [
                name for name, other in FAMILIES.items() if issubclass(other.models["AutoModel"], StaticEmbeddingModel)
            ]
            raise CtxError(f"The family {family} has no static embeddings.", hint=f"use one of: {', '.join(static)}.")
        kept = [place for place, word in enumerate(self.words) if word not in SPECIAL_TOKENS]
        counts = None if self.counts is None else [self.counts[place] for place in kept]
        tokenizer = row.tokenizer.from_words(
            [self.words[place] for place in kept], counts, do_lower_case=self.lower_case, split_punctuation=False
        )
        model = row.models["AutoModel"](row.config.for_single_table(len(tokenizer), self.matrix.shape[1]))
        table: Any = model.get_input_embeddings().weight
        with torch.no_grad():
            table[: len(SPECIAL_TOKENS)] = 0
            table[len(SPECIAL_TOKENS) :] = torch.from_numpy(np.ascontiguousarray(self.matrix[kept]))
            for number, token in enumerate(SPECIAL_TOKENS):
                if token in self.word_to_index and number != tokenizer.pad_token_id:
                    table[number] = torch.from_numpy(self.matrix[self.word_to_index[token]])
        return model, tokenizer

    @classmethod
    def from_gensim(cls, keyed_vectors: Any) -> Self:
        """From a gensim `KeyedVectors`."""
        words = list(keyed_vectors.index_to_key)
        counts = None
        if "count" in getattr(keyed_vectors, "expandos", {}):
            counts = [int(keyed_vectors.get_vecattr(word, "count")) for word in words]
        return cls(words, np.array(keyed_vectors.vectors, dtype=np.float32), counts)

    def to_gensim(self) -> Any:
        """As a gensim `KeyedVectors`; raises CtxError without gensim."""
        keyed = gensim_models().KeyedVectors(self.matrix.shape[1], dtype=np.float32)
        keyed.add_vectors(list(self.words), self.matrix)
        for word, count in zip(self.words, self.counts or ()):
            keyed.set_vecattr(word, "count", count)
        return keyed
