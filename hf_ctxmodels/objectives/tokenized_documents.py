"""Documents as arrays of token ids, their division into sequences, and special tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase, TokenizersBackend

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.documents import TextWithUnits, TranslatedText
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import required_token

DOCUMENTS_PER_BATCH = 1000  # tokenized together; random segments are sampled from the same batch
SENTENCES_PER_CALL = 4096  # limits the memory of a tokenizer call
MAX_OPEN_BINS = 64  # of packing; beyond that number the fullest bin is closed
NO_WORD = -1
Document = TypeVar("Document")


@dataclass(frozen=True)
class TokenizedDocument:
    """The concatenated tokens of a document, and the bounds of its sentences.

    Attributes:
        ids: (tokens,) int32, without special tokens.
        word_ids: (tokens,) int32, equal within a word and different for neighboring words; or None.
        bounds: (sentences + 1,) sentence i is `ids[bounds[i]:bounds[i + 1]]`, never empty.
        capitals: (tokens,) int8, see `capitalization_labels`; or None.
        units: Phrases of the document that are masked as units, from the data.
    """

    ids: np.ndarray
    word_ids: np.ndarray | None
    bounds: np.ndarray
    capitals: np.ndarray | None = None
    units: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sentence(self, number: int) -> np.ndarray:
        """(tokens,) ids of a sentence."""
        return self.ids[self.bounds[number] : self.bounds[number + 1]]


def encode_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """(tokens,) int32 ids of each text, without special tokens and without truncation.

    The ids equal `tokenizer(texts, add_special_tokens=False)`. For tokenizers of the `tokenizers` library that read
    texts unchanged, the other columns are not created, which saves a third of the time.
    """
    is_plain = getattr(type(tokenizer), "_encode_plus", None) is TokenizersBackend._encode_plus
    if not getattr(tokenizer, "reads_unchanged_text", is_plain):
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
    assert isinstance(tokenizer, TokenizersBackend)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # an earlier call may have set these
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [np.array(encoding.ids, np.int32) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def tokenize_documents(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[str]], with_word_ids: bool, with_capitals: bool = False
) -> list[TokenizedDocument]:
    """Tokenize sentences in large calls. Sentences without tokens are dropped, so a document may be empty."""
    sentences = [sentence for document in documents for sentence in document]
    ids_by_sentence: list[np.ndarray] = []
    words_by_sentence: list[np.ndarray] = []
    capitals_by_sentence: list[np.ndarray] = []
    for batch in document_batches(sentences, SENTENCES_PER_CALL):
        if not with_word_ids and not with_capitals:
            ids_by_sentence += encode_ids(tokenizer, batch)
            continue
        encoded = tokenizer(
            batch,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # documents may be longer than the model's limit
        )
        ids_by_sentence += [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        if with_word_ids:
            words_by_sentence += [_word_ids(encoded, index) for index in range(len(batch))]
        if with_capitals:
            capitals_by_sentence += [
                capitalization_labels(sentence, encoded, index) for index, sentence in enumerate(batch)
            ]
    tokenized, first = [], 0
    for document in documents:
        last = first + len(document)
        lengths = np.array([len(ids) for ids in ids_by_sentence[first:last] if len(ids)], dtype=np.int64)
        tokenized.append(
            TokenizedDocument(
                np.concatenate([np.empty(0, np.int32), *ids_by_sentence[first:last]]),
                concatenate_words(words_by_sentence[first:last]) if with_word_ids else None,
                np.concatenate([[0], np.cumsum(lengths)]),
                np.concatenate([np.empty(0, np.int8), *capitals_by_sentence[first:last]]) if with_capitals else None,
                document.units if isinstance(document, TextWithUnits) else (),
            )
        )
        first = last
    return tokenized


def _word_ids(encoded: BatchEncoding, index: int) -> np.ndarray:
    if not encoded.is_fast:
        raise CtxError(
            "Selecting whole words requires a tokenizer with word ids (`BatchEncoding.word_ids()`).",
            hint="use a tokenizer of the `tokenizers` library, or select single tokens: whole_word=False, no n-grams.",
        )
    return np.asarray(encoded.word_ids(index), dtype=np.int32)


def capitalization_labels(sentence: str, encoded: BatchEncoding, index: int) -> np.ndarray:
    """(tokens,) int8: 1 if the token's word begins with a capital letter, 0 with a small letter, -1 with neither."""
    words, encoding = _word_ids(encoded, index), encoded.encodings[index]
    first_tokens = np.searchsorted(words, words)  # of each token's word; word ids ascend
    letters = [sentence[start : start + 1] for start, _ in encoding.offsets]
    labels = np.array([letter.isupper() - (letter == letter.swapcase()) for letter in letters], dtype=np.int8)
    return labels[first_tokens]


def concatenate_words(words_by_text: Iterable[np.ndarray]) -> np.ndarray:
    """Word ids of consecutive texts, each numbered from zero, as consecutive numbers; `NO_WORD` is preserved."""
    renumbered, offset = [np.empty(0, dtype=np.int32)], 0
    for words in words_by_text:
        if len(words):
            renumbered.append(np.where(words == NO_WORD, NO_WORD, words + offset).astype(np.int32))
            offset += int(words.max()) + 1
    return np.concatenate(renumbered)


def document_batches(documents: Iterable[Document], size: int | None = None) -> Iterator[list[Document]]:
    """Documents in lists of `size` (by default `DOCUMENTS_PER_BATCH`), the last one shorter."""
    iterator = iter(documents)
    while batch := list(islice(iterator, size or DOCUMENTS_PER_BATCH)):
        yield batch


def tokenized_batches(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[list[str]], with_word_ids: bool
) -> Iterator[list[TokenizedDocument]]:
    """Tokenize documents in batches. A single document at the end joins the previous batch."""
    batches = document_batches(documents)
    current = next(batches, [])
    while current:
        following = next(batches, [])
        if len(following) == 1:
            current, following = current + following, []
        yield tokenize_documents(tokenizer, current, with_word_ids)
        current = following


def translation_batches(documents: Iterable[list[str]]) -> Iterator[list[TranslatedText]]:
    """Texts and their translations in batches; raises CtxError for a document without a translation."""
    for batch in document_batches(documents):
        yield [require_translation(document) for document in batch]


def require_translation(document: list[str]) -> TranslatedText:
    """The document, if it is a `TranslatedText`; otherwise raises CtxError."""
    if not isinstance(document, TranslatedText):
        raise CtxError(
            "A document has no translation.",
            hint="set --translations FILE, which contains line by line the translations (or targets) of --dataset; or "
            "use an objective for text without translations.",
        )
    return document


def untagged_translation(translation: str, tags: Sequence[str]) -> CtxError:
    """The error for a translation that begins with none of the tokenizer's language tags."""
    expected = ", ".join(tags) or "the tokenizer's tags, of which there is none"
    return CtxError(
        f"A translation does not begin with one of {expected}: {translation[:60]!r}.",
        hint="set the tag of each file of translations, as for the tokenizer: --language_tags '<de>' ...",
    )


def sequence_bounds(document: TokenizedDocument, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Token ranges of at most `max_tokens` tokens; a range ends at a sentence end if a sentence fits."""
    start, ends = 0, document.bounds[1:]
    while start < len(document.ids):
        fitting = int(np.searchsorted(ends, start + max_tokens, side="right"))  # sentences that end within the range
        stop = int(ends[fitting - 1]) if fitting else 0
        if stop <= start:  # not even the first sentence fits
            stop = start + max_tokens
        yield start, stop
        start = stop


def sentence_chunks(bounds: np.ndarray, target: int, from_end: bool) -> list[tuple[int, int]]:
    """Sentences [first, last) of each chunk: as many as fit into `target` tokens, but at least two if possible,
    collected backwards with `from_end`, so that the first chunk may be short instead of the last."""
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


def pack_sequences(sequences: Iterable[Example], max_length: int) -> Iterator[Example]:
    """Join sequences into bins of at most `max_length` tokens: each goes into the fullest open bin that has room (Krell
    et al. 2021). Adds `sequence_ids`, 1, 2, 3, ... for the sequences of a bin.
    """
    bins: list[list[dict]] = []
    sizes: list[int] = []
    for sequence in sequences:
        length = len(sequence["input_ids"])  # type: ignore[arg-type]
        if fitting := [index for index, size in enumerate(sizes) if size + length <= max_length]:
            target = max(fitting, key=sizes.__getitem__)
        else:
            bins.append([])
            sizes.append(0)
            target = len(bins) - 1
        bins[target].append(sequence)
        sizes[target] += length
        if sizes[target] == max_length or len(bins) > MAX_OPEN_BINS:
            fullest = max(range(len(sizes)), key=sizes.__getitem__)
            sizes.pop(fullest)
            yield _join(bins.pop(fullest))
    yield from map(_join, bins)


def _join(sequences: list[dict]) -> Example:
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    return {
        **{name: np.concatenate([sequence[name] for sequence in sequences]) for name in sequences[0]},
        "sequence_ids": np.repeat(np.arange(1, len(sequences) + 1, dtype=np.int32), lengths),
    }


class SpecialTokensTemplate:
    """The special tokens of a tokenizer around one segment, or around a pair, found by encoding the mask token once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, segments: int) -> None:
        mask_id = required_token(tokenizer, "mask_token", "is required to find its input format")
        encoded = tokenizer(*[tokenizer.mask_token] * segments, return_token_type_ids=True)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        slots = np.flatnonzero(ids == mask_id)
        cuts = np.sort(np.concatenate([slots, slots + 1]))  # pieces: special tokens, segment, special tokens, ...
        self.special_tokens = len(ids) - segments
        self._fixed_ids = np.split(ids, cuts)[::2]
        self._token_types = np.split(np.asarray(encoded["token_type_ids"], dtype=np.uint8), cuts)
        self.leading = len(self._fixed_ids[0])
        """Number of special tokens before the first segment."""

    def num_text_tokens(self, max_length: int) -> int:
        """Number of text tokens in a sequence of `max_length`; raises CtxError for less than one per segment."""
        segments = len(self._fixed_ids) - 1
        num_tokens = max_length - self.special_tokens
        if num_tokens < segments:
            raise CtxError(
                f"max_length={max_length} leaves no room for text between the special tokens.",
                hint=f"use at least {self.special_tokens + segments}.",
            )
        return num_tokens

    def fill(self, *segments: np.ndarray) -> np.ndarray:
        """Token ids of the whole sequence."""
        return self._interleave(self._fixed_ids, segments)

    def fill_words(self, *segments: np.ndarray) -> np.ndarray:
        """Word ids of the whole sequence; `NO_WORD` for special tokens."""
        return self._interleave([np.full(len(ids), NO_WORD, dtype=np.int32) for ids in self._fixed_ids], segments)

    @staticmethod
    def _interleave(fixed: list[np.ndarray], segments: tuple[np.ndarray, ...]) -> np.ndarray:
        arrays = [fixed[0]]
        for segment, following in zip(segments, fixed[1:], strict=True):
            arrays += [segment, following]
        return np.concatenate(arrays)

    def token_types(self, *lengths: int) -> np.ndarray:
        """Token type ids (uint8) of the whole sequence for segments of these lengths."""
        segments = tuple(np.repeat(types, length) for types, length in zip(self._token_types[1::2], lengths))
        return self._interleave(self._token_types[::2], segments)

    def example(self, text: TokenizedDocument, *ranges: tuple[int, int], with_token_types: bool = False) -> Example:
        """The example of token ranges [start, stop) of a text, with word_ids if the text has them."""
        example: Example = {"input_ids": self.fill(*(text.ids[start:stop] for start, stop in ranges))}
        if with_token_types:
            example["token_type_ids"] = self.token_types(*(stop - start for start, stop in ranges))
        if text.word_ids is not None:
            example["word_ids"] = self.fill_words(*(text.word_ids[start:stop] for start, stop in ranges))
        return example
