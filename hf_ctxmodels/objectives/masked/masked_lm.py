"""Masked language modelling (Devlin et al. 2019, section 3.1, task 1; dynamic masks: Liu et al. 2019, section 4.1)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.objectives.base import Batch, Objective, collator_options
from hf_ctxmodels.objectives.components.features import feature_generator, feature_word_ids, padded_columns
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, MaskingRule, TokenMasker, masking_rates
from hf_ctxmodels.objectives.components.packing import pack_rows
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    RowTemplate,
    TokenizedDocument,
    row_bounds,
    tokenized_batches,
)


@dataclass
class DataCollatorForMaskedLM(PaddingCollator):
    """Pads a batch and masks it: 15% of the non-special tokens, of which 80% -> mask token, 10% -> random, 10% kept.

    Unlike `transformers.DataCollatorForLanguageModeling` it selects exactly the rounded share of a row's tokens, at
    least one; applies 80/10/10 to whole words too; and seeds the mask of example i in epoch e by (seed, e, i) only.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        example_index, epoch: Integers that seed the mask.
        word_ids: (tokens,), needed with `whole_word` or `ngram`; None or -1 for special tokens.
        attention_mask, token_type_ids, sequence_ids: (tokens,), optional, padded and returned.

    Returns: input_ids, attention_mask, labels (batch, width) int64, labels -100 where nothing is predicted; and
    token_type_ids and sequence_ids if the features hold them.

    Args:
        tokenizer: With a mask token and a padding token.
        mlm_probability, mask_share, random_share, whole_word, ngram, max_predictions: See `MaskingRule`.
        mlm_smoothing: `MaskingRule.smoothing`; `masker.weigh` takes the counts that it needs.
        static: The same mask in every epoch.
        seed: Seed of the masks.
        pad_to_multiple_of: Round the width of the batch up.

    Raises:
        CtxError: A feature lacks a field, or holds ids outside the tokenizer's vocabulary.

    Example:
        >>> collate = DataCollatorForMaskedLM(tokenizer, seed=1)
        >>> batch = collate([{"input_ids": tokenizer("a cat sat").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
    """

    mlm_probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_word: bool = False
    ngram: int = 1
    max_predictions: int | None = None
    static: bool = False
    seed: int = 0
    pad_to_multiple_of: int | None = None
    mlm_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.masker = TokenMasker(self.tokenizer, self.rule())

    def rule(self) -> MaskingRule:
        """The rule of these arguments."""
        return MaskingRule(
            probability=self.mlm_probability,
            mask_share=self.mask_share,
            random_share=self.random_share,
            whole_word=self.whole_word,
            ngram=self.ngram,
            max_predictions=self.max_predictions,
            smoothing=self.mlm_smoothing,
        )

    def replacements(self, feature: dict[str, Any]) -> np.ndarray | None:
        """The ids that a row's random tokens are drawn from; None for the vocabulary's."""
        return None

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        corrupted, labels = [], []
        for feature, ids in zip(features, rows):
            rng = feature_generator(feature, self.seed, self.static)
            words = feature_word_ids(feature) if self.masker.rule.needs_words else None
            new_ids, targets = self.masker.mask(ids, words, rng, self.replacements(feature))
            corrupted.append(new_ids)
            labels.append(targets)
        padder = RowPadder([len(ids) for ids in rows], self.tokenizer.padding_side, self.pad_to_multiple_of)
        return {
            "input_ids": padder.pad(corrupted, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "labels": padder.pad(labels, IGNORE_INDEX),
            **padded_columns(features, ("attention_mask", "token_type_ids", "sequence_ids"), padder, self.tokenizer),
        }


@dataclass(frozen=True)
class SelectionOptions:
    """Options of all objectives that mask tokens or spans; see `MaskingRule`."""

    mlm_probability: float = flag(0.15, "Share of the tokens of a row to predict.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is kept.")
    max_predictions: int | None = flag(None, "Maximum number of predictions in a row.")
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")
    pad_to_multiple_of: int | None = flag(None, "Round the width of every batch up to a multiple of this.")

    def collator(self, kind: type, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
        """A collator of class `kind` with these options."""
        return kind(tokenizer, seed=seed, **collator_options(kind, self))


@dataclass(frozen=True)
class MaskingOptions(SelectionOptions):
    """Options of all objectives that mask tokens; see `MaskingRule`."""

    whole_word: bool = flag(False, "Mask all pieces of a word or none.")
    ngram: int = flag(1, "Mask runs of 1 to this many whole words, n of them with probability proportional to 1/n.")


@dataclass(frozen=True)
class MaskedLMOptions(MaskingOptions):
    """Options of `MaskedLM`."""

    mlm_smoothing: float = flag(
        0.0,
        "Predict rare tokens more often: with a probability proportional to their count in the training text to the "
        "power of minus this (DistilBERT: 0.7).",
    )
    packing: bool = flag(False, "Pack several short documents into one row, without attention between them.")


class MaskedLM(Objective):
    """Predict 15% of the tokens, most of them masked, from all others.

    A row holds whole sentences of one document, as many as fit. A sentence longer than a row is cut and continued in
    the next one; nothing is dropped. With `packing` short rows are joined into full ones, with `sequence_ids`.

    | document | row | targets |
    |---|---|---|
    | sentences | `[CLS] sentences [SEP]` | 15% of the tokens: 80% masked, 10% random, 10% unchanged |

    References: Devlin et al. 2019, section 3.1, task 1 alone; Liu et al. 2019, section 4.2, "DOC-SENTENCES".
    Related: `FullSentences` fills rows across documents; `MaskedLMWithNextSentence` and `MaskedLMWithSentenceOrder` add
    a second task; `ReplacedTokenDetection` trains a discriminator on the same masks.

    Example:
        >>> MaskedLM(tokenizer, max_length=128, seed=0, whole_word=True, packing=True)
    """

    auto_class = "AutoModelForMaskedLM"
    Options: ClassVar[type] = MaskedLMOptions
    Collator: ClassVar[type[DataCollatorForMaskedLM]] = DataCollatorForMaskedLM
    collate: DataCollatorForMaskedLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.template = RowTemplate(tokenizer, segments=1)
        self.room = self.template.room(max_length)
        self.collate = self.options.collator(self.Collator, tokenizer, seed)

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, word_ids if whole words are masked, and sequence_ids if rows are packed."""
        rows = self._rows(documents, pass_index)
        return pack_rows(rows, self.max_length) if self.options.packing else rows

    def _rows(self, documents: Iterable[list[str]], pass_index: int) -> Iterator[Example]:
        number = 0
        with_words = self.collate.masker.rule.needs_words
        for batch in tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, with_words):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
                for start, stop in row_bounds(document, self.room):
                    yield self._row(document, start, stop, pass_index, number)
                    number += 1

    def _row(self, document: TokenizedDocument, start: int, stop: int, pass_index: int, number: int) -> Example:
        """Tokens [start, stop) of a document as the `number`-th row of a pass."""
        row: Example = {"input_ids": self.template.fill(document.ids[start:stop])}
        if document.word_ids is not None:
            row["word_ids"] = self.template.fill_words(document.word_ids[start:stop])
        return row

    def check(self, examples: ExampleSet) -> None:
        """See `Objective.check`; counts the tokens for `mlm_smoothing`."""
        super().check(examples)
        if self.collate.masker.rule.smoothing:
            self.collate.masker.weigh(examples.columns["input_ids"].values)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        return self.collate.masker.count(batch)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return masking_rates(counts)
