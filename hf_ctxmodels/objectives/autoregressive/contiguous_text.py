"""Contiguous sequences of the concatenated documents, each with a pair of segments at its end."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.components.tokenized_documents import NO_WORD, SpecialTokensTemplate, TokenizedDocument

RANDOM_SEGMENT_SHARE = 0.5  # share of examples with a random segment B, as in the released data preparation


@dataclass(frozen=True)
class ContiguousText:
    """Concatenates documents and cuts `reused text, segment A <sep> segment B <sep> <cls>` from them.

    With `reuse_length` = 0 an example begins where the text of the previous one ended. Otherwise example i + 1 begins
    `reuse_length` tokens after example i: the reused parts form the text without gaps, and the remainder of an example
    occurs again in the next one. In one half of the examples B continues A; in the other it is text from a random
    position (Yang et al. 2019, section 2.5, and the released data preparation). A ends at a sentence end, if there is
    one.

    Attributes:
        template: The special tokens of a pair.
        max_length: Length of an example, including special tokens.
        reuse_length: See above; 0 for examples that share no text.
        document_end: Id of the token after every document; None for none.
        seed: Seed of the segments.
    """

    template: SpecialTokensTemplate
    max_length: int
    reuse_length: int
    document_end: int | None
    seed: int

    def cut(
        self, batches: Iterable[list[TokenizedDocument]], pass_index: int, statistics: Counter[str]
    ) -> Iterator[Example]:
        """Examples with input_ids, token_type_ids and, if the documents have them, word_ids.

        Examples that share text all have the full length, and the remaining text is counted as truncated. Otherwise the
        last ones are shorter.
        """
        room = self.template.room(self.max_length)
        text, start, number = concatenate([]), 0, 0
        for batch in batches:
            for document in batch:
                statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
            ended = [self._with_end(document) for document in batch if len(document)]
            text = concatenate([*([_from(text, start)] if len(text.ids) else []), *ended])
            start = 0
            while start + room <= len(text.ids):
                example, start = self._example(text, start, generator(self.seed, pass_index, number, Stream.PAIRING))
                yield example
                number += 1
        if self.reuse_length:
            statistics["truncated_tokens"] += len(text.ids) - start
            return
        while start < len(text.ids):
            example, start = self._example(text, start, generator(self.seed, pass_index, number, Stream.PAIRING))
            yield example
            number += 1

    def _with_end(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with its end token."""
        if self.document_end is None:
            return document
        words = document.word_ids
        return TokenizedDocument(
            np.append(document.ids, np.int32(self.document_end)),
            None if words is None else np.append(words, np.int32(NO_WORD)),
            np.append(document.bounds[:-1], document.bounds[-1] + 1),
        )

    def _example(self, text: TokenizedDocument, start: int, rng: np.random.Generator) -> tuple[Example, int]:
        """The example that begins at token `start`, and the start of the next one."""
        room = self.template.room(self.max_length)
        begin = start + self.reuse_length
        stop = min(start + room, len(text.ids))
        ends = text.bounds[np.searchsorted(text.bounds, begin, "right") : np.searchsorted(text.bounds, stop, "left")]
        if stop - begin < 2:
            middle = stop  # a single token remains
        elif len(ends):
            middle = int(rng.choice(ends))
        else:
            middle = int(rng.integers(begin + 1, stop))
        if middle == stop or rng.random() < RANDOM_SEGMENT_SHARE:
            first, last = self._random_segment(text, room - (middle - start), rng)
            following = middle
        else:
            first, last = middle, stop
            following = stop
        example: Example = {
            "input_ids": self.template.fill(text.ids[start:middle], text.ids[first:last]),
            "token_type_ids": self.template.token_types(middle - start, last - first),
        }
        if text.word_ids is not None:
            example["word_ids"] = self.template.fill_words(text.word_ids[start:middle], text.word_ids[first:last])
        return example, start + self.reuse_length if self.reuse_length else following

    @staticmethod
    def _random_segment(text: TokenizedDocument, length: int, rng: np.random.Generator) -> tuple[int, int]:
        """Range of at most `length` tokens that begins at a random sentence."""
        sentence = int(text.bounds[rng.integers(len(text))])
        first = max(0, min(sentence, len(text.ids) - length))
        return first, min(first + length, len(text.ids))


def concatenate(documents: list[TokenizedDocument]) -> TokenizedDocument:
    """Concatenate documents, and renumber their words."""
    starts = np.cumsum([0, *(len(document.ids) for document in documents)])
    bounds = [document.bounds[:-1] + start for document, start in zip(documents, starts)]
    return TokenizedDocument(
        np.concatenate([np.empty(0, dtype=np.int32), *(document.ids for document in documents)]),
        _concatenate_words(documents),
        np.concatenate([*bounds, starts[-1:]]).astype(np.int64),
    )


def _concatenate_words(documents: list[TokenizedDocument]) -> np.ndarray | None:
    renumbered, offset = [np.empty(0, dtype=np.int32)], 0
    for document in documents:
        words = document.word_ids
        if words is None:
            return None
        if len(words):
            renumbered.append(np.where(words == NO_WORD, NO_WORD, words + offset).astype(np.int32))
            offset += int(words.max()) + 1
    return np.concatenate(renumbered)


def _from(text: TokenizedDocument, start: int) -> TokenizedDocument:
    """The text from token `start` on, its words numbered from zero."""
    bounds = text.bounds[np.searchsorted(text.bounds, start, "right") :] - start
    remaining = TokenizedDocument(text.ids[start:], None, np.concatenate([[0], bounds]))
    if text.word_ids is None:
        return remaining
    words = text.word_ids[start:]
    is_word = words != NO_WORD
    lowest = int(words[is_word].min()) if is_word.any() else 0
    return replace(remaining, word_ids=np.where(is_word, words - lowest, NO_WORD).astype(np.int32))
