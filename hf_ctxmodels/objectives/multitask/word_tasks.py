"""Word-aware tasks (Sun et al. 2020, section 4.2.1)."""

from collections.abc import Iterator, Sequence

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument, row_bounds
from hf_ctxmodels.objectives.multitask.task import WORD, DocumentTask, TaskRow


class KnowledgeMasking(DocumentTask):
    """Predict masked words, phrases and entities; the collator draws them. A row holds whole sentences of a
    document."""

    name = "knowledge_masking"
    kind = WORD

    def rows(
        self, document: TokenizedDocument, others: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskRow]:
        """See `DocumentTask.rows`."""
        for start, stop in row_bounds(document, self.room):
            words = None if document.word_ids is None else (document.word_ids[start:stop],)
            yield TaskRow((document.ids[start:stop],), words=words)


class Capitalization(DocumentTask):
    """Predict for each token whether the first letter of its word is a capital. Numbers, punctuation and letters
    without case have no target. The tokenizer must lower-case, else the input tells."""

    name = "capitalization"
    kind = WORD
    of_tokens = True

    def rows(
        self, document: TokenizedDocument, others: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskRow]:
        """See `DocumentTask.rows`."""
        assert document.capitals is not None
        targets = np.where(document.capitals < 0, IGNORE_INDEX, document.capitals.astype(np.int64))
        for start, stop in row_bounds(document, self.room):
            yield TaskRow((document.ids[start:stop],), (targets[start:stop],))


class TokenDocumentRelation(DocumentTask):
    """Predict for each token of a segment whether it is in another segment of the document, too.

    Segments are the rows of a document, at most half of it long, so that there are two at least. A document of one
    token makes none.
    """

    name = "token_document"
    kind = WORD
    of_tokens = True

    def rows(
        self, document: TokenizedDocument, others: Sequence[TokenizedDocument], rng: np.random.Generator
    ) -> Iterator[TaskRow]:
        """See `DocumentTask.rows`."""
        ids = document.ids
        if len(ids) < 2:
            return
        for start, stop in row_bounds(document, min(self.room, len(ids) // 2)):
            elsewhere = np.concatenate([ids[:start], ids[stop:]])
            yield TaskRow((ids[start:stop],), (np.isin(ids[start:stop], elsewhere).astype(np.int64),))
