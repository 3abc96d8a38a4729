"""Documents as arrays of token ids, and the special tokens that go around them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError

DOCUMENTS_PER_BATCH = 1000  # tokenised together; random segments of other documents are drawn among them
SENTENCES_PER_CALL = 4096  # bounds the lists of Python integers that a tokenizer call returns
NO_WORD = -1
Document = TypeVar("Document", bound=list[str])


@dataclass(frozen=True)
class TokenizedDocument:
    """One document: all its tokens in a row, and where its sentences begin and end.

    Attributes:
        ids: (tokens,) int32, no special tokens.
        word_ids: (tokens,) int32, equal for the pieces of one word and different for neighbouring words; or None.
        bounds: (sentences + 1,) sentence i is `ids[bounds[i]:bounds[i + 1]]`, never empty.
    """

    ids: np.ndarray
    word_ids: np.ndarray | None
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1


def tokenize_documents(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[str]], with_word_ids: bool
) -> list[TokenizedDocument]:
    """Tokenise sentences in large calls. Sentences without tokens vanish; a document may be left with none."""
    sentences = [sentence for document in documents for sentence in document]
    pieces: list[np.ndarray] = []
    words: list[np.ndarray] = []
    for start in range(0, len(sentences), SENTENCES_PER_CALL):
        encoded = tokenizer(
            sentences[start : start + SENTENCES_PER_CALL],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a document is longer than the model's limit by nature
        )
        pieces += [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        if with_word_ids:
            words += [_word_ids(encoded, row) for row in range(len(encoded["input_ids"]))]
    result, first = [], 0
    for document in documents:
        last = first + len(document)
        lengths = np.array([len(ids) for ids in pieces[first:last] if len(ids)], dtype=np.int64)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate(pieces[first:last])
        result.append(TokenizedDocument(ids, _join_words(words[first:last]) if with_word_ids else None, bounds))
        first = last
    return result


def _word_ids(encoded: BatchEncoding, row: int) -> np.ndarray:
    if not encoded.is_fast:
        raise CtxError(
            "Selecting whole words needs a tokenizer that knows which pieces form a word (`BatchEncoding.word_ids()`); "
            "this one does not.",
            hint="use a tokenizer of the `tokenizers` library, or select single tokens: whole_word=False, and no "
            "n-grams.",
        )
    return np.asarray(encoded.word_ids(row), dtype=np.int32)


def _join_words(words: list[np.ndarray]) -> np.ndarray:
    """Number the words of a document through: every sentence counts from zero, and neighbours must not coincide."""
    joined, offset = [], 0
    for sentence in words:
        if len(sentence):
            joined.append(sentence + offset)
            offset += int(sentence[-1]) + 1
    return np.concatenate(joined) if joined else np.empty(0, dtype=np.int32)


def document_batches(documents: Iterable[Document], size: int = DOCUMENTS_PER_BATCH) -> Iterator[list[Document]]:
    """Documents in lists of `size`, the last one shorter."""
    iterator = iter(documents)
    while batch := list(islice(iterator, size)):
        yield batch


def tokenized_batches(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[list[str]], size: int, with_word_ids: bool
) -> Iterator[list[TokenizedDocument]]:
    """Tokenise `size` documents at a time. A single document left over at the end joins the batch before it."""
    batches = document_batches(documents, size)
    waiting = next(batches, [])
    while waiting:
        following = next(batches, [])
        if len(following) == 1:
            waiting, following = waiting + following, []
        yield tokenize_documents(tokenizer, waiting, with_word_ids)
        waiting = following


class RowTemplate:
    """Where a tokenizer puts its special tokens around one segment, or around a pair.

    Read off the tokenizer once by encoding its own mask token, so that any template works ([CLS] A [SEP] B [SEP],
    <s> A </s></s> B </s>, ...) at the cost of an array copy per row.

    Args:
        tokenizer: must have a mask token.
        segments: 1 or 2.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, segments: int) -> None:
        if tokenizer.mask_token is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no mask token, by which its row format is read.",
                hint="tokenizer.add_special_tokens({'mask_token': '[MASK]'}), and resize the model's embeddings.",
            )
        row = tokenizer(*[tokenizer.mask_token] * segments, return_token_type_ids=True)
        ids = np.asarray(row["input_ids"], dtype=np.int32)
        slots = np.flatnonzero(ids == tokenizer.mask_token_id)
        self.special_tokens = len(ids) - segments
        self._fixed = np.split(ids, np.sort(np.concatenate([slots, slots + 1])))[::2]
        types = np.asarray(row["token_type_ids"], dtype=np.uint8)
        self._types = np.split(types, np.sort(np.concatenate([slots, slots + 1])))

    def room(self, max_length: int) -> int:
        """Tokens of text that fit in a row of `max_length`.

        Raises:
            CtxError: not one for each segment.
        """
        segments = len(self._fixed) - 1
        room = max_length - self.special_tokens
        if room < segments:
            raise CtxError(
                f"max_length={max_length} leaves no room for text between the special tokens.",
                hint=f"use at least {self.special_tokens + segments}.",
            )
        return room

    @property
    def leading(self) -> int:
        """Special tokens before the first segment."""
        return len(self._fixed[0])

    def fill(self, *segments: np.ndarray) -> np.ndarray:
        """Token ids of the whole row."""
        parts = [self._fixed[0]]
        for segment, after in zip(segments, self._fixed[1:], strict=True):
            parts += [segment, after]
        return np.concatenate(parts)

    def fill_words(self, *segments: np.ndarray) -> np.ndarray:
        """Word ids of the whole row; `NO_WORD` for special tokens."""
        gaps = [np.full(len(ids), NO_WORD, dtype=np.int32) for ids in self._fixed]
        parts = [gaps[0]]
        for segment, after in zip(segments, gaps[1:], strict=True):
            parts += [segment, after]
        return np.concatenate(parts)

    def token_types(self, *lengths: int) -> np.ndarray:
        """Token type ids (uint8) of the whole row for segments of these lengths."""
        parts = [self._types[0]]
        for slot, length in enumerate(lengths):
            parts += [np.repeat(self._types[2 * slot + 1], length), self._types[2 * slot + 2]]
        return np.concatenate(parts)
