"""The words of sentences, and which tokens are parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.word_patterns import WORD
from hf_ctxmodels.tokenizers.character_level import CtxCharacterTokenizer

Sentence = str | Sequence[str]
"""A text, or a list of words."""
WordPooling = Literal["mean", "first", "last"]
"""Which token states of a word are averaged: all, or only the first or last one."""

NO_WORD = -1


@dataclass
class WordWindow:
    """The tokens of a sentence, or of a part of a sentence that is longer than the model.

    Attributes:
        sentence: Index of the sentence.
        features: Model inputs, without padding.
        token_words: (tokens,) index of each token's word in the sentence, -1 for special tokens.
        first, last: The vectors of the words first ... last - 1 are read from this window; consecutive windows of a
            sentence continue one another.
    """

    sentence: int
    features: dict[str, Any]
    token_words: np.ndarray
    first: int
    last: int


def split_words(sentence: Sentence) -> list[str]:
    """The words of a sentence; punctuation marks and emoji are words, see `WORD`.

    Scripts without spaces, such as Chinese and Thai, are not segmented: pass lists of words.

    Example:
        >>> split_words("The river has a bank.")
        ['The', 'river', 'has', 'a', 'bank', '.']
    """
    return WORD.findall(sentence) if isinstance(sentence, str) else list(sentence)


def align_words(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sentence], max_length: int | None = None
) -> list[WordWindow]:
    """Tokenize sentences and find the word of each token.

    The words of a list are joined by spaces. Character-level tokenizers read each word as it is, as one token.

    Args:
        tokenizer: A tokenizer with offsets.
        sentences: Texts or lists of words.
        max_length: Maximum number of tokens of a window, with special tokens; None for no limit. Windows of a longer
            sentence overlap by a quarter; a word's vector is read from the window in which it is complete and farthest
            from both ends.

    Raises:
        CtxError: The tokenizer has no offsets, a sentence is neither a text nor a list of words.
    """
    if not tokenizer.is_fast:
        raise CtxError(
            f"{type(tokenizer).__name__} has no offsets, which align tokens with words.",
            hint="use a tokenizer with a tokenizer.json.",
        )
    texts, spans = [], []
    for number, sentence in enumerate(sentences):
        if not isinstance(sentence, str) and not all(isinstance(word, str) for word in sentence):
            raise CtxError(f"Sentence {number} is neither a text nor a list of words: {sentence!r}.")
        text = sentence if isinstance(sentence, str) else " ".join(sentence)
        texts.append(text)
        spans.append(word_spans(sentence))
    options: dict[str, Any] = {"return_special_tokens_mask": True, "verbose": False}
    if max_length is not None:
        special_tokens = tokenizer.num_special_tokens_to_add()
        stride = max(0, min(max_length // 4, max_length - special_tokens - 1))
        options |= {
            "truncation": True, "max_length": max_length, "stride": stride, "return_overflowing_tokens": True,
        }  # fmt: skip
    if isinstance(tokenizer, CtxCharacterTokenizer):
        encoding = tokenizer([split_words(sentence) for sentence in sentences], is_split_into_words=True, **options)
    else:
        encoding = tokenizer(texts, return_offsets_mapping=True, **options)
    numbers = encoding.pop("overflow_to_sample_mapping", range(len(texts)))
    special_masks = encoding.pop("special_tokens_mask")
    offsets = encoding.pop("offset_mapping", None)
    windows_by_sentence: list[list[WordWindow]] = [[] for _ in texts]
    for index, number in enumerate(numbers):
        if offsets is None:
            words = [NO_WORD if word is None else word for word in encoding.word_ids(index)]
            token_words = np.array(words, dtype=np.int64)
        else:
            token_words = words_at(np.asarray(offsets[index]).reshape(-1, 2), spans[number])
        token_words[np.asarray(special_masks[index], dtype=bool)] = NO_WORD
        features = {name: encoding[name][index] for name in encoding}
        windows_by_sentence[number].append(WordWindow(number, features, token_words, 0, len(spans[number])))
    for windows in windows_by_sentence:
        if len(windows) > 1:
            _divide_words(windows)
    return [window for windows in windows_by_sentence for window in windows]


def word_spans(sentence: Sentence) -> np.ndarray:
    """(words, 2) start and end of each word in the text of the sentence."""
    if isinstance(sentence, str):
        spans = [match.span() for match in WORD.finditer(sentence)]
        return np.array(spans, dtype=np.int64).reshape(-1, 2)
    lengths = np.array([len(word) for word in sentence], dtype=np.int64)
    starts = np.cumsum(lengths + 1) - lengths - 1
    return np.stack([starts, starts + lengths], 1)


def words_at(offsets: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """(tokens,) index of the word that contains the last character of each token, -1 without one."""
    if not len(spans):
        return np.full(len(offsets), NO_WORD)
    positions = np.maximum(offsets[:, 1] - 1, offsets[:, 0])  # tokens without characters, of spaces, precede their word
    words = np.searchsorted(spans[:, 0], positions, side="right") - 1
    is_inside = (words >= 0) & (positions < spans[np.maximum(words, 0), 1])
    return np.where(is_inside, words, NO_WORD)


def _divide_words(windows: list[WordWindow]) -> None:
    """Set `first` and `last`: each word belongs to the window with most of its tokens, and most context around it."""
    num_words = windows[0].last
    best = np.zeros(num_words, dtype=np.int64)
    best_scores = np.full(num_words, -1.0)
    for number, window in enumerate(windows):
        positions = np.flatnonzero(window.token_words != NO_WORD)
        words, first_positions, counts = np.unique(window.token_words[positions], return_index=True, return_counts=True)
        starts = positions[first_positions]
        context = np.minimum(starts, len(window.token_words) - starts - counts)
        scores = counts + context / (len(window.token_words) + 1)
        is_better = scores > best_scores[words]
        best[words[is_better]], best_scores[words[is_better]] = number, scores[is_better]
    best = np.maximum.accumulate(best)  # words without tokens stay with their neighbors
    for number, window in enumerate(windows):
        window.first, window.last = (int(np.searchsorted(best, number, side)) for side in ("left", "right"))


@dataclass
class WordTokens:
    """The tokens of the words in a padded batch of windows.

    Attributes:
        rows, columns: (tokens,) positions in the batch of the tokens whose states are averaged.
        words: (tokens,) index of each token's word, below the number of words of the batch.
        sentences: (words,) index of each word's sentence.
        positions: (words,) index of each word in its sentence.
    """

    rows: Tensor
    columns: Tensor
    words: Tensor
    sentences: Tensor
    positions: Tensor

    @classmethod
    def from_windows(cls, windows: Sequence[WordWindow], pooling: WordPooling, padding_side: str) -> Self:
        """The tokens of the words that are read from these windows."""
        length = max(len(window.token_words) for window in windows)
        rows, columns, keys = [], [], []
        for row, window in enumerate(windows):
            positions = _pooled_tokens(window, pooling)
            offset = length - len(window.token_words) if padding_side == "left" else 0
            rows.append(np.full(len(positions), row))
            columns.append(positions + offset)
            keys.append(np.stack([np.full(len(positions), window.sentence), window.token_words[positions]], 1))
        words, token_words = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
        arrays = (np.concatenate(rows), np.concatenate(columns), token_words.reshape(-1), words[:, 0], words[:, 1])
        return cls(*map(torch.from_numpy, arrays))

    def pool(self, states: Tensor) -> Tensor:
        """(batch, length, width) states of tokens -> (words, width) states of words, on the same device."""
        rows, columns, words = (tensor.to(states.device) for tensor in (self.rows, self.columns, self.words))
        sums = states.new_zeros(len(self.sentences), states.shape[-1]).index_add(0, words, states[rows, columns])
        return sums / torch.bincount(words, minlength=len(sums))[:, None]


def _pooled_tokens(window: WordWindow, pooling: WordPooling) -> np.ndarray:
    """Positions of the tokens whose states are averaged: of words that are read from this window."""
    words = window.token_words
    positions = np.flatnonzero((words >= window.first) & (words < window.last))
    if pooling == "mean":
        return positions
    ordered = positions if pooling == "first" else positions[::-1]
    _, indices = np.unique(words[ordered], return_index=True)
    return np.sort(ordered[indices])
