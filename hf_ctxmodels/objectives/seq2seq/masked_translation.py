"""MASS's pretraining on sentence pairs: translate a source of which tokens are masked."""

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
from hf_ctxmodels.data.padding import RowPadder, language_columns
from hf_ctxmodels.data.seeding import Stream
from hf_ctxmodels.objectives.base import Batch
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, MaskingRule, corrupt
from hf_ctxmodels.objectives.components.tokenized_documents import document_batches
from hf_ctxmodels.objectives.seq2seq.masked_segment import (
    DataCollatorForMaskedSegment,
    Hidden,
    MaskedSegment,
    SegmentOptions,
)


@dataclass
class DataCollatorForMaskedTranslation(DataCollatorForMaskedSegment):
    """Masks tokens of each source, and with `target_share` tokens that the decoder is given of its target; every token
    of the target is predicted.

    Each token of a source but its first and last one is masked with the probability `share`. With `lambda_span` or
    `block` a source has a segment instead, as in `DataCollatorForMaskedSegment`.

    Of a target's tokens round(target_share * tokens) are selected, at least one, if it is above 0. The decoder's first
    input is never selected. `mask_share` and `random_share` hold for both sides.

    Each feature holds:
        input_ids: (tokens,) of the source, with special tokens.
        target_ids: (tokens,) of the target, with special tokens, one of them at its begin.
        example_index, epoch: Integers that seed the masks.
        language, target_language: Optional, the numbers of both languages.

    Returns: input_ids, attention_mask, cross_attention_mask and langs as there; labels, decoder_input_ids (batch,
        steps) the target without its first token, and without its last one, in part masked; decoder_langs.

    Args: those of `DataCollatorForMaskedSegment`, and
        target_share: Share of the tokens of the decoder's input; 0 for none.
    """

    share: float = 0.25
    mask_share: float = 1.0
    random_share: float = 0.0
    hidden: Hidden = "nothing"
    target_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.target_share <= 1:
            raise CtxError(f"target_share={self.target_share} is no share.", hint="use 0 to 1.")
        share = self.target_share or 1.0  # a rule selects something
        self.target_rule = MaskingRule(share, self.mask_share, self.random_share)

    def segments(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Columns of the masked tokens of a source of `length` tokens, ascending."""
        if self.lambda_span is not None or self.block is not None:
            return super().segments(length, rng)
        return 1 + np.flatnonzero(rng.random(length - 2) < self.share)

    def given(self, feature: Mapping[str, Any]) -> np.ndarray:
        """(steps,) the decoder's input."""
        ids = np.asarray(feature["target_ids"]).astype(np.int64)[:-1]
        if not self.target_share:
            return ids
        rng = feature_generator(feature, self.seed, self.static, Stream.ORDER)
        chosen = self.target_rule.select(np.arange(len(ids)) > 0, None, rng)
        mask = int(self.tokenizer.mask_token_id)
        return corrupt(ids, chosen, self.target_rule, mask, self.non_special.ids, rng)[0]

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        labels = [np.asarray(feature["target_ids"]).astype(np.int64)[1:] for feature in features]
        steps = RowPadder([len(row) for row in labels], "right")
        batch = self.read([self.masked(feature) for feature in features]) | {
            "labels": steps.pad(labels, IGNORE_INDEX),
            "decoder_input_ids": steps.pad([self.given(each) for each in features], int(self.tokenizer.pad_token_id)),
        }
        return batch | language_columns(features, batch, "language", "target_language")


@dataclass(frozen=True)
class MaskedTranslationOptions(SegmentOptions):
    """Options of `MaskedTranslation`; see its collator."""

    share: float = flag(0.25, "Probability with which a token of the source is masked.")
    mask_share: float = flag(1.0, "Share of the masked tokens replaced by the mask token.")
    random_share: float = flag(0.0, "Share of the masked tokens replaced by a random one; the rest is kept.")
    target_share: float = flag(0.0, "Share of the tokens given to the decoder that are masked; 0 for none.")
    hidden: Hidden = flag("nothing", "What cross-attention does not see: mask tokens, the whole segment, or nothing.")
    min_length: int = flag(3, "Pairs of which a side has fewer tokens, special ones included, are left out.")


class MaskedTranslation(MaskedSegment):
    """MASS's supervised pretraining: write the translation of a text of which a quarter of the tokens is masked.

    A row is a text and its translation (`--translations`). The text's language is that of its tag or the option
    `language`, the translation's that of its tag (`--language_tags`). A pair with a side longer than `max_length` is
    left out and counted.

    | document | source | given to the decoder | targets |
    |---|---|---|---|
    | `a b c d` and `A B C` | `</s> a _ c d </s>` | `</s> A B C` | `A B C </s>` |

    References: Song et al. 2019 (arXiv 1905.02450), and the released code for supervised translation, whose pairs are
    masked so. There texts without a translation have a segment, of which the decoder is given corrupted tokens (10%
    masked, 10% random); `target_share` is for pairs a choice made here.
    Related: `MaskedSegment` is for single texts; `TranslationLM` is for encoders.

    Example:
        >>> MaskedTranslation(tokenizer, max_length=100, seed=0, language="en", target_share=0.3)
    """

    requires_translations = True
    requires_language_tags = True
    Options: ClassVar[type] = MaskedTranslationOptions
    Collator = DataCollatorForMaskedTranslation
    skip_reason = "pairs have a side that is empty, too short or too long"
    collate: DataCollatorForMaskedTranslation

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.baseline = replace(self.baseline, column="target_ids")

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids and target_ids, and language and target_language with several languages.

        Raises:
            CtxError: A document is not a text with its translation, a side has no language, or all pairs are left out.
        """
        some = False
        for batch in document_batches(documents):
            if not all(isinstance(document, TranslatedText) for document in batch):
                raise CtxError(
                    "A document has no translation.",
                    hint="give a file of them: --translations FILE, line by line the translation of --dataset; for "
                    "text without one, --objective masked-segment.",
                )
            for (language, ids), (written, target) in self.reader.read(batch):
                sides = [self.template.fill(ids), self.template.fill(target)]
                lengths = [len(side) for side in sides]
                empty = not len(ids) or not len(target)
                self.statistics["documents"] += 1
                if empty or min(lengths) < self.options.min_length or max(lengths) > self.max_length:
                    self.statistics["left_out"] += 1
                    continue
                self.statistics.update(sentences=1, tokens=len(ids), target_tokens=len(target))
                row: Example = {"input_ids": sides[0], "target_ids": sides[1]}
                named: Example = {"language": language, "target_language": written}
                some = True
                yield row | (named if self.reader.is_multilingual else {})
        if not some:
            raise self.nothing_left()

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        given, labels = batch["decoder_input_ids"][:, 1:], batch["labels"]
        known, hidden = labels[:, 1:] != IGNORE_INDEX, given == int(self.tokenizer.mask_token_id)
        counts = {"given": known, "changed": known & (given != labels[:, :-1]), "hidden": hidden}
        return {**super().count(batch), **{name: int(where.sum()) for name, where in counts.items()}}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`; of sources the share of mask tokens, of the tokens given to the decoder that of mask
        tokens and of changed ones."""
        return {
            "fill": counts["tokens"] / max(1, counts["positions"]),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "source_masks": counts["masks"] / max(1, counts["tokens"]),
            "given_masks": counts["hidden"] / max(1, counts["given"]),
            "given_changed": counts["changed"] / max(1, counts["given"]),
        }
