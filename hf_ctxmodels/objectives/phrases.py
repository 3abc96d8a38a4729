"""Phrases and entities of a list, which are masked as units (Sun et al. 2019, section 3.2)."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.objectives.tokenized_documents import NO_WORD, TokenizedDocument

_END = None  # key of a trie node at which a phrase ends
Word = tuple[int, ...]


class Phrases:
    """A list of phrases, matched in tokenized text from left to right, the longest first.

    A phrase is a sequence of words, and a word the sequence of its tokens, so the tokenizer decides what is equal.

    Single words are units anyway, and are skipped, as are phrases with an unknown token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, phrases: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        self._root: dict[Word | None, Any] = {}
        for phrase in phrases:
            encoded = tokenizer(phrase, add_special_tokens=False, verbose=False)
            ids = encoded["input_ids"]
            words = list(_split_words(np.array(ids), np.array(encoded.word_ids())))
            if len(words) < 2 or tokenizer.unk_token_id in ids:
                continue
            node = self._root
            for word in words:
                node = node.setdefault(word, {})
            node[_END] = True
        self._first_tokens = np.unique([word[0] for word in self._root if word])

    @classmethod
    def from_file(cls, tokenizer: PreTrainedTokenizerBase, file: str | Path) -> Self:
        """Read phrases from a file, one per line, or none for an empty name; raises CtxError if the file has none of
        known words."""
        if not file:
            return cls(tokenizer, ())
        phrases = cls(tokenizer, filter(None, (line.strip() for line in read_lines(Path(file)))))
        if not phrases._root:
            raise CtxError(
                "There is no phrase of two or more words in the tokenizer's vocabulary.",
                location=str(file),
                hint="write one phrase per line, for example with `hf-ctxmodels data units`.",
            )
        return phrases

    def join(self, ids: np.ndarray, word_ids: np.ndarray) -> np.ndarray:
        """(tokens,) numbers of the units of a text: a phrase is one unit, and so is any other word; `NO_WORD` is
        preserved."""
        words = list(_split_words(ids, word_ids))
        starts = np.flatnonzero(np.diff(word_ids, prepend=NO_WORD - 1) != 0)
        units = np.arange(len(words))
        end = 0
        for first in np.flatnonzero(np.isin(ids[starts], self._first_tokens)).tolist():
            if first < end:  # inside the previous phrase
                continue
            node, end = self._root, first + 1
            for number in range(first, len(words)):
                if (child := node.get(words[number])) is None:
                    break
                node = child
                if _END in node:
                    end = number + 1
            units[first:end] = first
        joined = np.repeat(units, np.diff(np.append(starts, len(ids)))).astype(np.int32)
        return np.where(word_ids == NO_WORD, NO_WORD, joined).astype(np.int32)

    def join_document(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with units as words: its `units` if it has any, else these phrases."""
        phrases = Phrases(self.tokenizer, document.units) if document.units else self
        if document.word_ids is None or not phrases._root:
            return document
        return replace(document, word_ids=phrases.join(document.ids, document.word_ids))


def _split_words(ids: np.ndarray, word_ids: np.ndarray) -> Iterator[Word]:
    """The words of a text; special tokens are empty words, which no phrase contains."""
    if len(ids):
        cuts = np.flatnonzero(np.diff(word_ids)) + 1
        for tokens, numbers in zip(np.split(ids, cuts), np.split(word_ids, cuts), strict=True):
            yield () if numbers[0] == NO_WORD else tuple(tokens.tolist())
