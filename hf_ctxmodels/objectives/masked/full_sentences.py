"""Masked language modelling on whole sentences of one or more documents (Liu et al. 2019)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import required_token
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.components.tokenized_documents import NO_WORD, SpecialTokensTemplate
from hf_ctxmodels.objectives.masked.masked_lm import DataCollatorForMaskedLM


@dataclass
class FullSentences(DataCollatorForMaskedLM, Objective):
    """Dynamic masking of contiguous whole sentences that cross document boundaries; no second task.

    An example takes sentences in the order of the text while they fit. An extra separator between two documents,
    <s> A </s> B </s>, does not stop attention. A sentence longer than an example is cut and continued in the next one;
    nothing is dropped. Every epoch samples a new mask (section 4.1), unless `static` is set.

    | document | example | targets |
    |---|---|---|
    | sentences | `<s> sentences </s> sentences of the next document </s>` | 15% of the tokens |

    References: Liu et al. 2019 (arXiv 1907.11692), section 4.2, "FULL-SENTENCES"; with `cross_documents=False`,
    "DOC-SENTENCES".
    Related: `MaskedLM` makes the examples of "DOC-SENTENCES" and can pack them without attention across documents.

    Example:
        >>> FullSentences(tokenizer, max_length=512, seed=0)
    """

    auto_class = "AutoModelForMaskedLM"
    mlm_smoothing: float = field(default=0.0, init=False)  # RoBERTa samples uniformly
    cross_documents: bool = flag(
        True, "Continue an example with the next document after a separator; False: end it (DOC-SENTENCES)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.room = self.template.room(self.max_length)
        self.separator = required_token(self.tokenizer, "sep_token", "is inserted between two documents")

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids, and word_ids if whole words are masked."""
        ids: list[np.ndarray] = []
        words: list[np.ndarray] = []
        size = 0
        separator, no_word = np.array([self.separator], np.int32), np.array([NO_WORD], np.int32)
        for document in self.tokenized(documents, self.masker.rule.needs_words):
            start = 0
            while start < len(document.ids):
                # the end of the sentences that fit; one that does not fit into an empty example is cut
                limit = start + self.room - size - (size > 0)
                stop = int(document.bounds[max(0, int(np.searchsorted(document.bounds, limit, side="right")) - 1)])
                if stop <= start:
                    stop = start if size else start + self.room
                if stop > start:
                    if size:
                        ids.append(separator)
                        words.append(no_word)
                    ids.append(document.ids[start:stop])
                    if document.word_ids is not None:
                        words.append(document.word_ids[start:stop])
                    size += stop - start + (size > 0)
                    start = stop
                if start < len(document.ids) or not self.cross_documents:
                    yield self._example(ids, words)
                    ids, words, size = [], [], 0
        if size:
            yield self._example(ids, words)

    def _example(self, ids: list[np.ndarray], words: list[np.ndarray]) -> Example:
        example: Example = {"input_ids": self.template.fill(np.concatenate(ids))}
        if self.masker.rule.needs_words:
            example["word_ids"] = self.template.fill_words(np.concatenate(words))
        return example
