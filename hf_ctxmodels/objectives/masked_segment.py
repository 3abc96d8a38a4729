"""MASS (Song et al. 2019, section 3.2): generate the masked segment of a text, or translate a masked source."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, language_columns, pad_targets, required_token
from hf_ctxmodels.data.seeding import Purpose
from hf_ctxmodels.objectives.base import Objective, batch_statistics, target_rates
from hf_ctxmodels.objectives.cross_lingual import LanguageReader, Sentence
from hf_ctxmodels.objectives.features import NonSpecialTokens, check_token_ids, feature_generator
from hf_ctxmodels.objectives.masking import MaskingRule, corrupt
from hf_ctxmodels.objectives.tokenized_documents import SpecialTokensTemplate, document_batches, translation_batches

_START_SHARE, _END_SHARE = 0.2, 0.2  # of the examples with the segment at the start and at the end

Hidden = Literal["masks", "segment", "nothing"]


class MaskedSequence(NamedTuple):
    """(tokens,) original ids, ascending positions of the segments' tokens, and (tokens,) ids with masked segments."""

    ids: np.ndarray
    positions: np.ndarray
    corrupted: np.ndarray


@dataclass
class DataCollatorForMaskedSegment(PaddingCollator):
    """Masks a segment of each sequence, or of each block of a sequence; the decoder receives the segments alone.

    A segment never contains the first token. Without `block` a sequence has one segment of round(share * length)
    tokens: 20% of the sequences have it after the first token, 20% at the end, and 60% at a uniform position.
    `lambda_span` cuts it into pieces among the other tokens in random order; 20% of the sequences then have the first
    piece after the first token, 20% the last one at the end. With `block` each block after the first token has one
    segment of int(share * tokens) at a uniform position, as in the released summarization model.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        language: Optional, the language id.

    Returns: input_ids, attention_mask (batch, width); labels (batch, steps), the tokens of the segments, -100 after
    them; decoder_input_ids, decoder_position_ids (batch, steps), the unmasked token before each of them, and its
    position; cross_attention_mask (batch, width), 0 at the positions that cross-attention ignores; and if the features
    hold languages, langs (batch, width) and decoder_langs (batch, steps).
    """

    share: float = flag(0.5, "Share of a sequence, or of a block, in the masked segment.")
    mask_share: float = flag(0.8, "Share of the segment's tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the segment's tokens replaced by a random one; the rest is unchanged.")
    block: int | None = flag(None, "One segment in each block of this many tokens; None: one in each sequence.")
    lambda_span: int | None = flag(None, "Cut the segment into pieces of this many tokens; None: one piece.")
    hidden: Hidden = flag("masks", "Positions that cross-attention ignores: mask tokens, the whole segment, or none.")
    static: bool = flag(False, "The same masks in every epoch instead of new ones.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = MaskingRule(self.share, self.mask_share, self.random_share)
        check_choice(get_args(Hidden), hidden=self.hidden)
        check_range(self, "block", at_least=2)
        check_range(self, "lambda_span", at_least=1)
        if self.block is not None and self.lambda_span is not None:
            raise CtxError(
                f"block={self.block} and lambda_span={self.lambda_span} exclude each other.",
                hint="set only one of them: a block has one segment of one piece.",
            )
        self.mask_id = required_token(self.tokenizer, "mask_token", "replaces the segment")
        self.non_special = NonSpecialTokens(self.tokenizer)

    def segments(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Positions of the tokens in the segments of a sequence of `length` tokens, ascending."""
        if self.block is None:
            size = min(round(self.share * length), length - 1)
            if self.lambda_span is not None and size > self.lambda_span:
                return self._pieces(length, size, self.lambda_span, rng)
            uniform, last = rng.random(), length - size
            if uniform < _START_SHARE:
                start = 1
            elif uniform < _START_SHARE + _END_SHARE:
                start = last
            else:
                start = int(rng.integers(1, last + 1))
            return np.arange(start, start + size)
        segments = [np.arange(0)]
        for first in range(1, length, self.block):
            stop = min(first + self.block, length)
            size = int(self.share * (stop - first))
            start = int(rng.integers(first, stop - size + 1))
            segments.append(np.arange(start, start + size))
        return np.concatenate(segments)

    @staticmethod
    def _pieces(length: int, size: int, piece: int, rng: np.random.Generator) -> np.ndarray:
        """Positions of a segment of `size` tokens in pieces of `piece` tokens, the last one shorter."""
        full_pieces, remainder = divmod(size, piece)
        pieces = [piece] * full_pieces + [remainder] * (remainder > 0)
        first, last, uniform = 0, len(pieces), rng.random()
        if uniform < _START_SHARE:
            first = 1
        elif uniform < _START_SHARE + _END_SHARE:
            last -= 1
        between = rng.permutation([*pieces[first:last], *[0] * (length - 1 - size)])  # 0 is an unmasked token
        runs = np.concatenate([pieces[:first], between, pieces[last:]]).astype(np.int64)
        return 1 + np.flatnonzero(np.repeat(runs > 0, np.maximum(runs, 1)))

    def mask(self, feature: Mapping[str, Any]) -> MaskedSequence:
        """Mask the segments of a feature."""
        ids = np.asarray(feature["input_ids"]).astype(np.int64)
        check_token_ids(ids, len(self.non_special.table))
        rng = feature_generator(feature, self.seed, period=1 if self.static else None)
        positions = self.segments(len(ids), rng)
        corrupted, _ = corrupt(ids, positions, self.rule, self.mask_id, self.non_special.ids, rng)
        return MaskedSequence(ids, positions, corrupted)

    def encoder_inputs(self, sequences: Sequence[MaskedSequence]) -> Batch:
        """The inputs of the encoder, and the mask of cross-attention."""
        padder, batch = self.pad_inputs([sequence.corrupted for sequence in sequences])
        if self.hidden != "nothing":
            visible = [
                sequence.corrupted != self.mask_id
                if self.hidden == "masks"
                else ~np.isin(np.arange(len(sequence.ids)), sequence.positions)
                for sequence in sequences
            ]
            batch["cross_attention_mask"] = padder.pad([is_visible.astype(np.int64) for is_visible in visible], 0)
        return batch

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        sequences = [self.mask(feature) for feature in features]
        previous = [sequence.positions - 1 for sequence in sequences]
        decoder_ids = [sequence.ids[positions] for sequence, positions in zip(sequences, previous, strict=True)]
        batch = self.encoder_inputs(sequences) | {
            "labels": pad_targets([sequence.ids[sequence.positions] for sequence in sequences]),
            "decoder_input_ids": pad_targets(decoder_ids, int(self.tokenizer.pad_token_id)),
            "decoder_position_ids": pad_targets(previous, 0),
        }
        return batch | language_columns(features, batch)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, and mask tokens."""
        return batch_statistics(batch, self.tokenizer.unk_token_id, self.mask_id)

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates` (the segments' share is `targets_per_token`), and mask tokens in segments."""
        return {**target_rates(counts), "mask_token_share": counts["masks"] / max(1, counts["targets"])}


@dataclass
class MaskingWithLanguages(Objective):
    """Base class of MASS's objectives, which mask texts with the id of their language, see `LanguageReader`."""

    auto_class = "AutoModelForSeq2SeqLM"
    predicts_special_tokens = True
    skip_reason: ClassVar[str]
    """Why examples are skipped, for the error if none is left."""

    min_length: int = flag(5, "Minimum tokens of an example, including special ones; shorter ones are skipped.")
    language: str = flag("", "Name of the language of texts without a tag.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "min_length", at_least=3)
        if self.max_length < self.min_length:
            raise CtxError(
                f"max_length={self.max_length} is below min_length={self.min_length}.",
                hint="raise max_length, or lower min_length.",
            )
        self.template = SpecialTokensTemplate(self.tokenizer, segments=1)
        self.max_text_tokens = self.template.num_text_tokens(self.max_length)
        self.reader = LanguageReader(self.tokenizer, self.language)
        first_token = int(self.template.fill(np.zeros(0, dtype=np.int32))[0])
        self.config_fields = {"n_langs": max(1, len(self.reader.names)), "decoder_start_token_id": first_token}
        if self.reader.is_multilingual:
            self.config_fields["lang2id"] = {name: number for number, name in enumerate(self.reader.names)}

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, and language with several languages; raises CtxError if all texts are skipped."""
        is_empty = True
        for example in self.tagged_examples(documents):
            if not self.reader.is_multilingual:
                example = {name: column for name, column in example.items() if isinstance(column, np.ndarray)}
            is_empty = False
            yield example
        if is_empty:
            raise CtxError(
                f"No example is left: all {self.statistics['left_out']:,} {self.skip_reason}.",
                hint=f"raise max_length={self.max_length}, lower min_length={self.min_length}, or use other text.",
            )

    def tagged_examples(self, documents: Iterable[list[str]]) -> Iterator[Example]:
        """Examples with input_ids and language; texts that are too short or too long are skipped and counted."""
        for batch in document_batches(documents):
            for document in self.reader.read(batch):
                tokens = sum(len(ids) for _, ids in document)
                self.statistics.update(documents=1, sentences=len(document), tokens=tokens)
                for language, ids in self.texts(document):
                    if self.min_length <= len(ids) + self.template.special_tokens <= self.max_length:
                        yield {"input_ids": self.template.fill(ids), "language": language}
                    else:
                        self.statistics["left_out"] += 1

    def texts(self, document: list[Sentence]) -> Iterable[Sentence]:
        """The language and (tokens,) ids of each example's text; by default the sentences of the document."""
        return document


@dataclass
class MaskedSegment(DataCollatorForMaskedSegment, MaskingWithLanguages):
    """MASS's objective: generate the masked segment of a text from the rest and from the preceding segment tokens.

    An example is a sentence (a longer one than `max_length` is cut and continued), or with `by_sentence=False` whole
    sentences of one language and document, as many as fit. Texts of several languages have tags (`--language_tags`).

    | document | source | targets |
    |---|---|---|
    | `a b c d e f` | `</s> a b _ _ _ f </s>` | `c d e`; decoder inputs `b c d` at their positions |

    References: Song et al. 2019 (arXiv 1905.02450), section 3.2, and the released code.
    Related: `MaskedTranslation` is for texts with translations; `Denoising` generates the whole text.

    Example:
        >>> MaskedSegment(tokenizer, max_length=512, seed=0, share=0.15, block=64, hidden="nothing", by_sentence=False)
    """

    skip_reason = "texts are too short"
    by_sentence: bool = flag(True, "Each sentence is an example; False: as many sentences of a document as fit.")

    def texts(self, document: list[Sentence]) -> Iterator[Sentence]:
        """The sentences, cut into pieces that fit `max_length`, or with `by_sentence=False` joined to such pieces."""
        pieces: list[np.ndarray] = []
        current_language = 0
        for language, ids in document:
            for start in range(0, len(ids), self.max_text_tokens):
                piece = ids[start : start + self.max_text_tokens]
                joins = not self.by_sentence and language == current_language
                if pieces and not (joins and sum(map(len, pieces)) + len(piece) <= self.max_text_tokens):
                    yield current_language, np.concatenate(pieces)
                    pieces = []
                pieces.append(piece)
                current_language = language
        if pieces:
            yield current_language, np.concatenate(pieces)


@dataclass
class DataCollatorForMaskedTranslation(DataCollatorForMaskedSegment):
    """Masks tokens of each source and, with `target_share`, of the decoder's input; every target token is predicted.

    Each token of a source except the first and the last is masked with the probability `share`, or with `lambda_span`
    or `block` a segment. Of the decoder's input round(target_share * tokens) tokens are selected, at least one if it is
    above 0, but never the first. `mask_share` and `random_share` apply to both sides.

    Each feature holds:
        input_ids: (tokens,) of the source, with special tokens.
        target_ids: (tokens,) of the target, with special tokens, one of them at its beginning.
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
        check_range(self, "target_share", at_least=0, at_most=1)
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
        rng = feature_generator(feature, self.seed, Purpose.ORDER, period=1 if self.static else None)
        positions = self.target_rule.select(np.arange(len(ids)) > 0, None, rng)
        return corrupt(ids, positions, self.target_rule, self.mask_id, self.non_special.ids, rng)[0]

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Mask and pad features; see the class for their columns and the returned ones."""
        labels = [np.asarray(feature["target_ids"]).astype(np.int64)[1:] for feature in features]
        decoder_ids = [self.decoder_input(feature) for feature in features]
        batch = self.encoder_inputs([self.mask(feature) for feature in features]) | {
            "labels": pad_targets(labels),
            "decoder_input_ids": pad_targets(decoder_ids, int(self.tokenizer.pad_token_id)),
        }
        return batch | language_columns(features, batch)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of the sources, and of the tokens of the decoder's input: all, changed and masked ones."""
        decoder_ids, labels = batch["decoder_input_ids"][:, 1:], batch["labels"]
        is_token = labels[:, 1:] != IGNORE_INDEX
        return {
            **super().count_batch(batch),
            "decoder_tokens": int(is_token.sum()),
            "decoder_changes": int((is_token & (decoder_ids != labels[:, :-1])).sum()),
            "decoder_masks": int((decoder_ids == self.mask_id).sum()),
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and mask tokens of sources, and masked and changed tokens of the decoder's input."""
        decoder_tokens = max(1, counts["decoder_tokens"])
        return {
            **target_rates(counts),
            "source_mask_share": counts["masks"] / max(1, counts["tokens"]),
            "decoder_mask_share": counts["decoder_masks"] / decoder_tokens,
            "decoder_change_share": counts["decoder_changes"] / decoder_tokens,
        }


@dataclass
class MaskedTranslation(DataCollatorForMaskedTranslation, MaskingWithLanguages):
    """MASS's supervised pretraining: generate the translation of a text with a quarter of its tokens masked.

    An example is a text and its translation (`--translations`). The text's language is its tag or the option
    `language`, the translation's is its tag. A pair with a side longer than `max_length` is skipped and counted.

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
    min_length: int = flag(3, "Minimum tokens of each side, including special ones; shorter ones are skipped.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.baseline = replace(self.baseline, column="target_ids")

    def tagged_examples(self, documents: Iterable[list[str]]) -> Iterator[Example]:
        """Examples with input_ids, target_ids, language and target_language; raises CtxError if a document is not a
        `TranslatedText`, or a side has no language."""
        for batch in translation_batches(documents):
            for (language, ids), (target_language, target_ids) in self.reader.read([*batch]):
                source, target = self.template.fill(ids), self.template.fill(target_ids)
                lengths, has_empty_side = (len(source), len(target)), not len(ids) or not len(target_ids)
                self.statistics["documents"] += 1
                if has_empty_side or min(lengths) < self.min_length or max(lengths) > self.max_length:
                    self.statistics["left_out"] += 1
                    continue
                self.statistics.update(sentences=1, tokens=len(ids), target_tokens=len(target_ids))
                languages: Example = {"language": language, "target_language": target_language}
                yield {"input_ids": source, "target_ids": target, **languages}
