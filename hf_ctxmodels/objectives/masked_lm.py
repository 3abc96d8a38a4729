"""Masked language modeling (Devlin et al. 2019, section 3.1, task 1; dynamic masks and full sentences: Liu et al.
2019, sections 4.1 and 4.2)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import Batch, PaddingCollator, required_token
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.features import feature_generator, feature_word_ids, padded_columns
from hf_ctxmodels.objectives.masking import MaskingRule, TokenMasker, masking_rates
from hf_ctxmodels.objectives.tokenized_documents import (
    NO_WORD,
    SpecialTokensTemplate,
    TokenizedDocument,
    pack_sequences,
    sequence_bounds,
)


@dataclass
class MaskingCollator(PaddingCollator):
    """Base class of collators that pad a batch and mask it by a `MaskingRule`."""

    rule_class: ClassVar[type[MaskingRule]] = MaskingRule
    """The rule, whose fields are options of the collator."""

    mlm_probability: float = flag(0.15, "Share of the tokens of a sequence to predict.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is unchanged.")
    max_predictions: int | None = flag(None, "Maximum number of predictions in a sequence.")
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")
    static_masks: int = flag(
        0,
        "Number of masks of an example, which alternate over the epochs, as in BERT (10); 0: a new mask in each epoch.",
    )
    pad_to_multiple_of: int | None = flag(None, "Round the width of a batch up to a multiple of this.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "static_masks", at_least=0)
        if self.static and self.static_masks:
            raise CtxError(
                f"static and static_masks={self.static_masks} exclude each other.",
                hint="use static_masks alone; static is static_masks=1.",
            )
        self.masker = TokenMasker(self.tokenizer, self.rule_class.of(self))

    @property
    def mask_period(self) -> int | None:
        """Number of epochs after which masks repeat; None if they do not (Liu et al. 2019, section 4.1)."""
        return 1 if self.static else self.static_masks or None

    def replacements(self, feature: Mapping[str, Any]) -> np.ndarray | None:
        """The ids from which a sequence's random tokens are sampled; None for the non-special vocabulary."""
        return None

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Pad and mask features; see the class for their columns and the returned ones."""
        corrupted, labels = [], []
        for feature in features:
            rng = feature_generator(feature, self.seed, period=self.mask_period)
            words = feature_word_ids(feature) if self.masker.rule.needs_words else None
            ids = np.asarray(feature["input_ids"])
            corrupted_ids, targets = self.masker.mask(ids, words, rng, self.replacements(feature))
            corrupted.append(corrupted_ids)
            labels.append(targets)
        padder, inputs = self.pad_inputs(corrupted, self.pad_to_multiple_of)
        return {
            **inputs,
            "labels": padder.pad(labels, IGNORE_INDEX),
            **padded_columns(features, ("attention_mask", "token_type_ids", "sequence_ids"), padder, self.tokenizer),
        }

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Maskable and selected tokens of a batch, and their replacements."""
        return self.masker.count_batch(batch)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of selected, masked, random and unchanged tokens."""
        return masking_rates(counts)


@dataclass
class DataCollatorForMaskedLM(MaskingCollator):
    """Pads a batch and masks it: of 15% of the non-special tokens, 80% -> mask token, 10% -> random, 10% unchanged.

    Unlike `transformers.DataCollatorForLanguageModeling` it selects exactly the rounded share of a sequence's tokens,
    at least one, replaces whole words as well, and seeds the mask of example i in epoch e by (seed, e, i) only.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        word_ids: (tokens,), required with `whole_word` or `ngram`; None or -1 for special tokens.
        attention_mask, token_type_ids, sequence_ids: (tokens,), optional, padded and returned.

    Returns: input_ids, attention_mask, labels (batch, width) int64, labels -100 where nothing is predicted; and
    token_type_ids and sequence_ids if the features hold them.

    See `MaskingRule` for the arguments; `mlm_smoothing` requires token counts, see `TokenMasker.set_token_counts`.

    Example:
        >>> collate = DataCollatorForMaskedLM(tokenizer, seed=1)
        >>> batch = collate([{"input_ids": tokenizer("a cat sat").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
    """

    whole_word: bool = flag(False, "Mask all tokens of a word or none.")
    ngram: int = flag(1, "Mask runs of 1 to this many whole words, n of them with probability proportional to 1/n.")
    mlm_smoothing: float = flag(
        0.0, "Sample targets with probability proportional to count**-mlm_smoothing (DistilBERT)."
    )

    def check(self, examples: ExampleSet) -> None:
        """Count the tokens of all training text for `mlm_smoothing`."""
        if self.masker.rule.smoothing:
            self.masker.set_token_counts(*examples.column_values("input_ids"))


@dataclass
class SingleSegmentObjective(MaskingCollator, Objective):
    """Base class of objectives that mask sequences of whole sentences of one document, as many as fit.

    A sentence longer than a sequence is cut and continued in the next one.
    """

    packing: bool = flag(False, "Pack several short documents into one sequence, without attention between them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.max_text_tokens = self.template.num_text_tokens(self.max_length)

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, word_ids for whole words, and sequence_ids if packed."""
        sequences = self.sequences(documents, epoch)
        return pack_sequences(sequences, self.max_length) if self.packing else sequences

    def sequences(self, documents: Iterable[list[str]], epoch: int) -> Iterator[Example]:
        """The examples before packing."""
        number = 0
        for document in self.tokenized(documents, self.masker.rule.needs_words):
            for start, stop in sequence_bounds(document, self.max_text_tokens):
                yield self.sequence(document, start, stop, epoch, number)
                number += 1

    def sequence(self, document: TokenizedDocument, start: int, stop: int, epoch: int, number: int) -> Example:
        """Tokens [start, stop) of a document as the `number`-th example of a pass."""
        return self.template.example(document, (start, stop))


@dataclass
class MaskedLM(DataCollatorForMaskedLM, SingleSegmentObjective):
    """Predict 15% of the tokens, most of them masked, from all others.

    | document | example | targets |
    |---|---|---|
    | sentences | `[CLS] sentences [SEP]` | 15% of the tokens: 80% masked, 10% random, 10% unchanged |

    References: Devlin et al. 2019, section 3.1, task 1 alone; Liu et al. 2019, section 4.2, "DOC-SENTENCES".
    Related: `FullSentences` fills examples across documents; `MaskedLMWithNextSentence` and
    `MaskedLMWithSentenceOrder` add a second task; `ReplacedTokenDetection` trains a discriminator on the same masks.

    Example:
        >>> MaskedLM(tokenizer, max_length=128, seed=0, whole_word=True, packing=True)
    """

    auto_class = "AutoModelForMaskedLM"


@dataclass
class FullSentences(DataCollatorForMaskedLM, Objective):
    """Dynamic masking of contiguous whole sentences that cross document boundaries; no second task.

    An example takes sentences in the order of the text while they fit. Attention crosses the separator between two
    documents. A sentence longer than an example is cut and continued in the next one.

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
    cross_documents: bool = flag(True, "Continue an example with the next document; False: end it (DOC-SENTENCES).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.max_text_tokens = self.template.num_text_tokens(self.max_length)
        self.separator = required_token(self.tokenizer, "sep_token", "is inserted between two documents")

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, and word_ids if whole words are masked."""
        ids: list[np.ndarray] = []
        words: list[np.ndarray] = []
        size = 0
        separator, no_word = np.array([self.separator], np.int32), np.array([NO_WORD], np.int32)
        for document in self.tokenized(documents, self.masker.rule.needs_words):
            start = 0
            while start < len(document.ids):
                # the end of the sentences that fit; one that does not fit into an empty example is cut
                limit = start + self.max_text_tokens - size - (size > 0)
                stop = int(document.bounds[max(0, int(np.searchsorted(document.bounds, limit, side="right")) - 1)])
                if stop <= start:
                    stop = start if size else start + self.max_text_tokens
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
