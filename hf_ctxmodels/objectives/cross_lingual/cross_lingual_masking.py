"""XLM's masked and translation language modelling (Lample & Conneau 2019, sections 3.3 and 3.4)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_at_least, flag
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.examples import Example, ExampleSet
from hf_ctxmodels.data.padding import Batch, PaddingCollator, RowPadder, required_token
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.autoregressive.causal_lm import TokenStream
from hf_ctxmodels.objectives.components.features import check_token_ids, feature_generator, padded_columns
from hf_ctxmodels.objectives.components.masking import MaskingRule, corrupt, count_selected, masking_rates
from hf_ctxmodels.objectives.components.tokenized_documents import require_translation
from hf_ctxmodels.objectives.cross_lingual.language_streams import Sentence, StreamObjective

STREAM, TRANSLATION = 0, 1
"""Values of `task`."""


@dataclass
class DataCollatorForStreamMaskedLM(PaddingCollator):
    """Pads a batch and masks it by the rule of XLM's released code, with languages and positions.

    Each token except the first is selected with probability `mlm_probability`; or, with `sample_alpha` > 0, exactly
    that share of the tokens, rounded up, sampled without replacement by frequency ** -sample_alpha. Of the selected
    tokens 80% become the mask token, 10% a random token, 10% are unchanged. As in the released code, and unlike in all
    other collators, **special tokens are included**: an inner </s> may be selected, and a random token is any of the
    vocabulary. In the release the share is of the whole batch; here of each sequence, so that a mask depends on (seed,
    epoch, example) alone.

    Each feature holds:
        input_ids: (tokens,).
        example_index, epoch: Integers that seed the mask.
        langs: (tokens,), optional.
        second: Optional, the column at which positions restart at 0; 0 for none.

    Returns: input_ids, attention_mask, position_ids, labels (batch, width) int64, labels -100 where nothing is
        predicted; and langs if the features hold them.

    Args:
        tokenizer: With a mask token and a padding token; for `sample_alpha` with `token_counts`.

    Raises:
        CtxError: A value is out of range, or the tokenizer or a feature lacks something.
    """

    mlm_probability: float = flag(0.15, "Probability of each token to be predicted.")
    mask_share: float = flag(0.8, "Share of the predicted tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the predicted tokens replaced by a random one; the rest is unchanged.")
    sample_alpha: float = flag(
        0.0,
        "Predict rare tokens more often, by frequency to the power of minus this, and exactly the share; 0: uniform.",
    )
    static: bool = flag(False, "The same mask in every epoch instead of a new one.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = MaskingRule(self.mlm_probability, self.mask_share, self.random_share)
        check_at_least(0, sample_alpha=self.sample_alpha)
        self.mask_id = required_token(self.tokenizer, "mask_token", "masked language modelling requires")
        self.vocabulary = np.arange(len(self.tokenizer))
        self.weights: np.ndarray | None = None
        """(vocabulary,) frequency ** -sample_alpha, 0 for tokens that do not occur and for padding."""
        if self.sample_alpha:
            token_counts = getattr(self.tokenizer, "token_counts", None)
            if token_counts is None:
                raise CtxError(
                    f"sample_alpha={self.sample_alpha} requires token frequencies, which this tokenizer does not have.",
                    hint="train it with `hf-ctxmodels train-tokenizer --family xlm`, or set its token_counts.",
                )
            counts = np.zeros(len(self.vocabulary))
            counts[: len(token_counts)] = token_counts
            counts[self.tokenizer.pad_token_id] = 0
            self.weights = np.zeros(len(self.vocabulary))
            self.weights[counts > 0] = counts[counts > 0] ** -self.sample_alpha

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        originals = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        corrupted, labels, positions = [], [], []
        for feature, ids in zip(features, originals, strict=True):
            check_token_ids(ids, len(self.vocabulary))
            rng = feature_generator(feature, self.seed, self.static)
            selected = self._select(ids, rng)
            corrupted_ids, targets = corrupt(ids, selected, self.rule, self.mask_id, self.vocabulary, rng)
            corrupted.append(corrupted_ids)
            labels.append(targets)
            columns, second = np.arange(len(ids)), int(feature.get("second", 0))
            positions.append(np.where(columns < second, columns, columns - second))
        padder = RowPadder([len(ids) for ids in originals], self.tokenizer.padding_side)
        return {
            "input_ids": padder.pad(corrupted, int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
            "position_ids": padder.pad(positions, 0),
            "labels": padder.pad(labels, IGNORE_INDEX),
            **padded_columns(features, ("langs",), padder, self.tokenizer),
        }

    def _select(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Positions of the selected tokens, ascending; never the first."""
        if self.weights is None:
            selected = rng.random(len(ids)) < self.mlm_probability
            selected[:1] = False
            return np.flatnonzero(selected)
        weights = self.weights[ids]
        weights[:1] = 0
        count = min(math.ceil(self.mlm_probability * len(ids)), int((weights > 0).sum()))
        return np.sort(rng.choice(len(ids), count, replace=False, p=weights / weights.sum())) if count else ids[:0]

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the masking, and examples with a translation."""
        ids, labels, tokens = batch["input_ids"], batch["labels"], batch["attention_mask"] != 0
        counts = count_selected(ids, labels, tokens, self.mask_id)
        counts["maskable_tokens"] -= len(ids)  # the first token is never selected
        restarts = (batch["position_ids"] == 0) & tokens
        return counts | {"translation_rows": int((restarts.sum(1) > 1).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Shares of the masking, and of examples with a translation."""
        return {**masking_rates(counts), "translation_rows": counts["translation_rows"] / max(1, counts["rows"])}


@dataclass
class StreamMaskedLM(DataCollatorForStreamMaskedLM, StreamObjective):
    """XLM's masked language modelling: sequences cut from streams of one language each.

    | document | example | targets |
    |---|---|---|
    | sentences | `max_length` tokens of `</s> sentence </s> sentence </s> ...` in one language | 15% of the tokens |

    For the masking rule, which includes special tokens, see `DataCollatorForStreamMaskedLM`. Without `--sampling_alpha`
    every example is used once per epoch; with it languages are sampled, and each --dataset is one language.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.3, and the released code.
    Related: `MaskedLM` and `FullSentences` keep sentences whole; `CrossLingualLM` adds `TranslationLM`.

    Example:
        >>> StreamMaskedLM(tokenizer, max_length=256, seed=0, sample_alpha=0.5)
    """

    auto_class = "AutoModelForMaskedLM"

    def example(self, language: int, ids: np.ndarray, following: int) -> Example:
        """The example of a sequence of a stream: input_ids, langs with several languages, second and task."""
        return {"input_ids": ids, **self.langs((language, len(ids))), "second": 0, "task": STREAM}

    def translation_examples(self, sentences: list[Sentence]) -> Iterator[Example]:
        """The example of a pair, none if a side is empty or it would be longer than `max_length`."""
        (language, ids), (target_language, target_ids) = sentences
        end = np.array([self.end], dtype=np.int32)
        if not len(ids) or not len(target_ids) or len(ids) + len(target_ids) + 4 > self.max_length:
            self.statistics["left_out"] += 1
            return
        self.statistics["translations"] += 1
        yield {
            "input_ids": np.concatenate([end, ids, end, end, target_ids, end], dtype=np.int32),
            **self.langs((language, len(ids) + 2), (target_language, len(target_ids) + 2)),
            "second": len(ids) + 2,
            "task": TRANSLATION,
        }


@dataclass
class TranslationLM(StreamMaskedLM):
    """Translation language modelling: mask a text and its translation in one sequence, so that each helps to predict
    the other.

    | document | example | targets |
    |---|---|---|
    | a text and its translation | `</s> text </s></s> translation </s>` | 15% of the tokens of both |

    Positions restart at 0 with the translation, and `langs` changes there. A pair longer than `max_length` is skipped
    and counted. The text's language is the option `language`, the translation's is its tag.

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 3.4, and the released code.
    Related: `CrossLingualLM` alternates with `StreamMaskedLM`; `TranslationToLanguages` generates the translation.

    Example:
        >>> TranslationLM(tokenizer, max_length=256, seed=0, language="en")
    """

    requires_translations = True
    requires_language_tags = True

    def document_examples(
        self, document: list[str], sentences: list[Sentence], streams: dict[int, TokenStream]
    ) -> Iterator[Example]:
        """The example of a pair; raises CtxError for a document that is not a `TranslatedText`."""
        require_translation(document)
        return self.translation_examples(sentences)


@dataclass
class CrossLingualLM(StreamMaskedLM):
    """MLM + TLM: masked language modelling on streams in some steps, translation language modelling in others.

    Documents with a translation (`--translations FILE`) are examples of `TranslationLM`, others (`--translations -`)
    are streams. With `alternate=False` examples are shuffled, or sampled by `--sampling_alpha`. The MLM-only
    counterpart on the same text is `--objective mlm`, for which both sides of a pair are sentences of streams.

    | document | example | targets |
    |---|---|---|
    | a text and its translation | `</s> text </s></s> translation </s>` | 15% of the tokens of both |
    | sentences | `max_length` tokens of a stream | 15% of the tokens |

    References: Lample & Conneau 2019 (arXiv 1901.07291), sections 3.4 and 5.1.
    Related: `StreamMaskedLM` and `TranslationLM` alone.

    Example:
        >>> CrossLingualLM(tokenizer, max_length=256, seed=0, language="en", alternate=False)
    """

    alternate: bool = flag(
        True, "Each step has either streams or translations, with equal probability; False shuffles all examples."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate:
            self.sampling = SamplingPolicy(task_column="task")

    def check(self, examples: ExampleSet) -> None:
        """Raise CtxError if there are only translations, or none."""
        if len(tasks := set(examples.columns["task"].values.tolist())) > 1:
            return
        if TRANSLATION in tasks:
            problem, hint = "Every text has a translation", "add text with `-` as its translation, or use tlm"
        elif skipped := self.statistics["left_out"]:
            problem, hint = f"{skipped:,} pairs are longer than max_length, or empty on one side", "raise --max_length"
        else:
            problem, hint = "No text has a translation", "set a file of translations, line by line, or use mlm"
        raise CtxError(
            f"{problem}, so that MLM or TLM has no example.", location="--translations, --max_length", hint=f"{hint}."
        )

    def document_examples(
        self, document: list[str], sentences: list[Sentence], streams: dict[int, TokenStream]
    ) -> Iterator[Example]:
        """The example of a pair, or the examples that a text completes."""
        if isinstance(document, TranslatedText):
            return self.translation_examples(sentences)
        return super().document_examples(document, sentences, streams)
