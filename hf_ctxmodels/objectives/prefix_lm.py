"""Prefix language modeling with a decoder (Raffel et al. 2020, "T5", sections 3.2.1 and 3.2.3)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.data.padding import Batch, RowPadder
from hf_ctxmodels.objectives.causal_lm import DataCollatorForCausalLM, DocumentLM
from hf_ctxmodels.objectives.features import feature_generator


@dataclass
class DataCollatorForPrefixLM(DataCollatorForCausalLM):
    """Splits each sequence at a random token into a prefix, which is not predicted, and a target.

    Each feature holds the columns of `DataCollatorForCausalLM`, and `example_index` and `epoch`.

    Returns, padded on the tokenizer's side, in addition to the columns there:
        prefix_mask: (batch, words), 1 at the tokens of the prefix.
        labels: (batch, words + 1), -100 for the tokens of the prefix as well.
    """

    seed: int = 0

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Split and pad features; see the class for their columns and the returned ones."""
        batch = super().collate(features)
        prefixes = [self.prefix(feature) for feature in features]
        padder = RowPadder([len(prefix) for prefix in prefixes], self.tokenizer.padding_side)
        batch["prefix_mask"] = padder.pad(prefixes, 0)
        batch["labels"][:, :-1].masked_fill_(batch["prefix_mask"] == 1, IGNORE_INDEX)
        return batch

    def prefix(self, feature: dict[str, Any]) -> np.ndarray:
        """(words,) 1 at the tokens of the prefix: at least one token of each sequence, and not all that have a next
        token."""
        length = len(feature["input_ids"])
        rng = feature_generator(feature, self.seed)
        sequences = np.asarray(feature.get("sequence_ids", np.ones(length)), dtype=np.int64)
        starts = np.flatnonzero(np.diff(sequences, prepend=sequences[:1] - 1))
        prefix = np.zeros(length, dtype=np.int64)
        for start, stop in zip(starts, np.append(starts[1:], length)):
            has_following = stop == length and feature.get("following", IGNORE_INDEX) != IGNORE_INDEX
            longest = max(1, int(stop - start) - (not has_following))
            prefix[start : start + rng.integers(1, longest + 1)] = 1
        return prefix


@dataclass
class PrefixLM(DataCollatorForPrefixLM, DocumentLM):
    """Predict the rest of a text from its beginning, which a decoder reads in both directions.

    The examples are made as by `DocumentLM`. Each sequence is split at a random token, another one in each epoch: all
    tokens attend to the prefix, a token of the target also to its predecessors, and only the target is predicted. The
    model needs no encoder for the input of a task: `generate` encodes the prompt as a prefix (`prefix_lm` in the
    configuration).

    | document | example | targets |
    |---|---|---|
    | text | `max_length` tokens of joined documents, split into prefix and target | tokens of the target |
    | text, `packing` | whole documents, each split | tokens of the targets |

    References: Raffel et al. 2020, sections 3.2.1 (the mask), 3.2.2 ("decoder-only prefix LM") and 3.2.3; Liu et al.
    2018.
    Related: `DocumentLM` has no prefix; `SpanCorruption` with `variant=prefix-lm` trains an encoder-decoder;
    `UnifiedLM` has prefixes and masked tokens.

    Example:
        >>> PrefixLM(tokenizer, max_length=512, seed=0)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config_fields |= {"prefix_lm": True}
