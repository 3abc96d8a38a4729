"""Masked language modelling on rows of whole sentences of one or more documents (Liu et al. 2019)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    NO_WORD,
    TokenizedDocument,
    tokenized_batches,
)
from hf_ctxmodels.objectives.masked.masked_lm import MaskedLM, MaskingOptions


@dataclass(frozen=True)
class FullSentencesOptions(MaskingOptions):
    """Options of `FullSentences`."""

    cross_documents: bool = flag(
        True, "Rows continue with the next document after a separator; False: they end with it (DOC-SENTENCES)."
    )


class FullSentences(MaskedLM):
    """Dynamic masking of rows of contiguous whole sentences that cross the ends of documents; no second task.

    A row takes sentences in the order of the text while they fit. An extra separator between two documents of a row,
    <s> A </s> B </s>, does not stop attention. A sentence longer than a row is cut and continued in the next one;
    nothing is dropped. Every epoch draws a new mask (section 4.1), unless `static` is set.

    References: Liu et al. 2019 (arXiv 1907.11692), section 4.2, "FULL-SENTENCES"; with `cross_documents=False`,
    "DOC-SENTENCES".
    Related: `MaskedLM` makes the rows of "DOC-SENTENCES" and can pack them without attention across documents.
    """

    Options: ClassVar[type] = FullSentencesOptions

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, and word_ids if whole words are masked."""
        row = _Row(self.tokenizer, self.room)
        with_words = self.collate.masker.rule.needs_words
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, with_words):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                start = 0
                while start < len(document.ids):
                    start = row.add(document, start)
                    if start < len(document.ids) or not self.options.cross_documents:
                        yield self._example(row)
                        row = _Row(self.tokenizer, self.room)
        if row.size:
            yield self._example(row)

    def _example(self, row: "_Row") -> Example:
        example: Example = {"input_ids": self.template.fill(np.concatenate(row.ids))}
        if self.collate.masker.rule.needs_words:
            example["word_ids"] = self.template.fill_words(np.concatenate(row.word_ids))
        return example


class _Row:
    """A row under construction.

    Args:
        tokenizer: Its separator goes between documents.
        room: Maximum number of tokens, without the special tokens around them.

    Attributes:
        ids, word_ids: The row's parts.
        size: Number of tokens, separators included.

    Raises:
        CtxError: The tokenizer has no separator.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, room: int) -> None:
        if tokenizer.sep_token_id is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no separator token to put between two documents of a row.",
                hint="tokenizer.add_special_tokens({'sep_token': '</s>'}), and resize the model's embeddings.",
            )
        self.separator, self.room, self.size = tokenizer.sep_token_id, room, 0
        self.ids: list[np.ndarray] = []
        self.word_ids: list[np.ndarray] = []

    def add(self, document: TokenizedDocument, start: int) -> int:
        """Append the sentences of a document from token `start` on that fit; returns the token after them.

        A sentence that does not fit into an empty row is cut.
        """
        separated = 1 if self.size else 0
        stop = _last_end(document.bounds, start, start + self.room - self.size - separated)
        if stop == start:
            if self.size:
                return start
            stop = start + self.room
        if separated:
            self._append(np.array([self.separator], dtype=np.int32), np.array([NO_WORD], dtype=np.int32))
        words = None if document.word_ids is None else document.word_ids[start:stop]
        self._append(document.ids[start:stop], words)
        return stop

    def _append(self, ids: np.ndarray, word_ids: np.ndarray | None) -> None:
        self.ids.append(ids)
        self.size += len(ids)
        if word_ids is not None:
            self.word_ids.append(word_ids)


def _last_end(bounds: np.ndarray, start: int, limit: int) -> int:
    """The last end of a sentence in (start, limit], or `start` if there is none."""
    end = int(bounds[np.searchsorted(bounds, limit, side="right") - 1]) if limit > 0 else 0
    return max(start, end)
