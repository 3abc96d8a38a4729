"""Word vectors, independent of a model: from files, gensim or a model."""

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
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.word_level import SPECIAL_TOKENS, CtxWordTokenizer, check_unique_words


def gensim_models() -> Any:
    """Import `gensim.models`; raises CtxError if gensim is not installed."""
    try:
        return importlib.import_module("gensim.models")
    except ImportError as error:
        raise CtxError("gensim is not installed.", hint="pip install 'hf_ctxmodels[demo]'.") from error


@dataclass
class WordVectors:
    """Words with their vectors.

    Attributes:
        words: Distinct words, by decreasing frequency if known.
        matrix: (words, dimensions) float32 vectors.
        counts: Frequency of each word, or None.
        lower_case: Whether words must be lower-cased before the look-up.
        word_to_index: Word -> row of `matrix`.
    """

    words: Sequence[str]
    matrix: np.ndarray
    counts: Sequence[int] | None = None
    lower_case: bool = False

    def __post_init__(self) -> None:
        self.word_to_index = {word: row for row, word in enumerate(self.words)}
        if self.matrix.ndim != 2 or len(self.words) != len(self.matrix):
            raise CtxError(f"{len(self.words)} words, but a matrix of shape {self.matrix.shape}.")
        check_unique_words(self.words)
        if self.counts is not None and len(self.counts) != len(self.words):
            raise CtxError(f"{len(self.counts)} counts for {len(self.words)} words.")

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Vectors of a static embedding model, without special tokens; raises CtxError for other models."""
        words, vectors, ids = get_words_and_vectors(model, tokenizer)
        word_tokenizer: Any = tokenizer  # checked by get_words_and_vectors
        counts = None if word_tokenizer.counts is None else [word_tokenizer.counts[token_id] for token_id in ids]
        return cls(words, vectors.numpy(), counts, word_tokenizer.do_lower_case)

    @property
    def has_treebank_words(self) -> bool:
        """Whether the text of the vectors was split as in the Penn Treebank, which makes "n't" a word."""
        return "n't" in self.word_to_index

    def to_model(self, family: str) -> tuple[PreTrainedModel, CtxWordTokenizer]:
        """Create a static embedding model with these vectors, and its tokenizer; raises CtxError for other families.

        The tokenizer splits at white space, or, if "n't" is a word, as in the Penn Treebank. The vectors of padding and
        of "[UNK]" are zero, unless "[UNK]" is one of the words.
        """
        spec = get_family(family)
        if not _is_static(spec):
            names = [name for name, candidate in FAMILIES.items() if _is_static(candidate)]
            raise CtxError(f"The family {family} has no static embeddings.", hint=f"use one of: {', '.join(names)}.")
        rows = [row for row, word in enumerate(self.words) if word not in SPECIAL_TOKENS]
        counts = None if self.counts is None else [self.counts[row] for row in rows]
        tokenizer = spec.tokenizer.from_words(
            [self.words[row] for row in rows],
            counts,
            do_lower_case=self.lower_case,
            split_punctuation=False,
            treebank_words=self.has_treebank_words,
        )
        model = spec.models["AutoModel"](spec.config.for_single_table(len(tokenizer), self.matrix.shape[1]))
        table: Any = model.get_input_embeddings().weight
        with torch.no_grad():
            table[: len(SPECIAL_TOKENS)] = 0
            table[len(SPECIAL_TOKENS) :] = torch.from_numpy(np.ascontiguousarray(self.matrix[rows]))
            for number, token in enumerate(SPECIAL_TOKENS):
                if token in self.word_to_index and number != tokenizer.pad_token_id:
                    table[number] = torch.from_numpy(self.matrix[self.word_to_index[token]])
        return model, tokenizer

    @classmethod
    def from_gensim(cls, keyed_vectors: Any) -> Self:
        """Convert a gensim `KeyedVectors`."""
        words, has_counts = list(keyed_vectors.index_to_key), "count" in getattr(keyed_vectors, "expandos", {})
        counts = [int(keyed_vectors.get_vecattr(word, "count")) for word in words] if has_counts else None
        return cls(words, np.array(keyed_vectors.vectors, dtype=np.float32), counts)

    def to_gensim(self) -> Any:
        """Convert to a gensim `KeyedVectors`; raises CtxError if gensim is not installed."""
        keyed = gensim_models().KeyedVectors(self.matrix.shape[1], dtype=np.float32)
        keyed.add_vectors(list(self.words), self.matrix)
        for word, count in zip(self.words, self.counts or ()):
            keyed.set_vecattr(word, "count", count)
        return keyed


def _is_static(spec: FamilySpec) -> bool:
    return issubclass(spec.models["AutoModel"], StaticEmbeddingModel)
