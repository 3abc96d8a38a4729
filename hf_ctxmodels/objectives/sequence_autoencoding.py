"""Sequence auto-encoding: a text predicts itself (Dai & Le 2015, section 2)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, required_token
from hf_ctxmodels.objectives.base import Objective, target_rates
from hf_ctxmodels.objectives.tokenized_documents import document_batches, encode_ids


@dataclass
class DataCollatorForSequenceAutoencoding(PaddingCollator):
    """Repeats every text, with an end token after each copy; the second copy and its end are targets.

    Each feature holds:
        input_ids: (words,) of a text, its end token last.

    Returns, padded on the tokenizer's side, for texts of at most n words including the end token:
        input_ids, attention_mask: (batch, 2 n - 1) a text, its end, and the text.
        labels: (batch, 2 n) the same with the last end; -100 outside the second copy and its end. One longer than the
            input, since `ForCausalLM` also predicts the word after the input.
    """

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Repeat and pad features; see the class for their columns and the returned ones."""
        texts = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        sequences = [np.append(text, text[:-1]) for text in texts]
        targets = [np.append(np.full(len(text) - 1, IGNORE_INDEX), text) for text in texts]
        padder, batch = self.pad_inputs(sequences)
        batch["labels"] = torch.nn.functional.pad(padder.pad(targets, IGNORE_INDEX), (1, 0), value=IGNORE_INDEX)
        return batch


@dataclass
class SequenceAutoencoding(DataCollatorForSequenceAutoencoding, Objective):
    """Predict a text from itself: a language model predicts a second copy of the text after it.

    The loss is over the second copy. A text of more than (max_length - 1) / 2 words is split into parts, each with
    an end token.

    | document | example | targets |
    |---|---|---|
    | text (or, with `by_sentence`, each sentence) | `text <eos> text` | the second copy and its `<eos>` |

    References: Dai & Le 2015 (arXiv 1511.01432), section 2.
    Related: `CausalLM`, which the paper compares with it (section 3).

    Example:
        >>> SequenceAutoencoding(tokenizer, max_length=400, seed=0, by_sentence=True)
    """

    auto_class = "AutoModelForCausalLM"
    predicts_special_tokens = True
    by_sentence: bool = flag(False, "Make an example of each sentence instead of each document.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_length", at_least=3)
        self.max_words = (self.max_length - 1) // 2
        self.end = required_token(self.tokenizer, "eos_token", "ends both copies of a text")
        self.config_fields = {"stateful": False, "eos_token_id": self.end}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, including the end token."""
        for batch in document_batches(documents):
            texts = [sentence for document in batch for sentence in document]
            if not self.by_sentence:
                texts = [" ".join(document) for document in batch]
            self.statistics.update(documents=len(batch), sentences=sum(map(len, batch)))
            for words in encode_ids(self.tokenizer, texts):
                self.statistics.update(tokens=len(words))
                for start in range(0, len(words), self.max_words):
                    yield {"input_ids": np.append(words[start : start + self.max_words], np.int32(self.end))}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and targets per example."""
        return {**target_rates(counts), "targets_per_example": counts["targets"] / max(1, counts["examples"])}
