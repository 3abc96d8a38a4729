"""Masked tokens of sequences with four attention patterns (Dong et al. 2019, "UniLM")."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import required_token
from hf_ctxmodels.objectives.masking import SkipgramRule
from hf_ctxmodels.objectives.sentence_pairs import (
    CONTINUATION,
    RANDOM,
    LabeledSegments,
    RandomSegment,
    Segment,
    SentencePairCollator,
    SentencePairs,
    end_of_target,
    random_split,
)
from hf_ctxmodels.objectives.tokenized_documents import TokenizedDocument

ATTENTION_PATTERNS = ("bidirectional", "sequence_to_sequence", "left_to_right", "right_to_left")

# Labels of `LabeledSegments` for the other attention patterns, and their token types.
SEQUENCE_TO_SEQUENCE, LEFT_TO_RIGHT, RIGHT_TO_LEFT = -1, -2, -3
_TOKEN_TYPES = {SEQUENCE_TO_SEQUENCE: (4, 5), LEFT_TO_RIGHT: (2, 2), RIGHT_TO_LEFT: (3, 3)}


@dataclass
class DataCollatorForUnifiedLM(SentencePairCollator):
    """Masks sequences as `DataCollatorForMaskedLM` does, but selects runs of tokens by `SkipgramRule`, and adds
    `next_sentence_label`.

    Each feature holds, in addition to the columns of `DataCollatorForMaskedLM`:
        token_type_ids: (tokens,), which determine the attention pattern.
        next_sentence_label: Of a bidirectional pair; -100 of other sequences; returned as (batch,).
    """

    label, label_classes = "next_sentence_label", {"random_next": RANDOM}
    rule_class = SkipgramRule

    ngram: int = field(default=1, init=False)
    skipgram_probability: float = flag(0.2, "Probability of a run of several tokens instead of a single one.")
    skipgram_size: int = flag(3, "Maximum length of a run in tokens.")


@dataclass
class UnifiedLM(DataCollatorForUnifiedLM, SentencePairs):
    """UniLM's objective: predict masked tokens of sequences with four attention patterns.

    The pattern is sampled by the shares, and the token types represent it. A bidirectional sequence is a pair as for
    next-sentence prediction, with its label. A source and its target are two neighboring segments of a document, both
    with masked tokens; a single sentence is split at a random token. Examples are filled as in `SentencePairs`.

    | example | token types | a token attends to |
    |---|---|---|
    | `[CLS] A [SEP] B [SEP]`, bidirectional | 0, 1 | all |
    | `[CLS] A [SEP] B [SEP]`, sequence to sequence | 4, 5 | in A all of A; in B all of A, and B up to itself |
    | `[CLS] A [SEP]`, left to right | 2 | its predecessors and itself |
    | `[CLS] A [SEP]`, right to left | 3 | itself and its successors |

    Targets are 15% of the tokens, selected one by one and with probability 0.2 in runs of two or three: 80% masked, 10%
    random, 10% unchanged. Requires at least two documents, unless no example is bidirectional.

    References: Dong et al. 2019 (arXiv 1905.03197), sections 2.3 and 2.4. The pretraining code was not released; tokens
    are selected as in the released fine-tuning code.
    Related: `MaskedLMWithNextSentence` has bidirectional pairs only; `MaskedSequenceToSequence` fine-tunes on pairs of
    source and target.

    Example:
        >>> UnifiedLM(tokenizer, max_length=512, seed=0, max_predictions=80)
    """

    bidirectional: float = flag(1 / 3, "Share of the examples that are bidirectional pairs.")
    sequence_to_sequence: float = flag(1 / 3, "Share of the examples that are a source and its target.")
    left_to_right: float = flag(1 / 6, "Share of the examples read from left to right.")
    right_to_left: float = flag(1 / 6, "Share of the examples read from right to left.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares = np.array([getattr(self, pattern) for pattern in ATTENTION_PATTERNS])
        if self.shares.min() < 0 or abs(self.shares.sum() - 1) > 1e-6:
            shares = ", ".join(f"{pattern}={share:g}" for pattern, share in zip(ATTENTION_PATTERNS, self.shares))
            raise CtxError(f"{shares} are not shares of a whole.", hint="use non-negative numbers with a sum of 1.")
        self.samples_other_documents = bool(self.shares[0] > 0)
        self.config_fields = generation_config_fields(self.tokenizer, self.tokenizer.mask_token_id)

    def segment_pairs(
        self, document: TokenizedDocument, target: int, random_segment: RandomSegment, rng: np.random.Generator
    ) -> Iterator[LabeledSegments]:
        """The examples of a document; the label is the attention pattern, or the label of a bidirectional pair."""
        start = 0
        while start < len(document):
            stop = end_of_target(document, start, target)
            split = random_split(start, stop, rng)
            first, second = Segment.of(document, start, split), Segment.of(document, split, stop)
            text = Segment.of(document, start, stop)
            pattern = ATTENTION_PATTERNS[int(rng.choice(len(ATTENTION_PATTERNS), p=self.shares / self.shares.sum()))]
            if pattern == "bidirectional" and (not len(second) or rng.random() < 0.5):
                yield LabeledSegments((first, random_segment(target - len(first))), RANDOM)
                stop = split
            elif pattern == "bidirectional":
                yield LabeledSegments((first, second), CONTINUATION)
            elif pattern == "sequence_to_sequence" and len(text) > 1:
                if not len(second):
                    middle = text.start + int(rng.integers(1, len(text)))
                    first, second = Segment(document, text.start, middle), Segment(document, middle, text.stop)
                yield LabeledSegments((first, second), SEQUENCE_TO_SEQUENCE)
            else:
                yield LabeledSegments((text,), RIGHT_TO_LEFT if pattern == "right_to_left" else LEFT_TO_RIGHT)
            start = stop

    def example(self, pair: LabeledSegments, rng: np.random.Generator) -> Example:
        """The example of a pair, with the token types of its attention pattern."""
        token_types = _TOKEN_TYPES.get(pair.label)
        if token_types is None:
            return super().example(pair, rng)
        example = super().example(pair._replace(label=IGNORE_INDEX), rng)
        example["token_type_ids"] = np.asarray(token_types, dtype=np.uint8)[example["token_type_ids"]]
        return example

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking and the pairs, and examples of each attention pattern."""
        types = batch["token_type_ids"].amax(1)
        patterns = {
            "bidirectional": types <= 1,
            "sequence_to_sequence": types >= 4,
            "left_to_right": types == 2,
            "right_to_left": types == 3,
        }
        return {**super().count_batch(batch), **{name: int(examples.sum()) for name, examples in patterns.items()}}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, the pairs and the attention patterns."""
        shares = {f"{name}_share": counts[name] / max(1, counts["examples"]) for name in ATTENTION_PATTERNS}
        return {**super().rates(counts), **shares}


def generation_config_fields(tokenizer: PreTrainedTokenizerBase, query_id: int | None) -> dict[str, Any]:
    """Configuration fields of an encoder that generates; raises CtxError if the tokenizer lacks a token. `query_id` is
    the token whose output predicts a target; None for the mask token."""
    use = "the generation of targets requires"
    return {
        "query_token_id": required_token(tokenizer, "mask_token", use) if query_id is None else query_id,
        "decoder_start_token_id": required_token(tokenizer, "cls_token", use),
        "eos_token_id": required_token(tokenizer, "sep_token", use),
    }
