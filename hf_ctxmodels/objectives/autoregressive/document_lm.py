"""Causal language modelling on rows of documents (Radford et al. 2018, section 3.1; Radford et al. 2019, section 2)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.autoregressive.causal_lm import DataCollatorForCausalLM
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.components.packing import pack_rows
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches


@dataclass(frozen=True)
class DocumentLMOptions:
    """Options of `DocumentLM`."""

    packing: bool = flag(
        False, "Whole documents in a row, without attention between them; False: documents are joined and cut."
    )


class DocumentLM(Objective):
    """Predict each token from the tokens before it, in full rows of documents.

    The separator, the tokenizer's `eos_token`, stands before and after every document, so that a document's first token
    and its end are targets too. Documents are joined and cut into rows of `max_length` tokens: a row's last token
    predicts the first one of the next row, and every token is a target once. With `packing` a row holds several
    documents, each a sequence that sees only itself (`sequence_ids`); a document that is longer than a row becomes
    several sequences, each beginning with the last token of the one before.

    | document | row | targets |
    |---|---|---|
    | text | `max_length` tokens of joined documents | every token |
    | text, `packing` | `sep A sep` `sep B sep` ... as sequences | every token but the first of a sequence |

    References: Radford et al. 2018, section 3.1; Radford et al. 2019, section 2; Brown et al. 2020, appendix B: rows of
    joined documents, with a special token between them.
    Related: `CausalLM` cuts rows for recurrent models, which carry their state from row to row.

    Example:
        >>> DocumentLM(tokenizer, max_length=1024, seed=0, packing=True)
    """

    auto_class = "AutoModelForCausalLM"
    Options: ClassVar[type] = DocumentLMOptions
    collate: DataCollatorForCausalLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if tokenizer.eos_token_id is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no eos_token, which separates documents.",
                hint="tokenizer.add_special_tokens({'eos_token': '<|endoftext|>'}), and resize the model's embeddings.",
            )
        if max_length < 2:
            raise CtxError(f"max_length={max_length} leaves no token to be predicted.", hint="use 2 or more.")
        self.separator = int(tokenizer.eos_token_id)
        self.baseline = replace(self.baseline, excluded_ids=sorted({int(tokenizer.pad_token_id)} - {self.separator}))
        self.collate = DataCollatorForCausalLM(tokenizer)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and following, or with sequence_ids when packed."""
        texts = self._texts(documents)
        return pack_rows(self._windows(texts), self.max_length) if self.options.packing else self._joined(texts)

    def _texts(self, documents: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """(tokens,) ids of each document that has any, without special tokens."""
        for batch in document_batches(documents):
            texts = [" ".join(document) for document in batch]
            encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            rows = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
            self.statistics.update(
                documents=len(batch),
                sentences=sum(map(len, batch)),
                tokens=sum(map(len, rows)),
                words=sum(len(text.split()) for text in texts),
            )
            yield from filter(len, rows)

    def _joined(self, texts: Iterable[np.ndarray]) -> Iterator[Example]:
        """Rows of `max_length` tokens, the last one shorter, each with the token that follows it."""
        rest = np.array([self.separator], dtype=np.int32)
        for text in texts:
            rest, start = np.concatenate([rest, text, [self.separator]], dtype=np.int32), 0
            while start + self.max_length < len(rest):
                stop = start + self.max_length
                yield {"input_ids": rest[start:stop], "following": int(rest[stop])}
                start = stop
            rest = rest[start:]
        if len(rest) > 1:
            yield {"input_ids": rest[:-1], "following": int(rest[-1])}

    def _windows(self, texts: Iterable[np.ndarray]) -> Iterator[dict[str, np.ndarray | int]]:
        """The sequences of each document."""
        for text in texts:
            whole = np.concatenate([[self.separator], text, [self.separator]], dtype=np.int32)
            for start in range(0, len(whole) - 1, self.max_length - 1):
                yield {"input_ids": whole[start : start + self.max_length]}
