"""XLM's masked and translation language modelling (Lample & Conneau 2019, sections 3.3 and 3.4)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.base import Batch, check_at_least, collator_options
from hf_ctxmodels.objectives.components.features import check_token_ids, feature_generator, padded_columns
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, MaskingRule, corrupt, count_selected, masking_rates
from hf_ctxmodels.objectives.cross_lingual.language_streams import (
    LanguageStreams,
    Sentence,
    StreamObjective,
    StreamOptions,
)

STREAM, TRANSLATION = 0, 1  # numbers of the tasks


@dataclass
class DataCollatorForStreamMaskedLM(PaddingCollator):
    """Pads a batch and masks it by the rule of XLM's released code, with languages and positions.

    Each token but a row's first is selected with probability `mlm_probability`; or, with `sample_alpha` > 0, exactly
    that share of a row's tokens, rounded up, drawn without replacement by frequency ** -sample_alpha. Of the selected
    tokens 80% become the mask token, 10% a random token, 10% stay. As in the released code, and unlike in every other
    collator here, **special tokens are not spared**: </s> within a row may be selected, and a random token is any of
    the vocabulary. There the share is one of the whole batch; here of each row, so that a mask depends on
    (seed, epoch, example) alone.

    Each feature holds:
        input_ids: (tokens,).
        example_index, epoch: Integers that seed the mask.
        langs: (tokens,), optional.
        second: Optional, the column at which positions restart at 0; 0 for none.

    Returns: input_ids, attention_mask, position_ids, labels (batch, width) int64, labels -100 where nothing is
        predicted; and langs if the features hold them.

    Args:
        tokenizer: With a mask token and a padding token; for `sample_alpha` with `token_counts`.
        mlm_probability, mask_share, random_share, sample_alpha: See above.
        static: The same mask in every epoch.
        seed: Seed of the masks.

    Raises:
        CtxError: A value is out of range, the tokenizer lacks something, or a feature does.
    """

    mlm_probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    sample_alpha: float = 0.0
    static: bool = False
    seed: int = 0
    _scores: np.ndarray | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = MaskingRule(self.mlm_probability, self.mask_share, self.random_share)
        check_at_least(0, sample_alpha=self.sample_alpha)
        if self.tokenizer.mask_token_id is None:
            raise CtxError(f"{type(self.tokenizer).__name__} has no mask token.", hint="use one that has.")
        self._size = len(self.tokenizer)
        self._vocabulary = np.arange(self._size)
        if self.sample_alpha:
            self._scores = self._rarity()

    def _rarity(self) -> np.ndarray:
        """(vocabulary,) frequency ** -sample_alpha, 0 for tokens that do not occur and for padding."""
        counts = getattr(self.tokenizer, "token_counts", None)
        if counts is None:
            raise CtxError(
                f"sample_alpha={self.sample_alpha} needs the frequency of each token, which this tokenizer does not "
                "have.",
                hint="train it here (hf-ctxmodels train-tokenizer --family xlm), or set its token_counts.",
            )
        known = np.zeros(self._size)
        known[: len(counts)] = counts
        known[self.tokenizer.pad_token_id] = 0
        scores = np.zeros(self._size)
        scores[known > 0] = known[known > 0] ** -self.sample_alpha
        return scores

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        padder = RowPadder([len(ids) for ids in rows], self.tokenizer.padding_side)
        masked = [
            self._mask(ids, feature_generator(feature, self.seed, self.static))
            for ids, feature in zip(rows, features, strict=True)
        ]
        seconds = [int(feature.get("second", 0)) for feature in features]
        positions = [_positions(len(ids), second) for ids, second in zip(rows, seconds, strict=True)]
        return {
            "input_ids": padder.pad([ids for ids, _ in masked], int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "position_ids": padder.pad(positions, 0),
            "labels": padder.pad([labels for _, labels in masked], IGNORE_INDEX),
            **padded_columns(features, ("langs",), padder, self.tokenizer),
        }

    def _mask(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt one row. Returns its new ids and its labels, both (tokens,)."""
        check_token_ids(ids, self._size)
        return corrupt(ids, self._select(ids, rng), self.rule, int(self.tokenizer.mask_token_id), self._vocabulary, rng)

    def _select(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Columns of the selected tokens, ascending; never the first."""
        if self._scores is None:
            selected = rng.random(len(ids)) < self.mlm_probability
            selected[:1] = False
            return np.flatnonzero(selected)
        scores = self._scores[ids]
        scores[:1] = 0
        number = min(math.ceil(self.mlm_probability * len(ids)), int((scores > 0).sum()))
        return np.sort(rng.choice(len(ids), number, replace=False, p=scores / scores.sum())) if number else ids[:0]


def _positions(length: int, second: int) -> np.ndarray:
    """(length,) positions, which restart at 0 in column `second`, unless that is 0."""
    columns = np.arange(length)
    return np.where(columns < second, columns, columns - second) if second else columns


@dataclass(frozen=True)
class CrossLingualMaskingOptions(StreamOptions):
    """Options of `StreamMaskedLM` and `TranslationLM`; see `DataCollatorForStreamMaskedLM`."""

    mlm_probability: float = flag(0.15, "Probability of each token to be predicted.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is kept.")
    sample_alpha: float = flag(
        0.0, "Predict rare tokens more often, by frequency to the power of minus this, and exactly the share; 0: not."
    )
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")


class StreamMaskedLM(StreamObjective):
    """XLM's masked language modelling: rows cut from streams of one language each.

    | document | row | targets |
    |---|---|---|
    | sentences | `max_length` tokens of `</s> sentence </s> sentence </s> ...` in one language | 15% of the tokens |

    For the masking rule, which does not spare special tokens, see `DataCollatorForStreamMaskedLM`. Without
    `--sampling_alpha` every row is used once per epoch; with it languages are sampled, each --dataset being one.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.3, and the released code.
    Related: `MaskedLM` and `FullSentences` keep sentences whole; `CrossLingualLM` adds `TranslationLM`.

    Example:
        >>> StreamMaskedLM(tokenizer, max_length=256, seed=0, sample_alpha=0.5)
    """

    auto_class = "AutoModelForMaskedLM"
    Options: ClassVar[type] = CrossLingualMaskingOptions
    collate: DataCollatorForStreamMaskedLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        kind = DataCollatorForStreamMaskedLM
        self.collate = kind(tokenizer, seed=seed, **collator_options(kind, self.options))

    def row(self, language: int, ids: np.ndarray, following: int) -> Example:
        """The example of a stream's row: input_ids, langs with several languages, second and task."""
        return {"input_ids": ids, **self.langs((language, len(ids))), "second": 0, "task": STREAM}

    def translation_rows(self, sentences: list[Sentence]) -> Iterator[Example]:
        """The row of a pair, none if a side is empty or the row would be longer than `max_length`."""
        (first, one), (second, other) = sentences
        end = np.array([self.end], dtype=np.int32)
        if not len(one) or not len(other) or len(one) + len(other) + 4 > self.max_length:
            self.statistics["left_out"] += 1
            return
        self.statistics["translations"] += 1
        yield {
            "input_ids": np.concatenate([end, one, end, end, other, end], dtype=np.int32),
            **self.langs((first, len(one) + 2), (second, len(other) + 2)),
            "second": len(one) + 2,
            "task": TRANSLATION,
        }

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        ids, labels, tokens = batch["input_ids"], batch["labels"], batch["attention_mask"] != 0
        counts = count_selected(ids, labels, tokens, int(self.tokenizer.mask_token_id))
        counts["maskable_tokens"] -= len(ids)  # a row's first token is never selected
        restarts = (batch["position_ids"] == 0) & tokens
        return counts | {"translation_rows": int((restarts.sum(1) > 1).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {**masking_rates(counts), "translation_rows": counts["translation_rows"] / max(1, counts["rows"])}


class TranslationLM(StreamMaskedLM):
    """Translation language modelling: mask a text and its translation in one row, so that each helps with the other.

    | document | row | targets |
    |---|---|---|
    | a text and its translation | `</s> text </s></s> translation </s>` | 15% of the tokens of both |

    Positions restart at 0 with the translation, and `langs` changes there. A pair longer than `max_length` is left out
    and counted. The text's language is the option `language`, the translation's that of its tag.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.4, and the released code.
    Related: `CrossLingualLM` alternates with `StreamMaskedLM`; `TranslationToLanguages` writes the translation.

    Example:
        >>> TranslationLM(tokenizer, max_length=256, seed=0, language="en")
    """

    requires_translations = True
    requires_language_tags = True

    def document_rows(
        self, document: list[str], sentences: list[Sentence], streams: LanguageStreams
    ) -> Iterator[Example]:
        """The row of a pair; raises CtxError for a document that is none."""
        if not isinstance(document, TranslatedText):
            raise CtxError(
                "A document has no translation.",
                hint="give a file of them: --translations FILE, line by line the translation of --dataset; for text "
                "without one as well, --objective mlm+tlm.",
            )
        yield from self.translation_rows(sentences)


@dataclass(frozen=True)
class CrossLingualOptions(CrossLingualMaskingOptions):
    """Options of `CrossLingualLM`."""

    alternate: bool = flag(
        True, "Each step has streams alone or translations alone, drawn with equal probability; False shuffles all."
    )


class CrossLingualLM(StreamMaskedLM):
    """MLM + TLM: masked language modelling on streams in some steps, translation language modelling in others.

    Documents with a translation (`--translations FILE`) are rows of `TranslationLM`, others (`--translations -`) are
    streams. With `alternate=False` rows are shuffled, or sampled by `--sampling_alpha`. The MLM-only arm on the same
    text is `--objective mlm`, for which both sides of a pair are sentences of streams.

    | document | row | targets |
    |---|---|---|
    | a text and its translation | `</s> text </s></s> translation </s>` | 15% of the tokens of both |
    | sentences | `max_length` tokens of a stream | 15% of the tokens |

    References: Lample & Conneau 2019 (arXiv 1901.07291), sections 3.4 and 5.1.
    Related: `StreamMaskedLM` and `TranslationLM` alone.

    Example:
        >>> CrossLingualLM(tokenizer, max_length=256, seed=0, language="en", alternate=False)
    """

    Options: ClassVar[type] = CrossLingualOptions

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        if self.options.alternate:
            self.sampling = SamplingPolicy(task_column="task")

    def check(self, examples: ExampleSet) -> None:
        """Raise CtxError if there are no translations, or nothing else."""
        if len(tasks := set(examples.columns["task"].values.tolist())) > 1:
            return
        if TRANSLATION in tasks:
            raise CtxError(
                "Every text has a translation, so there are no streams for MLM.",
                location="--translations",
                hint="give text with `-` in the place of its translation too, or use --objective tlm.",
            )
        left_out = self.statistics["left_out"]
        raise CtxError(
            f"No pair fits into a row: {left_out:,} are longer than max_length={self.max_length}, or empty on one side."
            if left_out
            else "No text has a translation, so there is nothing for TLM.",
            location="--max_length" if left_out else "--translations",
            hint="raise it." if left_out else "give a file of translations, line by line, or use --objective mlm.",
        )

    def document_rows(
        self, document: list[str], sentences: list[Sentence], streams: LanguageStreams
    ) -> Iterator[Example]:
        """The row of a pair, or those that a text fills."""
        if isinstance(document, TranslatedText):
            return self.translation_rows(sentences)
        return super().document_rows(document, sentences, streams)
