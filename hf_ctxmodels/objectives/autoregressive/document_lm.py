"""Causal language modelling on documents (Radford et al. 2018, section 3.1; Radford et al. 2019, section 2)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_ctxmodels.core.flags import check_at_least, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import required_token
from hf_ctxmodels.objectives.autoregressive.causal_lm import DataCollatorForCausalLM, TokenStream
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.components.tokenized_documents import pack_sequences


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
        check_at_least(2, max_length=self.max_length)
        self.separator = required_token(self.tokenizer, "eos_token", "separates documents")
        excluded = sorted({int(self.tokenizer.pad_token_id)} - {self.separator})
        self.baseline = replace(self.baseline, excluded_ids=excluded)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids and following, or with sequence_ids when packed."""
        texts = (text for batch in self.joined_batches(documents) for text in batch if len(text))
        return pack_sequences(self._windows(texts), self.max_length) if self.packing else self._joined(texts)

    def _joined(self, texts: Iterable[np.ndarray]) -> Iterator[Example]:
        """Examples of `max_length` tokens, the last one shorter, each with the following token."""
        stream = TokenStream(self.max_length, [self.separator])
        for text in texts:
            for ids, following in stream.add(np.append(text, self.separator)):
                yield {"input_ids": ids, "following": following}
        if len(stream.remaining) > 1:
            yield {"input_ids": stream.remaining[:-1], "following": int(stream.remaining[-1])}

    def _windows(self, texts: Iterable[np.ndarray]) -> Iterator[Example]:
        """The sequences of each document."""
        for text in texts:
            tokens = np.concatenate([[self.separator], text, [self.separator]], dtype=np.int32)
            for start in range(0, len(tokens) - 1, self.max_length - 1):
                yield {"input_ids": tokens[start : start + self.max_length]}
