"""Contiguous rows of the concatenated documents, each with a pair of segments at its end."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.components.tokenized_documents import NO_WORD, RowTemplate, TokenizedDocument

RANDOM_SEGMENT_SHARE = 0.5  # share of rows with a random segment B, as in the released data preparation


@dataclass(frozen=True)
class ContiguousRows:
    """Concatenates documents and cuts rows `reused text, segment A <sep> segment B <sep> <cls>` from them.

    With `reuse_length` = 0 a row begins where the text of the last one ended. Otherwise row i + 1 begins `reuse_length`
    tokens after row i: the reused parts form the text without gaps, and the remainder of a row occurs again in the
    next one. In one half of the rows B continues A; in the other it is text from a random place (Yang et al. 2019,
    section 2.5, and the released data preparation). A ends at a sentence end, if there is one.

    Attributes:
        template: The special tokens of a pair.
        max_length: Length of a row, special tokens included.
        reuse_length: See above; 0 for rows that share no text.
        document_end: Id of the token after every document; None for none.
        seed: Seed of the segments.
    """

    template: RowTemplate
    max_length: int
    reuse_length: int
    document_end: int | None
    seed: int

    def cut(
        self, batches: Iterable[list[TokenizedDocument]], pass_index: int, statistics: Counter[str]
    ) -> Iterator[Example]:
        """Rows with input_ids, token_type_ids and, if the documents have them, word_ids.

        Rows that share text are all full, and the remaining text is counted as truncated. Otherwise the last rows are
        shorter.
        """
        room = self.template.room(self.max_length)
        rest: list[TokenizedDocument] = []
        text, start, number = None, 0, 0
        for batch in batches:
            for document in batch:
                statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
            text, start = join([*rest, *(self._closed(document) for document in batch if len(document))]), 0
            while start + room <= len(text.ids):
                row, start = self._row(text, start, generator(self.seed, pass_index, number, Stream.PAIRING))
                yield row
                number += 1
            rest = [_after(text, start)]
        if text is None:
            return
        if self.reuse_length:
            statistics["truncated_tokens"] += len(text.ids) - start
            return
        while start < len(text.ids):
            row, start = self._row(text, start, generator(self.seed, pass_index, number, Stream.PAIRING))
            yield row
            number += 1

    def _closed(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with the token of its end."""
        if self.document_end is None:
            return document
        words = document.word_ids
        return TokenizedDocument(
            np.append(document.ids, np.int32(self.document_end)),
            None if words is None else np.append(words, np.int32(NO_WORD)),
            np.append(document.bounds[:-1], document.bounds[-1] + 1),
        )

    def _row(self, text: TokenizedDocument, start: int, rng: np.random.Generator) -> tuple[Example, int]:
        """The row that begins at token `start`, and the start of the next one."""
        room = self.template.room(self.max_length)
        begin = start + self.reuse_length
        stop = min(start + room, len(text.ids))
        ends = text.bounds[np.searchsorted(text.bounds, begin, "right") : np.searchsorted(text.bounds, stop, "left")]
        if stop - begin < 2:
            middle = stop  # a single token is left
        elif len(ends):
            middle = int(rng.choice(ends))
        else:
            middle = int(rng.integers(begin + 1, stop))
        if middle == stop or rng.random() < RANDOM_SEGMENT_SHARE:
            first, last = self._elsewhere(text, room - (middle - start), rng)
            following = middle
        else:
            first, last = middle, stop
            following = stop
        row: Example = {
            "input_ids": self.template.fill(text.ids[start:middle], text.ids[first:last]),
            "token_type_ids": self.template.token_types(middle - start, last - first),
        }
        if text.word_ids is not None:
            row["word_ids"] = self.template.fill_words(text.word_ids[start:middle], text.word_ids[first:last])
        return row, start + self.reuse_length if self.reuse_length else following

    @staticmethod
    def _elsewhere(text: TokenizedDocument, length: int, rng: np.random.Generator) -> tuple[int, int]:
        """Range of at most `length` tokens that begins at a random sentence."""
        sentence = int(text.bounds[rng.integers(len(text))])
        first = max(0, min(sentence, len(text.ids) - length))
        return first, min(first + length, len(text.ids))


def join(documents: list[TokenizedDocument]) -> TokenizedDocument:
    """Concatenate documents, and renumber their words."""
    lengths = [len(document.ids) for document in documents]
    starts = np.cumsum([0, *lengths])
    bounds = [document.bounds[:-1] + start for document, start in zip(documents, starts)]
    return TokenizedDocument(
        np.concatenate([np.empty(0, dtype=np.int32), *(document.ids for document in documents)]),
        _join_words(documents),
        np.concatenate([*bounds, starts[-1:]]).astype(np.int64),
    )


def _join_words(documents: list[TokenizedDocument]) -> np.ndarray | None:
    joined, offset = [np.empty(0, dtype=np.int32)], 0
    for document in documents:
        if document.word_ids is None:
            return None
        if len(document.word_ids):
            words = document.word_ids
            joined.append(np.where(words == NO_WORD, NO_WORD, words + offset).astype(np.int32))
            offset += int(words.max()) + 1
    return np.concatenate(joined)


def _after(text: TokenizedDocument, start: int) -> TokenizedDocument:
    """The text from token `start` on, its words numbered from zero."""
    bounds = text.bounds[np.searchsorted(text.bounds, start, "right") :] - start
    rest = TokenizedDocument(text.ids[start:], None, np.concatenate([[0], bounds]))
    if text.word_ids is None:
        return rest
    words = text.word_ids[start:]
    counted = words != NO_WORD
    lowest = int(words[counted].min()) if counted.any() else 0
    return replace(rest, word_ids=np.where(counted, words - lowest, NO_WORD).astype(np.int32))
