"""Causal language modelling on documents (Radford et al. 2018, section 3.1; Radford et al. 2019, section 2)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.autoregressive.causal_lm import DataCollatorForCausalLM
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.components.packing import pack_sequences
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches


@dataclass
class DocumentLM(DataCollatorForCausalLM, Objective):
    """Predict each token from its predecessors, in full sequences of documents.

    The separator, the tokenizer's `eos_token`, precedes and follows every document, so that a document's first token
    and its end are targets as well. Documents are joined and cut into sequences of `max_length` tokens: the last token
    predicts the first one of the next sequence, and every token is a target once. With `packing` an example consists of
    several documents that do not attend to each other (`sequence_ids`); a document longer than an example becomes
    several sequences, each beginning with the last token of the previous one.

    | document | example | targets |
    |---|---|---|
    | text | `max_length` tokens of joined documents | every token |
    | text, `packing` | `sep A sep` `sep B sep` ... as sequences | every token but the first of a sequence |

    References: Radford et al. 2018, section 3.1; Radford et al. 2019, section 2; Brown et al. 2020, appendix B: joined
    documents with a special token between them.
    Related: `CausalLM` cuts sequences for recurrent models, which carry their state between examples.

    Example:
        >>> DocumentLM(tokenizer, max_length=1024, seed=0, packing=True)
    """

    auto_class = "AutoModelForCausalLM"
    packing: bool = flag(
        False, "Whole documents in a sequence, without attention between them; False: documents are joined and cut."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer.eos_token_id is None:
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no eos_token, which separates documents.",
                hint="call tokenizer.add_special_tokens({'eos_token': '<|endoftext|>'}), and resize the model's "
                "embeddings.",
            )
        if self.max_length < 2:
            raise CtxError(f"max_length={self.max_length} leaves no token to predict.", hint="use 2 or more.")
        self.separator = int(self.tokenizer.eos_token_id)
        excluded = sorted({int(self.tokenizer.pad_token_id)} - {self.separator})
        self.baseline = replace(self.baseline, excluded_ids=excluded)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids and following, or with sequence_ids when packed."""
        texts = self._texts(documents)
        return pack_sequences(self._windows(texts), self.max_length) if self.packing else self._joined(texts)

    def _texts(self, documents: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """(tokens,) ids of each non-empty document, without special tokens."""
        for batch in document_batches(documents):
            texts = [" ".join(document) for document in batch]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            tokenized = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
            self.statistics.update(
                documents=len(batch),
                sentences=sum(map(len, batch)),
                tokens=sum(map(len, tokenized)),
                words=sum(len(text.split()) for text in texts),
            )
            yield from filter(len, tokenized)

    def _joined(self, texts: Iterable[np.ndarray]) -> Iterator[Example]:
        """Examples of `max_length` tokens, the last one shorter, each with the following token."""
        remaining = np.array([self.separator], dtype=np.int32)
        for text in texts:
            remaining, start = np.concatenate([remaining, text, [self.separator]], dtype=np.int32), 0
            while start + self.max_length < len(remaining):
                stop = start + self.max_length
                yield {"input_ids": remaining[start:stop], "following": int(remaining[stop])}
                start = stop
            remaining = remaining[start:]
        if len(remaining) > 1:
            yield {"input_ids": remaining[:-1], "following": int(remaining[-1])}

    def _windows(self, texts: Iterable[np.ndarray]) -> Iterator[dict[str, np.ndarray | int]]:
        """The sequences of each document."""
        for text in texts:
            tokens = np.concatenate([[self.separator], text, [self.separator]], dtype=np.int32)
            for start in range(0, len(tokens) - 1, self.max_length - 1):
                yield {"input_ids": tokens[start : start + self.max_length]}
