"""Span masking with the span boundary objective (Joshi et al. 2020, "SpanBERT", section 3)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.core.inputs import span_boundaries
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.objectives.masked_lm import MaskingCollator, SingleSegmentObjective
from hf_ctxmodels.objectives.masking import SpanMaskingRule
from hf_ctxmodels.objectives.tokenized_documents import document_batches

EXAMPLES_PER_SAMPLE = 1000  # examples whose tokens are the random replacements of each of them


@dataclass
class DataCollatorForSpanBoundary(MaskingCollator):
    """Masks spans of whole words, and adds the targets of the span boundary objective.

    Exactly the share of the tokens, rounded up, is selected (`anchored_spans`); overlapping or adjacent spans are one.
    All tokens of a span become the mask token (80%), random tokens (10%) or stay unchanged (10%) together.

    The boundary targets of a span are its first `max_pair_targets` tokens. A span next to a special token ([CLS],
    [SEP]) has none: both boundaries, the tokens before and after the span, must be tokens of the text.

    Each feature holds, in addition to the columns of `DataCollatorForMaskedLM`, of which word_ids are required:
        replacement_ids: With `corpus_replacements`, ids sampled from the text, from which random tokens are sampled.

    Returns: what `DataCollatorForMaskedLM` returns and, with `boundary`, boundary_labels (batch, width) int64: the
    targets of the span boundary objective, -100 elsewhere.
    """

    rule_class = SpanMaskingRule

    geometric_p: float = flag(0.2, "Parameter of the geometric distribution of span lengths in words.")
    max_span: int = flag(10, "Maximum span length in words.")
    boundary: bool = flag(True, "Add the span boundary objective; False: span masking alone.")
    max_pair_targets: int = flag(15, "Tokens of a span that the boundary objective predicts, from its start.")
    corpus_replacements: bool = flag(True, "Random tokens have the frequencies of the text; False: uniform.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_pair_targets", at_least=1)

    def replacements(self, feature: Mapping[str, Any]) -> np.ndarray | None:
        """The ids from which a sequence's random tokens are sampled; None for the non-special vocabulary."""
        if not self.corpus_replacements:
            return None
        if "replacement_ids" not in feature:
            raise CtxError(
                "A feature has no `replacement_ids`, from which random tokens are sampled.",
                hint="make the examples with SpanBoundary.examples(documents), or use corpus_replacements=False.",
            )
        return np.asarray(feature["replacement_ids"])

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask features; see the class for their columns and the returned ones."""
        batch = super().collate(features)
        if not self.boundary:
            return batch
        is_text = torch.from_numpy(self.masker.non_special.table)[batch["input_ids"]]
        is_text |= batch["input_ids"] == self.tokenizer.unk_token_id
        is_text = torch.nn.functional.pad(is_text, (1, 1))  # no token before the first and after the last
        before, after = span_boundaries(batch["labels"] != IGNORE_INDEX)
        is_inner = is_text.gather(1, before + 1) & is_text.gather(1, after + 1)
        number = torch.arange(is_inner.shape[1]) - before  # 1 at the first token of a span
        is_target = is_inner & (number <= self.max_pair_targets)
        batch["boundary_labels"] = batch["labels"].where(is_target, IGNORE_INDEX)
        return batch

    def count_batch(self, batch: Mapping[str, Tensor]) -> dict[str, int]:
        """Selected tokens, their replacements, and boundary targets of a batch."""
        targets = batch.get("boundary_labels")
        count = 0 if targets is None else int((targets != IGNORE_INDEX).sum())
        return {**super().count_batch(batch), "boundary_targets": count}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking; "boundary_share" is of the selected tokens."""
        boundary_share = counts["boundary_targets"] / max(1, counts["selected_tokens"])
        return {**super().rates(counts), "boundary_share": boundary_share}


@dataclass
class SpanBoundary(DataCollatorForSpanBoundary, SingleSegmentObjective):
    """SpanBERT's objective: predict masked spans, each token from its context, and again from the span's boundaries.

    Examples are the same as in `MaskedLM`. Spans are sampled until 15% of the tokens are selected: a length in words
    from the geometric distribution, truncated at ten and renormalized (mean 3.8), and a token whose word is the first.
    The budget may end the last span within a word.

    The boundary objective predicts each token of a span from the states of the tokens before and after the span, and an
    embedding of its position in the span.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] sentences [SEP]` | 15% of the tokens, in spans, by the masked-LM head |
    | | | the first 15 tokens of each span inside the text, by the span boundary head |

    Random replacements are sampled from the tokens of a thousand consecutive examples.

    References: Joshi et al. 2020 (arXiv 1907.10529), section 3; `masking.py` of its release.
    Related: `MaskedLM` with `ngram` selects shorter runs and samples the replacement of each token separately.

    Example:
        >>> SpanBoundary(tokenizer, max_length=512, seed=0, boundary=False)  # span masking alone
    """

    auto_class = "AutoModelForPreTraining"

    def __post_init__(self) -> None:
        super().__post_init__()
        # the size of the boundary head's position embeddings
        self.config_fields = {"max_pair_targets": self.max_pair_targets} if self.boundary else {}
        self.immutable_config_fields = tuple(self.config_fields)

    def sequences(self, documents: Iterable[list[str]], epoch: int) -> Iterator[Example]:
        """The examples before packing, with replacement_ids for `corpus_replacements`."""
        sequences = super().sequences(documents, epoch)
        if not self.corpus_replacements:
            yield from sequences
            return
        number = 0
        for examples in document_batches(sequences, EXAMPLES_PER_SAMPLE):
            ids = np.concatenate([np.asarray(example["input_ids"]) for example in examples])
            text = ids[self.masker.non_special.candidates(ids)]
            text = text if len(text) else self.masker.non_special.ids.astype(ids.dtype)
            for example in examples:
                rng = generator(self.seed, epoch, number, Purpose.PAIRING)
                budget = self.masker.rule.budget(len(np.asarray(example["input_ids"])))
                example["replacement_ids"] = rng.choice(text, max(1, budget))
                yield example
                number += 1
