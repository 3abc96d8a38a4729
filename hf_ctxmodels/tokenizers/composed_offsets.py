"""Offsets of tokens in decomposed text, for tokenizers that compose characters (Unicode normalization form NFC)."""

from collections.abc import Sequence
from typing import Any
from unicodedata import is_normalized, normalize

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding

from hf_ctxmodels.tokenizers.base import CtxTokenizer


class ComposingTokenizer(CtxTokenizer):
    """A tokenizer whose backend normalizes texts to NFC. Offsets include the marks of a composed character."""

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *, is_split_into_words: bool = False, **kwargs: Any
    ) -> BatchEncoding:
        encoded = super()._encode_plus(text, text_pair, is_split_into_words=is_split_into_words, **kwargs)
        mapping = encoded.get("offset_mapping")
        if mapping is None or not len(mapping):
            return encoded
        rows = [mapping] if isinstance(mapping[0], tuple) else mapping
        sequences = encoded_sequences(encoded, text, text_pair, is_split_into_words)
        for row, encoding, row_sequences in zip(rows, encoded.encodings, sequences, strict=True):
            offsets = complete_offsets(encoding, row_sequences)
            if isinstance(row, list):
                row[:] = offsets
            else:
                row[:] = torch.tensor(offsets) if isinstance(row, Tensor) else np.array(offsets)
        return encoded


def encoded_sequences(
    encoded: BatchEncoding, text: Any, text_pair: Any, is_split_into_words: bool
) -> list[tuple[Any, ...]]:
    """The one or two texts, or lists of words, of each encoding, from the arguments of `_encode_plus`."""
    is_batch = isinstance(text, list | tuple) and (
        not is_split_into_words or (bool(text) and isinstance(text[0], list | tuple))
    )
    texts = list(text) if is_batch else [text]
    pairs = [None] * len(texts) if text_pair is None else list(text_pair) if is_batch else [text_pair]
    encodings = encoded.encodings or []
    return [
        _sequences(texts[source], pairs[source], is_split_into_words)
        for source in map(int, encoded.get("overflow_to_sample_mapping", range(len(encodings))))
    ]


def _sequences(text: Any, pair: Any, is_split_into_words: bool) -> tuple[Any, ...]:
    """One or two texts of an example: strings, or lists of words."""
    if pair is not None:
        return text, pair
    is_pair = isinstance(text, list | tuple) and bool(text)
    if is_split_into_words:
        is_pair = is_pair and not isinstance(text[0], str)
    return tuple(text) if is_pair else (text,)


def complete_offsets(encoding: Any, sequences: Sequence[str | Sequence[str]]) -> list[tuple[int, int]]:
    """The offsets of an encoding's tokens, with all characters of a composed one.

    The NFC normalizer of the `tokenizers` library maps a composed character to the first of its characters only, so
    that the offsets of a decomposed word lack its last marks or, in Korean, its last letters.

    Args:
        encoding: An encoding of the `tokenizers` library.
        sequences: Its one or two texts, or lists of words.
    """
    offsets: list[tuple[int, int]] = encoding.offsets
    texts = [sequence if isinstance(sequence, str) else "".join(sequence) for sequence in sequences]
    if all(text.isascii() or is_normalized("NFC", text) for text in texts):
        return offsets
    for position, (sequence_index, word_index) in enumerate(zip(encoding.sequence_ids, encoding.word_ids, strict=True)):
        start, stop = offsets[position]
        if sequence_index is None or start == stop:
            continue
        sequence = sequences[sequence_index]
        text = sequence if isinstance(sequence, str) else sequence[word_index]
        size = len(normalize("NFC", text[start:stop]))
        while stop < len(text) and len(normalize("NFC", text[start : stop + 1])) == size:
            stop += 1
        offsets[position] = start, stop
    return offsets
