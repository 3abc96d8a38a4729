"""Span masking with the span boundary objective (Joshi et al. 2020, "SpanBERT", section 3)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.inputs import span_boundaries
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.seeding import Stream, generator
from hf_ctxmodels.objectives.base import Batch, check_at_least
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, MaskingRule, SpanMaskingRule, masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches
from hf_ctxmodels.objectives.masked.masked_lm import DataCollatorForMaskedLM, MaskedLM, SelectionOptions

ROWS_PER_SAMPLE = 1000  # rows whose tokens a row's random replacements are drawn from


@dataclass
class DataCollatorForSpanBoundary(DataCollatorForMaskedLM):
    """Masks spans of whole words, and repeats the targets of the span boundary objective.

    The selected share is rounded up and spent exactly (`anchored_spans`); spans that overlap or touch are one. All
    tokens of a span become the mask token (80%), random tokens (10%) or stay (10%) together.

    The boundary targets of a span are its first `max_pair_targets` tokens. A span beside a special token ([CLS], [SEP])
    has none: a boundary is the token before or after the span, and must be one of the text.

    Each feature holds:
        input_ids, example_index, epoch: As in `DataCollatorForMaskedLM`.
        word_ids: (tokens,); None or -1 for special tokens.
        replacement_ids: With `corpus_replacements`, ids drawn from the text, from which random tokens are taken.
        attention_mask, token_type_ids, sequence_ids: (tokens,), optional, padded and returned.

    Returns: what the masking collator returns, and, unless `boundary` is off, boundary_labels (batch, width) int64: the
    targets of the span boundary objective, -100 elsewhere.

    Args:
        geometric_p, max_span: See `SpanMaskingRule`.
        boundary: Whether to return boundary_labels.
        max_pair_targets: Boundary targets of a span.
        corpus_replacements: Random tokens have the frequencies of the text; otherwise they are uniform.
    """

    whole_word: bool = field(default=True, init=False)
    ngram: int = field(default=1, init=False)
    geometric_p: float = 0.2
    max_span: int = 10
    boundary: bool = True
    max_pair_targets: int = 15
    corpus_replacements: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, max_pair_targets=self.max_pair_targets)

    def rule(self) -> MaskingRule:
        """The rule of these arguments."""
        return SpanMaskingRule(
            probability=self.mlm_probability,
            mask_share=self.mask_share,
            random_share=self.random_share,
            max_predictions=self.max_predictions,
            geometric_p=self.geometric_p,
            max_span=self.max_span,
        )

    def replacements(self, feature: dict[str, Any]) -> np.ndarray | None:
        """See `DataCollatorForMaskedLM.replacements`."""
        if not self.corpus_replacements:
            return None
        if "replacement_ids" not in feature:
            raise CtxError(
                "A feature has no `replacement_ids`, from which random tokens are taken.",
                hint="make the rows with SpanBoundary.examples(documents), or use corpus_replacements=False.",
            )
        return np.asarray(feature["replacement_ids"])

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        batch = super().torch_call(features)
        if self.boundary:
            batch["boundary_labels"] = self.boundary_targets(batch["input_ids"], batch["labels"])
        return batch

    def boundary_targets(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(batch, width) the labels at the first tokens of spans between two tokens of the text, -100 elsewhere."""
        text = torch.from_numpy(self.masker.non_special.table)[input_ids] | (input_ids == self.tokenizer.unk_token_id)
        text = torch.nn.functional.pad(text, (1, 1))  # no token before the first and after the last
        before, after = span_boundaries(labels != IGNORE_INDEX)
        between = text.gather(1, before + 1) & text.gather(1, after + 1)
        number = torch.arange(labels.shape[1]) - before  # 1 at the first token of a span
        return labels.where(between & (number <= self.max_pair_targets), IGNORE_INDEX)


@dataclass(frozen=True)
class SpanBoundaryOptions(SelectionOptions):
    """Options of `SpanBoundary`; see the collator."""

    geometric_p: float = flag(0.2, "Parameter of the geometric distribution of span lengths in words.")
    max_span: int = flag(10, "Longest span of words.")
    boundary: bool = flag(True, "Add the span boundary objective; False: span masking alone.")
    max_pair_targets: int = flag(15, "Tokens of a span that the boundary objective predicts, from its start.")
    corpus_replacements: bool = flag(True, "Random tokens have the frequencies of the text; False: uniform.")
    packing: bool = flag(False, "Pack several short documents into one row, without attention between them.")


class SpanBoundary(MaskedLM):
    """SpanBERT's objective: predict masked spans, each token from its context, and again from the span's boundaries.

    Rows are those of `MaskedLM`: one segment of whole sentences of one document, as many as fit. (The release drops a
    sentence longer than a row; here it is cut and continued.) Spans are drawn until 15% of a row's tokens are selected:
    a length in words from the geometric distribution, cut at ten and renormalised (mean 3.8), and a token whose word is
    the first. The budget may cut the last span within a word.

    The boundary objective predicts each token of a span from three vectors: the states of the tokens before and after
    the span, and an embedding of the token's position in it.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] sentences [SEP]` | 15% of the tokens, in spans, by the masked-LM head |
    | | | of a span inside the text, the first 15 tokens, by the span boundary head |

    Random replacements are drawn from the tokens of the thousand rows that are made together, which keeps the draws
    independent of workers and of resuming.

    References: Joshi et al. 2020 (arXiv 1907.10529), section 3; `masking.py` of its release.
    Related: `MaskedLM` with `ngram` selects shorter runs, each token with a replacement of its own.

    Example:
        >>> SpanBoundary(tokenizer, max_length=512, seed=0, boundary=False)  # span masking alone
    """

    auto_class = "AutoModelForPreTraining"
    Options: ClassVar[type] = SpanBoundaryOptions
    Collator = DataCollatorForSpanBoundary
    collate: DataCollatorForSpanBoundary

    @property
    def config_fields(self) -> dict[str, Any]:
        """The rows of the boundary head's position table."""
        return {"max_pair_targets": self.options.max_pair_targets} if self.options.boundary else {}

    @property
    def immutable_config_fields(self) -> tuple[str, ...]:
        """See `Objective.immutable_config_fields`."""
        return tuple(self.config_fields)

    def _rows(self, documents: Iterable[list[str]], pass_index: int) -> Iterator[Example]:
        rows = super()._rows(documents, pass_index)
        if not self.options.corpus_replacements:
            yield from rows
            return
        masker, number = self.collate.masker, 0
        for made_together in document_batches(rows, ROWS_PER_SAMPLE):  # type: ignore[type-var]
            ids = np.concatenate([row["input_ids"] for row in made_together])  # type: ignore[call-overload]
            text = ids[masker.non_special.candidates(ids)]
            text = text if len(text) else masker.non_special.ids.astype(ids.dtype)
            for row in made_together:
                draws = generator(self.seed, pass_index, number, Stream.PAIRING)
                budget = masker.rule.budget(len(row["input_ids"]))  # type: ignore[call-overload, index, arg-type]
                row["replacement_ids"] = draws.choice(text, max(1, budget))  # type: ignore[call-overload]
                yield row  # type: ignore[misc]
                number += 1

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        targets = batch.get("boundary_labels")
        counted = 0 if targets is None else int((targets != IGNORE_INDEX).sum())
        return {**self.collate.masker.count(batch), "boundary_targets": counted}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; "boundary_share" is of the selected tokens."""
        return {
            **masking_rates(counts),
            "boundary_share": counts["boundary_targets"] / max(1, counts["selected_tokens"]),
        }
