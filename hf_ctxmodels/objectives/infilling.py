"""Infilling generation (Xiao et al. 2020, "ERNIE-GEN"): every token of a target is predicted from its predecessors,
some of which are noise."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, pad_targets
from hf_ctxmodels.data.seeding import Purpose
from hf_ctxmodels.objectives.base import Objective, batch_statistics, target_rates
from hf_ctxmodels.objectives.features import feature_generator, feature_word_ids
from hf_ctxmodels.objectives.source_target import SourceTargetCorruption, SourceTargetObjective
from hf_ctxmodels.objectives.spans import Units, place_spans
from hf_ctxmodels.objectives.tokenized_documents import SpecialTokensTemplate, sequence_bounds
from hf_ctxmodels.objectives.unified_lm import generation_config_fields

FRAGMENT_LENGTHS = ((0.4, 1, 4), (0.6, 4, 32))
"""Lengths of fragments: probability, minimum and maximum, of each of two uniform distributions."""
Noise = Literal["random", "token"]


@dataclass
class DataCollatorForNoisySequenceToSequence(SourceTargetCorruption):
    """Shifts targets to the right, and replaces tokens that the model reads.

    Features have the columns of `SourceTargetCorruption`. Returns: input_ids, attention_mask (batch, width);
    decoder_input_ids (batch, steps), `[CLS]` and the target without its end, each token replaced with probability
    `noise_probability`; labels (batch, steps), the target, -100 at padding. With `max_span` also span_ids
    (batch, steps), numbers of the target's spans: 1 to `max_span` words each, the end token alone.
    """

    decoder_column = "decoder_input_ids"

    noise_probability: float = flag(0.5, "Probability of replacing a target token that the decoder reads.")
    noise: Noise = flag("random", "`random`: any token of the vocabulary; `token`: [NOISE].")
    max_span: int = flag(0, "Predict targets by spans of up to this many words as well; 0: only word by word.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_span", at_least=0)
        check_range(self, "noise_probability", at_least=0, at_most=1)
        check_choice(get_args(Noise), noise=self.noise)
        self.needs_target_words = self.max_span > 0  # spans consist of whole words
        self.noise_id = self.tokenizer.get_vocab().get("[NOISE]")
        if self.noise == "token" and self.noise_id is None:
            raise CtxError("The vocabulary has no [NOISE].", hint="use noise=random, or a tokenizer of ERNIE-GEN.")

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Corrupt and pad features; see the class for their columns and the returned ones."""
        batch = super().collate(features)
        if self.max_span:
            spans = [self.target_spans(feature) for feature in features]
            batch["span_ids"] = pad_targets(spans, -1)
        return batch

    def target_spans(self, feature: Mapping[str, Any]) -> np.ndarray:
        """(steps,) numbers of a target's spans."""
        words = feature_word_ids(feature, "target_word_ids")[:-1]
        rng = feature_generator(feature, self.seed, Purpose.ORDER, period=1 if self.static else None)
        return self.number_spans(words, np.ones(len(words), dtype=bool), rng)

    def number_spans(self, words: np.ndarray, in_target: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(targets,) numbers of the spans, which do not cross the ends of fragments; the last is the end token's."""
        positions = np.flatnonzero(in_target)
        starts_fragment = np.diff(positions, prepend=-2) != 1
        starts_word = starts_fragment | (np.diff(words[positions], prepend=-2) != 0)
        numbers, number, remaining_words = [], -1, 0
        for is_fragment_start, is_word_start in zip(starts_fragment.tolist(), starts_word.tolist()):
            if is_fragment_start or (is_word_start and not remaining_words):
                number, remaining_words = number + 1, int(rng.integers(1, self.max_span, endpoint=True))
            remaining_words -= is_word_start
            numbers.append(number)
        return np.array([*numbers, number + 1], dtype=np.int64)

    def corrupt(
        self, ids: np.ndarray, feature: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The shifted target with noise, and its labels, both (tokens,)."""
        inputs = ids[:-1].astype(np.int64)
        is_noise = rng.random(len(inputs)) < self.noise_probability
        random_ids = rng.integers(len(self.tokenizer), size=len(inputs))
        inputs = np.where(is_noise, random_ids if self.noise == "random" else np.int64(self.noise_id or 0), inputs)
        return np.append(np.int64(self.tokenizer.cls_token_id), inputs), ids.astype(np.int64)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, and the target tokens that the decoder reads: all and replaced ones."""
        labels, inputs = batch["labels"], batch["decoder_input_ids"]
        is_read = (labels[:, :-1] != IGNORE_INDEX) & (labels[:, 1:] != IGNORE_INDEX)
        changed = int(((inputs[:, 1:] != labels[:, :-1]) & is_read).sum())
        counts = batch_statistics(batch, self.tokenizer.unk_token_id)
        return {**counts, "read_targets": int(is_read.sum()), "changed_targets": changed}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and the share of replaced tokens among those that the decoder reads."""
        return {**target_rates(counts), "changed_share": counts["changed_targets"] / max(1, counts["read_targets"])}


@dataclass
class NoisySequenceToSequence(DataCollatorForNoisySequenceToSequence, SourceTargetObjective):
    """ERNIE-GEN's fine-tuning: predict every token of the target from its predecessors, half of which are random.

    With `max_span` each token is also predicted from the predecessors of its span, as in `Infilling`; the released code
    does not do this. See `SourceTargetObjective` for the lengths.

    | document | source | decoder input | targets |
    |---|---|---|---|
    | a source and its target | `[CLS] A [SEP]` | `[CLS] B`, with noise | `B [SEP]` |

    References: Xiao et al. 2020 (arXiv 2001.11314), sections 3.1 and 3.2; the released fine-tuning code, with
    probabilities of 0.5 (Gigaword) and 0.7 (questions).
    Related: `MaskedSequenceToSequence` predicts masked tokens; `Infilling` pretrains.

    Example:
        >>> NoisySequenceToSequence(tokenizer, max_length=512, seed=0, noise_probability=0.7)
    """

    @staticmethod
    def query_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
        """The id of `attention_token`."""
        return attention_token(tokenizer)


@dataclass
class DataCollatorForInfilling(DataCollatorForNoisySequenceToSequence):
    """Removes fragments from a text, which are the target in their order, and adds noise to the target.

    Each feature holds:
        text_ids: (tokens,) without special tokens.
        word_ids: (tokens,) numbers of the words.

    Returns: what `DataCollatorForNoisySequenceToSequence` returns; the source is the remaining text. Spans end at the
    end of a fragment.
    """

    noise_probability: float = flag(0.05, "Probability of replacing a target token that the decoder reads.")
    max_span: int = flag(3, "Maximum number of words of a span.")
    target_share: float = flag(0.25, "Share of the tokens of a text in the target, less if no fragment fits.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "target_share", above=0, below=1)
        check_range(self, "max_span", at_least=1)
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Remove fragments, corrupt and pad; see the class for the columns of features and the returned ones."""
        split_features = []
        for feature in features:
            rng = feature_generator(feature, self.seed, Purpose.ORDER, period=1 if self.static else None)
            ids, words = np.asarray(feature["text_ids"]), feature_word_ids(feature)
            in_target = self.fragments(len(ids), rng)
            split_features.append(
                {
                    **feature,
                    "input_ids": self.template.fill(ids[~in_target]),
                    "span_ids": self.number_spans(words, in_target, rng),
                    "target_ids": np.append(ids[in_target], np.int32(self.tokenizer.sep_token_id)),
                }
            )
        return super().collate(split_features)

    def target_spans(self, feature: Mapping[str, Any]) -> np.ndarray:
        """(steps,) numbers of a target's spans."""
        return feature["span_ids"]

    def fragments(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """(length,) bool, True in fragments; a text of two tokens or more has tokens inside and outside."""
        distributions = rng.choice(len(FRAGMENT_LENGTHS), size=length, p=[share for share, _, _ in FRAGMENT_LENGTHS])
        limits = np.array([(minimum, maximum) for _, minimum, maximum in FRAGMENT_LENGTHS])[distributions]
        lengths = rng.integers(limits[:, 0], limits[:, 1], endpoint=True)
        budget = min(max(1, round(length * self.target_share)), length - 1)
        units = Units.of(np.ones(length, dtype=bool))
        in_target = np.zeros(length, dtype=bool)
        in_target[units.in_spans(place_spans(units, lengths, budget, rng))] = True
        return in_target


@dataclass
class Infilling(DataCollatorForInfilling, Objective):
    """ERNIE-GEN's pretraining: generate the fragments that were removed from a text, word by word and span by span.

    Fragments of 1 to 4 tokens (with probability 0.4) or 4 to 32 are removed, a quarter of the text in total. Each
    target token is predicted twice: from all its predecessors, and from the predecessors of its span of one to three
    words. 5% of the tokens that the decoder reads are random. Texts are whole sentences of a document, as in
    `MaskedLM`; texts of one token are skipped.

    | document | source | decoder input | targets |
    |---|---|---|---|
    | sentences | `[CLS] text without fragments [SEP]` | `[CLS] fragments`, with noise | `fragments [SEP]` |

    References: Xiao et al. 2020 (arXiv 2001.11314), sections 3.1 to 3.3. The pretraining code was not released. The
    paper's spans are n-grams selected by a significance test; here their lengths are random.
    Related: `NoisySequenceToSequence` fine-tunes; `UnifiedLM` predicts masked tokens.

    Example:
        >>> Infilling(tokenizer, max_length=512, seed=0)
    """

    auto_class = "AutoModelForSeq2SeqLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        added = self.template.special_tokens + 2  # [CLS] and the end of the target
        self.max_text_tokens = self.max_length - added
        if self.max_text_tokens < 2:
            raise CtxError(f"max_length={self.max_length} leaves no room for text.", hint=f"use at least {added + 2}.")
        excluded = {*self.tokenizer.all_special_ids} - {self.tokenizer.sep_token_id, self.tokenizer.unk_token_id}
        self.baseline = replace(self.baseline, excluded_ids=sorted(excluded), column="text_ids")
        self.config_fields = generation_config_fields(self.tokenizer, attention_token(self.tokenizer))

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with text_ids and word_ids."""
        for document in self.tokenized(documents, with_word_ids=True):
            assert document.word_ids is not None
            for start, stop in sequence_bounds(document, self.max_text_tokens):
                if stop - start < 2:
                    self.statistics["left_out"] += 1
                else:
                    yield {"text_ids": document.ids[start:stop], "word_ids": document.word_ids[start:stop]}


def attention_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of [ATTN], whose output predicts a target, or of the mask token if the vocabulary has no [ATTN]."""
    return tokenizer.get_vocab().get("[ATTN]", tokenizer.mask_token_id)
