"""Fine-tuning to write: a target for each source, its tokens masked (Dong et al. 2019, section 2.4)."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least, collator_options
from hf_ctxmodels.objectives.components.features import feature_generator, feature_word_ids
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, TokenMasker, corrupt, count_selected, masking_rates
from hf_ctxmodels.objectives.components.rates import count_targets
from hf_ctxmodels.objectives.components.skipgrams import SkipgramRule
from hf_ctxmodels.objectives.components.tokenized_documents import (
    NO_WORD,
    RowTemplate,
    document_batches,
    tokenize_documents,
)
from hf_ctxmodels.objectives.pairs.unified_lm import SkipgramOptions, generation_config_fields


@dataclass(frozen=True)
class TargetRule(SkipgramRule):
    """Tokens of a target to predict: the share is of those before its end, which may be selected as well."""

    def budget(self, candidates: int) -> int:
        """See `MaskingRule.budget`."""
        return super().budget(max(1, candidates - 1)) if candidates else 0


@dataclass
class DataCollatorForSourceTarget(PaddingCollator):
    """Pads sources on the tokenizer's side, and targets on the right; the base of what corrupts targets.

    Each feature holds:
        input_ids: (tokens,) of the source, with special tokens.
        target_ids: (tokens,) of the target, its end included.
        example_index, epoch: Integers that seed the draws.
        target_word_ids: (tokens,), needed for whole words.

    Args:
        seed: Seed of the draws.
        static: The same draws in every epoch.
    """

    seed: int = 0
    static: bool = False

    @abstractmethod
    def corrupted(
        self, ids: np.ndarray, feature: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The column `given` and the labels of a target, both (tokens,)."""

    given: ClassVar[str]
    """The column that the decoder is given."""

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        sources = [np.asarray(feature["input_ids"]) for feature in features]
        made = []
        for feature in features:
            rng = feature_generator(feature, self.seed, self.static)
            made.append(self.corrupted(np.asarray(feature["target_ids"]), feature, rng))
        padder = RowPadder([len(row) for row in sources], self.tokenizer.padding_side)
        targets = RowPadder([len(labels) for _, labels in made], "right")
        return {
            "input_ids": padder.pad(sources, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            self.given: targets.pad([given for given, _ in made], self.tokenizer.pad_token_id),
            "labels": targets.pad([labels for _, labels in made], IGNORE_INDEX),
        }


@dataclass
class DataCollatorForMaskedSequenceToSequence(DataCollatorForSourceTarget):
    """Masks 70% of a target's tokens, its end among those that may be selected, as `SkipgramRule` says.

    Features are those of `DataCollatorForSourceTarget`. Returns: input_ids, attention_mask (batch, width);
    masked_target_ids, labels (batch, steps), labels -100 where nothing is predicted.

    Args:
        mlm_probability, mask_share, random_share, whole_word, max_predictions, skipgram_probability, skipgram_size: See
            `SkipgramRule`.
    """

    given = "masked_target_ids"

    mlm_probability: float = 0.7
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_word: bool = False
    max_predictions: int | None = None
    skipgram_probability: float = 0.0
    skipgram_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("mask_share", "random_share", "whole_word", "max_predictions", "skipgram_probability", "skipgram_size")
        rule = TargetRule(probability=self.mlm_probability, **{name: getattr(self, name) for name in names})
        self.masker = TokenMasker(self.tokenizer, rule)

    def corrupted(
        self, ids: np.ndarray, feature: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `DataCollatorForSourceTarget.corrupted`."""
        masker, words = self.masker, None
        masker.non_special.candidates(ids)  # checks them; of a target every token may be selected
        if masker.rule.whole_word:
            words = feature_word_ids({"word_ids": feature.get("target_word_ids")})
        chosen = masker.rule.select(np.ones(len(ids), dtype=bool), words, rng)
        return corrupt(ids, chosen, masker.rule, masker.mask_token_id, masker.non_special.ids, rng)


@dataclass(frozen=True)
class SourceTargetOptions:
    """Options of all objectives with sources and targets."""

    max_target_length: int | None = flag(None, "Longest target in tokens, its end included; by default half a row.")


class SourceTarget(Objective):
    """Sources and targets, each pair in one row of at most `max_length` tokens.

    A longer target is cut, then the source to what is left; both keep their first tokens. The tokens left out are
    counted, as are pairs with an empty side, which are left out.
    """

    auto_class = "AutoModelForSeq2SeqLM"
    requires_translations = True
    Collator: ClassVar[type[DataCollatorForSourceTarget]]
    collate: Any

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.head_fields(tokenizer)  # checks the tokens
        self.template = RowTemplate(tokenizer, segments=1)
        longest = self.options.max_target_length
        self.longest = max_length // 2 if longest is None else longest
        check_at_least(2, max_target_length=self.longest)
        if max_length - self.longest <= self.template.special_tokens:
            raise CtxError(
                f"Targets of up to max_target_length={self.longest} tokens leave no room for a source in rows of "
                f"max_length={max_length}.",
                hint="lower max_target_length, or raise max_length.",
            )
        self.collate = self.Collator(tokenizer, seed=seed, **collator_options(self.Collator, self.options))
        excluded = {*tokenizer.all_special_ids} - {tokenizer.sep_token_id, tokenizer.unk_token_id}
        self.baseline = replace(self.baseline, excluded_ids=sorted(excluded), column="target_ids")

    @property
    def with_words(self) -> bool:
        """Whether whole words of targets are selected."""
        return False

    @property
    def config_fields(self) -> dict[str, Any]:
        """The tokens that the head needs."""
        return self.head_fields(self.tokenizer)

    @classmethod
    def head_fields(cls, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """`config_fields` for a tokenizer.

        Raises:
            CtxError: It lacks a token that the head needs.
        """
        return generation_config_fields(tokenizer, cls.query_token(tokenizer))

    @staticmethod
    def query_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
        """The token that predicts."""
        return tokenizer.mask_token_id

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, target_ids and, if whole words are selected, target_word_ids.

        Raises:
            CtxError: A document is not a source with its target, a target holds a token that ends or predicts one, or
                all pairs have an empty side.
        """
        before = self.statistics["sentences"]
        end = np.array([self.tokenizer.sep_token_id], dtype=np.int32)
        reserved = np.array([self.tokenizer.sep_token_id, self.query_token(self.tokenizer)])
        for batch in document_batches(documents):
            if not all(isinstance(document, TranslatedText) for document in batch):
                raise CtxError(
                    "A document has no target.",
                    hint="give a file of them: --translations FILE, line by line the target of --dataset.",
                )
            sides = [[[document[place]] for document in batch] for place in range(2)]
            sources = tokenize_documents(self.tokenizer, sides[0], False)
            targets = tokenize_documents(self.tokenizer, sides[1], self.with_words)
            self.statistics["documents"] += len(batch)
            for document, source, target in zip(batch, sources, targets, strict=True):
                if (found := np.isin(target.ids, reserved)).any():
                    token = self.tokenizer.convert_ids_to_tokens(int(target.ids[found][0]))
                    raise CtxError(
                        f"A target holds {token}, which ends targets or predicts them: {document[1][:60]!r}.",
                        hint="take such strings out of the text.",
                    )
                if not len(source.ids) or not len(target.ids):
                    self.statistics["left_out"] += 1
                    continue
                ids = target.ids[: self.longest - 1]
                room = self.template.room(self.max_length - 1 - len(ids))
                left = len(target.ids) - len(ids) + max(0, len(source.ids) - room)
                self.statistics.update(sentences=1, tokens=len(source.ids), truncated_tokens=left)
                row: Example = {"input_ids": self.template.fill(source.ids[:room]), "target_ids": np.append(ids, end)}
                if target.word_ids is not None:
                    row["target_word_ids"] = np.append(target.word_ids[: len(ids)], np.int32(NO_WORD))
                yield row
        if self.statistics["sentences"] == before:
            raise CtxError(
                "No pair is left: all have an empty side.",
                location="--dataset --translations",
                hint="give files of which a line is a source, and the same line of the other its target.",
            )


@dataclass(frozen=True)
class MaskedTargetOptions(SkipgramOptions, SourceTargetOptions):
    """Options of `MaskedSequenceToSequence`."""

    mlm_probability: float = flag(0.7, "Share of the tokens of a target to predict.")
    skipgram_probability: float = flag(0.0, "Probability of a run of several tokens in place of a single one.")
    skipgram_size: int = flag(1, "Longest run of tokens.")


class MaskedSequenceToSequence(SourceTarget):
    """UniLM's fine-tuning to write: predict masked tokens of the target from the source and the target before them.

    70% of a target's tokens are selected, the `[SEP]` at its end among them, so that the model learns when to stop.
    Of those 80% are masked, 10% random, 10% unchanged. A source is read from both sides, and nothing of it is
    predicted. Sources and targets are made as `SourceTarget` says.

    | document | source | target |
    |---|---|---|
    | a source and its target | `[CLS] A [SEP]` | `B [SEP]`, 70% masked |

    References: Dong et al. 2019 (arXiv 1905.03197), section 2.4; the released `run_seq2seq.py`, by which the share is
    of the tokens before `[SEP]`.
    Related: `UnifiedLM` pretrains on such rows, too; `NoisySequenceToSequence` predicts every token.

    Example:
        >>> MaskedSequenceToSequence(tokenizer, max_length=512, seed=0, max_target_length=48)
    """

    Options: ClassVar[type] = MaskedTargetOptions
    Collator = DataCollatorForMaskedSequenceToSequence
    collate: DataCollatorForMaskedSequenceToSequence

    @property
    def with_words(self) -> bool:
        """See `SourceTarget`."""
        return self.options.whole_word

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`; of targets."""
        ids, labels = batch["masked_target_ids"], batch["labels"]
        maskable = (ids != self.tokenizer.pad_token_id) | (labels != IGNORE_INDEX)
        selected = count_selected(ids, labels, maskable, self.tokenizer.mask_token_id)
        ends = {"ends": int((labels == self.tokenizer.sep_token_id).sum())}
        return {**count_targets(batch, self.tokenizer.unk_token_id), **selected, **ends}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; `predicted_ends` is the share of the rows whose end is a target."""
        return {**masking_rates(counts), "predicted_ends": counts["ends"] / max(1, counts["rows"])}
