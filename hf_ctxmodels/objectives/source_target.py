"""Fine-tuning on generation: pairs of a source and a target with masked tokens (Dong et al. 2019, section 2.5)."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, pad_targets
from hf_ctxmodels.objectives.base import Objective, batch_statistics
from hf_ctxmodels.objectives.features import feature_generator, feature_word_ids
from hf_ctxmodels.objectives.masking import SkipgramRule, TokenMasker, corrupt, count_selected, masking_rates
from hf_ctxmodels.objectives.tokenized_documents import (
    NO_WORD,
    SpecialTokensTemplate,
    tokenize_documents,
    translation_batches,
)
from hf_ctxmodels.objectives.unified_lm import generation_config_fields


@dataclass
class SourceTargetCorruption(PaddingCollator):
    """Base class of collators that corrupt targets; pads sources on the tokenizer's side, and targets on the right.

    Each feature holds:
        input_ids: (tokens,) of the source, with special tokens.
        target_ids: (tokens,) of the target, including its end token.
        target_word_ids: (tokens,), required for whole words.
    """

    decoder_column: ClassVar[str]
    """The returned column with the corrupted targets."""

    needs_target_words: bool = field(default=False, init=False)
    """Whether whole words of targets are selected."""

    seed: int = 0
    static: bool = flag(False, "The same corruption in every epoch instead of a new one.")
    pad_to_multiple_of: int | None = None

    @abstractmethod
    def corrupt(
        self, ids: np.ndarray, feature: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The corrupted target and its labels, both (tokens,)."""

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Corrupt and pad features; see the class for their columns and the returned ones."""
        sources = [np.asarray(feature["input_ids"]) for feature in features]
        corrupted, labels = [], []
        for feature in features:
            rng = feature_generator(feature, self.seed, period=1 if self.static else None)
            corrupted_ids, targets = self.corrupt(np.asarray(feature["target_ids"]), feature, rng)
            corrupted.append(corrupted_ids)
            labels.append(targets)
        multiple = self.pad_to_multiple_of
        return self.pad_inputs(sources, multiple)[1] | {
            self.decoder_column: pad_targets(corrupted, self.tokenizer.pad_token_id, multiple),
            "labels": pad_targets(labels, multiple=multiple),
        }


@dataclass
class SourceTargetObjective(SourceTargetCorruption, Objective):
    """Base class of objectives on pairs of source and target, together at most `max_length` tokens.

    A longer target is truncated, then the source to the remaining length; pairs with an empty side are skipped. Both
    are counted.
    """

    auto_class = "AutoModelForSeq2SeqLM"
    requires_translations = True
    max_target_length: int | None = flag(None, "Maximum tokens of a target, with its end; default: half of max_length.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config_fields = self.head_fields(self.tokenizer)
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.target_length = self.max_length // 2 if self.max_target_length is None else self.max_target_length
        check_range({"max_target_length": self.target_length}, at_least=2)
        if self.max_length - self.target_length <= self.template.special_tokens:
            raise CtxError(
                f"Targets of up to max_target_length={self.target_length} tokens leave no room for a source in "
                f"max_length={self.max_length}.",
                hint="lower max_target_length, or raise max_length.",
            )
        excluded = {*self.tokenizer.all_special_ids} - {self.tokenizer.sep_token_id, self.tokenizer.unk_token_id}
        self.baseline = replace(self.baseline, excluded_ids=sorted(excluded), column="target_ids")

    @classmethod
    def head_fields(cls, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """`config_fields` for a tokenizer; raises CtxError if it lacks a token that the head requires."""
        return generation_config_fields(tokenizer, cls.query_token(tokenizer))

    @staticmethod
    def query_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Id of the token whose output predicts a target."""
        return tokenizer.mask_token_id

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, target_ids and, for whole words, target_word_ids; raises CtxError if a document is
        no `TranslatedText`, a target has a token that ends or predicts targets, or all pairs have an empty side."""
        is_empty = True
        end = np.array([self.tokenizer.sep_token_id], dtype=np.int32)
        reserved_ids = np.array([self.tokenizer.sep_token_id, self.query_token(self.tokenizer)])
        for batch in translation_batches(documents):
            source_texts, target_texts = ([[document[side]] for document in batch] for side in range(2))
            sources = tokenize_documents(self.tokenizer, source_texts, False)
            targets = tokenize_documents(self.tokenizer, target_texts, self.needs_target_words)
            self.statistics["documents"] += len(batch)
            for document, source, target in zip(batch, sources, targets, strict=True):
                if (is_reserved := np.isin(target.ids, reserved_ids)).any():
                    token = self.tokenizer.convert_ids_to_tokens(int(target.ids[is_reserved][0]))
                    raise CtxError(
                        f"A target contains {token}, which ends or predicts targets: {document[1][:60]!r}.",
                        hint="remove such strings from the text.",
                    )
                if not len(source.ids) or not len(target.ids):
                    self.statistics["left_out"] += 1
                    continue
                is_empty = False
                ids = target.ids[: self.target_length - 1]
                num_text_tokens = self.template.num_text_tokens(self.max_length - 1 - len(ids))
                truncated = len(target.ids) - len(ids) + max(0, len(source.ids) - num_text_tokens)
                self.statistics.update(
                    sentences=1,
                    tokens=len(source.ids),
                    target_tokens=len(target.ids),
                    truncated_tokens=truncated,
                )
                example: Example = {
                    "input_ids": self.template.fill(source.ids[:num_text_tokens]),
                    "target_ids": np.append(ids, end),
                }
                if target.word_ids is not None:
                    example["target_word_ids"] = np.append(target.word_ids[: len(ids)], np.int32(NO_WORD))
                yield example
        if is_empty:
            raise CtxError(
                "No pair is left: all have an empty side.",
                location="--dataset --translations",
                hint="use files whose lines are sources and, on the same line, their targets.",
            )


@dataclass(frozen=True)
class TargetRule(SkipgramRule):
    """Tokens of a target to predict: the share is of the tokens before its end, which may be selected as well."""

    def budget(self, candidates: int) -> int:
        """Number of tokens to select among the candidates."""
        return super().budget(max(1, candidates - 1)) if candidates else 0


@dataclass
class DataCollatorForMaskedSequenceToSequence(SourceTargetCorruption):
    """Masks 70% of a target's tokens, possibly including its end, by `SkipgramRule`.

    Features have the columns of `SourceTargetCorruption`. Returns: input_ids, attention_mask (batch, width);
    masked_target_ids, labels (batch, steps), labels -100 where nothing is predicted.
    """

    decoder_column = "masked_target_ids"

    mlm_probability: float = flag(0.7, "Share of the tokens of a target to predict.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is unchanged.")
    whole_word: bool = flag(False, "Mask all tokens of a word or none.")
    max_predictions: int | None = flag(None, "Maximum number of predictions in a target.")
    skipgram_probability: float = flag(0.0, "Probability of a run of several tokens instead of a single one.")
    skipgram_size: int = flag(1, "Maximum length of a run in tokens.")
    pad_to_multiple_of: int | None = flag(None, "Round the widths of a batch up to a multiple of this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.masker = TokenMasker(self.tokenizer, TargetRule.of(self))
        self.needs_target_words = self.whole_word

    def corrupt(
        self, ids: np.ndarray, feature: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The masked target and its labels, both (tokens,)."""
        masker = self.masker
        masker.non_special.candidates(ids)  # validates the ids; every token of a target may be selected
        words = feature_word_ids(feature, "target_word_ids") if self.needs_target_words else None
        selected = masker.rule.select(np.ones(len(ids), dtype=bool), words, rng)
        return corrupt(ids, selected, masker.rule, masker.mask_token_id, masker.non_special.ids, rng)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking of targets, and predicted ends."""
        ids, labels = batch["masked_target_ids"], batch["labels"]
        maskable = (ids != self.tokenizer.pad_token_id) | (labels != IGNORE_INDEX)
        return {
            **batch_statistics(batch, self.tokenizer.unk_token_id),
            **count_selected(ids, labels, maskable, self.masker.mask_token_id),
            "ends": int((labels == self.tokenizer.sep_token_id).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, and of the examples whose end is a target."""
        return {**masking_rates(counts), "predicted_end_share": counts["ends"] / max(1, counts["examples"])}


@dataclass
class MaskedSequenceToSequence(DataCollatorForMaskedSequenceToSequence, SourceTargetObjective):
    """UniLM's fine-tuning on generation: predict masked tokens of the target from the source and their predecessors.

    70% of a target's tokens are selected, possibly including the `[SEP]` at its end. A source is read bidirectionally,
    and none of its tokens are predicted. See `SourceTargetObjective` for the lengths.

    | document | source | target |
    |---|---|---|
    | a source and its target | `[CLS] A [SEP]` | `B [SEP]`, 70% masked |

    References: Dong et al. 2019 (arXiv 1905.03197), section 2.5; the released `run_seq2seq.py`, in which the share is
    of the tokens before `[SEP]`.
    Related: `UnifiedLM` pretrains on such examples as well; `NoisySequenceToSequence` predicts every token.

    Example:
        >>> MaskedSequenceToSequence(tokenizer, max_length=512, seed=0, max_target_length=48)
    """
