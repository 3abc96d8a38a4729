"""MASS's pretraining on sentence pairs: translate a source with masked tokens."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.flags import check_share, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, RowPadder, language_columns
from hf_ctxmodels.data.seeding import Stream
from hf_ctxmodels.objectives.components.features import feature_generator
from hf_ctxmodels.objectives.components.masking import MaskingRule, corrupt
from hf_ctxmodels.objectives.components.tokenized_documents import translation_batches
from hf_ctxmodels.objectives.seq2seq.masked_segment import DataCollatorForMaskedSegment, Hidden, MaskingWithLanguages


@dataclass
class DataCollatorForMaskedTranslation(DataCollatorForMaskedSegment):
    """Masks tokens of each source and, with `target_share`, of the decoder's input; every target token is predicted.

    Each token of a source except the first and the last is masked with the probability `share`. With `lambda_span` or
    `block` a source has a segment instead, as in `DataCollatorForMaskedSegment`.

    Of the decoder's input round(target_share * tokens) tokens are selected, at least one if it is above 0, but never
    the first. `mask_share` and `random_share` apply to both sides.

    Each feature holds:
        input_ids: (tokens,) of the source, with special tokens.
        target_ids: (tokens,) of the target, with special tokens, one of them at its beginning.
        example_index, epoch: Integers that seed the masks.
        language, target_language: Optional, the ids of both languages.

    Returns: input_ids, attention_mask, cross_attention_mask and langs as there; labels, decoder_input_ids (batch,
        steps), the target without its first token, and without its last one, partly masked; decoder_langs.
    """

    share: float = flag(0.25, "Probability of masking a token of the source.")
    mask_share: float = flag(1.0, "Share of the masked tokens replaced by the mask token.")
    random_share: float = flag(0.0, "Share of the masked tokens replaced by a random one; the rest is unchanged.")
    hidden: Hidden = flag("nothing", "Positions that cross-attention ignores: mask tokens, the whole segment, or none.")
    target_share: float = flag(0.0, "Share of the decoder's input tokens that are masked; 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(target_share=self.target_share)
        share = self.target_share or 1.0  # a rule with share 0 is invalid
        self.target_rule = MaskingRule(share, self.mask_share, self.random_share)

    def segments(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Positions of the masked tokens of a source of `length` tokens, ascending."""
        if self.lambda_span is not None or self.block is not None:
            return super().segments(length, rng)
        return 1 + np.flatnonzero(rng.random(length - 2) < self.share)

    def decoder_input(self, feature: Mapping[str, Any]) -> np.ndarray:
        """(steps,) ids of the decoder's input, partly masked."""
        ids = np.asarray(feature["target_ids"]).astype(np.int64)[:-1]
        if not self.target_share:
            return ids
        rng = feature_generator(feature, self.seed, self.static, Stream.ORDER)
        positions = self.target_rule.select(np.arange(len(ids)) > 0, None, rng)
        return corrupt(ids, positions, self.target_rule, self.mask_id, self.non_special.ids, rng)[0]

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        labels = [np.asarray(feature["target_ids"]).astype(np.int64)[1:] for feature in features]
        steps = RowPadder([len(targets) for targets in labels], "right")
        decoder_ids = [self.decoder_input(feature) for feature in features]
        batch = self.encoder_inputs([self.mask(feature) for feature in features]) | {
            "labels": steps.pad(labels, IGNORE_INDEX),
            "decoder_input_ids": steps.pad(decoder_ids, int(self.tokenizer.pad_token_id)),
        }
        return batch | language_columns(features, batch)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the sources, and of the tokens of the decoder's input: all, changed and masked ones."""
        decoder_ids, labels = batch["decoder_input_ids"][:, 1:], batch["labels"]
        is_token = labels[:, 1:] != IGNORE_INDEX
        return {
            **super().count(batch),
            "given": int(is_token.sum()),
            "changed": int((is_token & (decoder_ids != labels[:, :-1])).sum()),
            "hidden": int((decoder_ids == self.mask_id).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Fill of both sides, mask tokens of the sources, and mask tokens and changed tokens of the decoder's input."""
        return {
            "fill": counts["tokens"] / max(1, counts["positions"]),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "source_masks": counts["masks"] / max(1, counts["tokens"]),
            "given_masks": counts["hidden"] / max(1, counts["given"]),
            "given_changed": counts["changed"] / max(1, counts["given"]),
        }


@dataclass
class MaskedTranslation(DataCollatorForMaskedTranslation, MaskingWithLanguages):
    """MASS's supervised pretraining: generate the translation of a text with a quarter of its tokens masked.

    An example is a text and its translation (`--translations`). The text's language is its tag or the option
    `language`, the translation's is its tag (`--language_tags`). A pair with a side longer than `max_length` is skipped
    and counted.

    | document | source | decoder input | targets |
    |---|---|---|---|
    | `a b c d` and `A B C` | `</s> a _ c d </s>` | `</s> A B C` | `A B C </s>` |

    References: Song et al. 2019 (arXiv 1905.02450), and the released code for supervised translation, which masks pairs
    in this way. There texts without a translation have a segment, and the decoder receives corrupted tokens (10%
    masked, 10% random); `target_share` does the same for pairs.
    Related: `MaskedSegment` is for single texts; `TranslationLM` is for encoders.

    Example:
        >>> MaskedTranslation(tokenizer, max_length=100, seed=0, language="en", target_share=0.3)
    """

    requires_translations = True
    requires_language_tags = True
    skip_reason = "pairs have a side that is empty, too short or too long"
    min_length: int = flag(
        3, "Minimum length of each side in tokens, including special ones; shorter ones are skipped."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.baseline = replace(self.baseline, column="target_ids")

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids and target_ids, and language and target_language with several languages; raises
        CtxError if a document is not a `TranslatedText`, a side has no language, or all pairs are skipped."""
        is_empty = True
        for batch in translation_batches(documents):
            for (language, ids), (target_language, target_ids) in self.reader.read([*batch]):
                sides = [self.template.fill(ids), self.template.fill(target_ids)]
                lengths = [len(side) for side in sides]
                has_empty_side = not len(ids) or not len(target_ids)
                self.statistics["documents"] += 1
                if has_empty_side or min(lengths) < self.min_length or max(lengths) > self.max_length:
                    self.statistics["left_out"] += 1
                    continue
                self.statistics.update(sentences=1, tokens=len(ids), target_tokens=len(target_ids))
                is_empty = False
                example: Example = {"input_ids": sides[0], "target_ids": sides[1]}
                languages: Example = {"language": language, "target_language": target_language}
                yield example | (languages if self.reader.is_multilingual else {})
        if is_empty:
            raise self.no_examples_error()
