"""Documents as arrays of token ids, and the special tokens around them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import TextWithUnits

DOCUMENTS_PER_BATCH = 1000  # tokenised together; random segments are drawn from the same batch
SENTENCES_PER_CALL = 4096  # limits the memory of a tokenizer call
NO_WORD = -1
Document = TypeVar("Document", bound=list[str])


@dataclass(frozen=True)
class TokenizedDocument:
    """The concatenated tokens of a document, and the bounds of its sentences.

    Attributes:
        ids: (tokens,) int32, without special tokens.
        word_ids: (tokens,) int32, equal for the pieces of a word and different for neighbouring words; or None.
        bounds: (sentences + 1,) sentence i is `ids[bounds[i]:bounds[i + 1]]`, never empty.
        capitals: (tokens,) int8, see `capitals_of`; or None.
        units: Phrases in it that are masked as units, from the data.
    """

    ids: np.ndarray
    word_ids: np.ndarray | None
    bounds: np.ndarray
    capitals: np.ndarray | None = None
    units: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1


def tokenize_documents(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[str]], with_word_ids: bool, with_capitals: bool = False
) -> list[TokenizedDocument]:
    """Tokenise sentences in large calls. Sentences without tokens are dropped, so a document may become empty."""
    sentences = [sentence for document in documents for sentence in document]
    pieces: list[np.ndarray] = []
    words: list[np.ndarray] = []
    capitals: list[np.ndarray] = []
    for start in range(0, len(sentences), SENTENCES_PER_CALL):
        encoded = tokenizer(
            sentences[start : start + SENTENCES_PER_CALL],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # documents may be longer than the model's limit
        )
        pieces += [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        if with_word_ids:
            words += [_word_ids(encoded, row) for row in range(len(encoded["input_ids"]))]
        if with_capitals:
            here = sentences[start : start + SENTENCES_PER_CALL]
            capitals += [capitals_of(sentence, encoded, row) for row, sentence in enumerate(here)]
    result, first = [], 0
    for document in documents:
        last = first + len(document)
        lengths = np.array([len(ids) for ids in pieces[first:last] if len(ids)], dtype=np.int64)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate(pieces[first:last])
        joined = _join_words(words[first:last]) if with_word_ids else None
        written = np.concatenate(capitals[first:last]) if with_capitals else None
        units = document.units if isinstance(document, TextWithUnits) else ()
        result.append(TokenizedDocument(ids, joined, bounds, written, units))
        first = last
    return result


def _word_ids(encoded: BatchEncoding, row: int) -> np.ndarray:
    if not encoded.is_fast:
        raise CtxError(
            "Selecting whole words needs a tokenizer with word ids (`BatchEncoding.word_ids()`); this one has none.",
            hint="use one of the `tokenizers` library, or select single tokens: whole_word=False, and no n-grams.",
        )
    return np.asarray(encoded.word_ids(row), dtype=np.int32)


def capitals_of(sentence: str, encoded: BatchEncoding, row: int) -> np.ndarray:
    """(tokens,) int8 for each token: 1 if the first letter of its word is a capital, 0 if it is small, and -1 if the
    word does not begin with either."""
    words, encoding = _word_ids(encoded, row), encoded.encodings[row]
    first = np.searchsorted(words, words)  # the first token of each one's word; the numbers ascend
    letters = [sentence[start : start + 1] for start, _ in encoding.offsets]
    written = np.array([letter.isupper() - (letter == letter.swapcase()) for letter in letters], dtype=np.int8)
    return written[first]


def _join_words(words: list[np.ndarray]) -> np.ndarray:
    """Renumber the words of a document's sentences, each numbered from zero, consecutively."""
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
    """Tokenise `size` documents at a time. A single document at the end joins the batch before it."""
    batches = document_batches(documents, size)
    waiting = next(batches, [])
    while waiting:
        following = next(batches, [])
        if len(following) == 1:
            waiting, following = waiting + following, []
        yield tokenize_documents(tokenizer, waiting, with_word_ids)
        waiting = following


def row_bounds(document: TokenizedDocument, room: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `room` tokens; a range ends at a sentence end if a sentence fits."""
    start, ends = 0, document.bounds[1:]
    while start < len(document.ids):
        last = int(np.searchsorted(ends, start + room, side="right"))  # sentences that end within the room
        stop = int(ends[last - 1]) if last else 0
        if stop <= start:  # not even the first sentence fits
            stop = start + room
        yield start, stop
        start = stop


def sentence_chunks(bounds: np.ndarray, target: int, from_end: bool) -> list[tuple[int, int]]:
    """Sentences [first, last) of each chunk: as many as fit into `target` tokens, but at least two if possible.

    Args:
        bounds: Bounds of the document's sentences, as in `TokenizedDocument`.
        target: Number of tokens.
        from_end: Collect backwards, so that the first chunk may be short instead of the last.
    """
    sentences = len(bounds) - 1
    if from_end:
        mirrored = sentence_chunks(bounds[-1] - bounds[::-1], target, from_end=False)
        return [(sentences - last, sentences - first) for first, last in reversed(mirrored)]
    chunks, first = [], 0
    while first < sentences:
        fitting = int(np.searchsorted(bounds, bounds[first] + target, side="right")) - 1
        last = min(max(fitting, first + 2), sentences)
        chunks.append((first, last))
        first = last
    return chunks


class RowTemplate:
    """The special tokens of a tokenizer around one segment, or around a pair.

    The constructor encodes the mask token once to find them, so any template works ([CLS] A [SEP] B [SEP],
    <s> A </s></s> B </s>, ...), and a row costs one array copy.

    Args:
        tokenizer: With a mask token.
        segments: 1 or 2.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, segments: int) -> None:
        if tokenizer.mask_token is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no mask token, which is needed to find its row format.",
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
        """Number of text tokens in a row of `max_length`; raises CtxError for less than one per segment."""
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
