"""Masked sequence-to-sequence pretraining (Song et al. 2019, "MASS", section 3.1): write the masked segment."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder, language_columns
from hf_ctxmodels.objectives.base import Batch, Objective, check_at_least, collator_options
from hf_ctxmodels.objectives.components.features import check_token_ids, feature_generator
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, MaskingRule, corrupt
from hf_ctxmodels.objectives.components.non_special_tokens import NonSpecialTokens
from hf_ctxmodels.objectives.components.tokenized_documents import RowTemplate, document_batches
from hf_ctxmodels.objectives.cross_lingual.language_streams import LanguageReader

_AT_START, _AT_END = 0.2, 0.2  # shares of the rows whose segment is there; the others' may be anywhere


Hidden = Literal["masks", "segment", "nothing"]


class MaskedRow(NamedTuple):
    """A row and its segments.

    Attributes:
        ids: (tokens,) as they are.
        places: Columns of the segments' tokens, ascending.
        corrupted: (tokens,) with masked segments.
    """

    ids: np.ndarray
    places: np.ndarray
    corrupted: np.ndarray


@dataclass
class DataCollatorForMaskedSegment(PaddingCollator):
    """Masks a segment of each row, or of each block of a row; the decoder is given the segments alone.

    A segment never holds a row's first token. Of its tokens 80% become the mask token, 10% a random token, and 10%
    stay. Without `block` a row has one segment of round(share * length) tokens: of the rows, 20% have it after the
    first token, 20% at the end, and 60% at a uniform place. `lambda_span` cuts it into pieces of so many tokens, the
    last one of the rest, which lie among the row's other tokens in random order; 20% of the rows then have the first
    piece after the first token, 20% the last one at the end. With `block` each block of so many tokens behind the first
    token has one segment of int(share * tokens) at a uniform place, as in the released summarising model.

    Each feature holds:
        input_ids: (tokens,) with special tokens.
        example_index, epoch: Integers that seed the masks.
        language: Optional, the number of the row's language.

    Returns:
        input_ids, attention_mask: (batch, width), padded on the tokenizer's side.
        labels: (batch, steps) the tokens of the segments, -100 behind them.
        decoder_input_ids, decoder_position_ids: (batch, steps) the token before each of them, unmasked, and its
            position.
        cross_attention_mask: (batch, width) 0 at what cross-attention does not see.
        langs, decoder_langs: (batch, width) and (batch, steps), if the features hold languages.

    Args:
        tokenizer: With a mask token and a padding token.
        share: Share of a row or block in its segment.
        mask_share, random_share: Shares of a segment's tokens; the rest is kept.
        block: Tokens of a block; None for one segment in a row.
        lambda_span: Tokens of a piece of a row's segment; None for one piece.
        hidden: What cross-attention does not see: mask tokens, as in the released translation model; the whole segment,
            its kept and random tokens too; or nothing.
        static: The same masks in every epoch.
        seed: Seed of the masks.

    Raises:
        CtxError: A value is out of range, the tokenizer lacks a token, or a feature a field.
    """

    share: float = 0.5
    mask_share: float = 0.8
    random_share: float = 0.1
    block: int | None = None
    lambda_span: int | None = None
    hidden: Hidden = "masks"
    static: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = MaskingRule(self.share, self.mask_share, self.random_share)
        check_choice(get_args(Hidden), hidden=self.hidden)
        check_at_least(2, **({} if self.block is None else {"block": self.block}))
        check_at_least(1, **({} if self.lambda_span is None else {"lambda_span": self.lambda_span}))
        if self.block is not None and self.lambda_span is not None:
            raise CtxError(
                f"block={self.block} and lambda_span={self.lambda_span} exclude each other.",
                hint="a block has one segment of one piece: give lambda_span without block.",
            )
        if self.tokenizer.mask_token_id is None:
            raise CtxError(f"{type(self.tokenizer).__name__} has no mask token.", hint="use one that has.")
        self.non_special = NonSpecialTokens(self.tokenizer)

    def segments(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Columns of the tokens in the segments of a row of `length` tokens, ascending."""
        if self.block is None:
            size = min(round(self.share * length), length - 1)
            if self.lambda_span is not None and size > self.lambda_span:
                return self.pieces(length, size, rng)
            draw, last = rng.random(), length - size
            start = 1 if draw < _AT_START else last if draw < _AT_START + _AT_END else int(rng.integers(1, last + 1))
            return np.arange(start, start + size)
        parts = [np.arange(0)]
        for first in range(1, length, self.block):
            stop = min(first + self.block, length)
            size = int(self.share * (stop - first))
            start = int(rng.integers(first, stop - size + 1))
            parts.append(np.arange(start, start + size))
        return np.concatenate(parts)

    def pieces(self, length: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Columns of a segment of `size` tokens in several pieces, see the class."""
        assert self.lambda_span is not None
        full, rest = divmod(size, self.lambda_span)
        parts = [self.lambda_span] * full + [rest] * (rest > 0)
        first, last, draw = 0, len(parts), rng.random()
        if draw < _AT_START:
            first = 1
        elif draw < _AT_START + _AT_END:
            last -= 1
        between = rng.permutation([*parts[first:last], *[0] * (length - 1 - size)])  # 0 is a token that is kept
        runs = np.concatenate([parts[:first], between, parts[last:]]).astype(np.int64)
        chosen = np.repeat(runs > 0, np.maximum(runs, 1))
        return 1 + np.flatnonzero(chosen)

    def masked(self, feature: Mapping[str, Any]) -> MaskedRow:
        """The row of a feature, masked."""
        ids = np.asarray(feature["input_ids"]).astype(np.int64)
        check_token_ids(ids, len(self.non_special.table))
        rng = feature_generator(feature, self.seed, self.static)
        places, mask = self.segments(len(ids), rng), int(self.tokenizer.mask_token_id)
        return MaskedRow(ids, places, corrupt(ids, places, self.rule, mask, self.non_special.ids, rng)[0])

    def read(self, rows: Sequence[MaskedRow]) -> Batch:
        """What the encoder is given of rows, and what cross-attention sees."""
        padder = RowPadder([len(row.ids) for row in rows], self.tokenizer.padding_side)
        batch = {
            "input_ids": padder.pad([row.corrupted for row in rows], int(self.tokenizer.pad_token_id)),
            "attention_mask": padder.attention_mask(),
        }
        if self.hidden != "nothing":
            batch["cross_attention_mask"] = padder.pad([self.seen(row).astype(np.int64) for row in rows], 0)
        return batch

    def seen(self, row: MaskedRow) -> np.ndarray:
        """(tokens,) bool: what cross-attention sees of a row."""
        if self.hidden == "masks":
            return row.corrupted != int(self.tokenizer.mask_token_id)
        return ~np.isin(np.arange(len(row.ids)), row.places)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [self.masked(feature) for feature in features]
        steps = RowPadder([len(row.places) for row in rows], "right")
        given = [row.ids[row.places - 1] for row in rows]
        batch = self.read(rows) | {
            "labels": steps.pad([row.ids[row.places] for row in rows], IGNORE_INDEX),
            "decoder_input_ids": steps.pad(given, int(self.tokenizer.pad_token_id)),
            "decoder_position_ids": steps.pad([row.places - 1 for row in rows], 0),
        }
        return batch | language_columns(features, batch, "language", "language")


@dataclass(frozen=True)
class SegmentOptions:
    """Options of all objectives that mask segments; see the collator. The defaults are those of the translation
    model."""

    share: float = flag(0.5, "Share of a row, or of a block, in the masked segment.")
    mask_share: float = flag(0.8, "Share of the segment's tokens replaced by the mask token.")
    random_share: float = flag(0.1, "Share of the segment's tokens replaced by a random one; the rest is kept.")
    block: int | None = flag(None, "One segment in each block of so many tokens; None: one in each row.")
    lambda_span: int | None = flag(None, "Cut a row's segment into pieces of so many tokens; None: one piece.")
    hidden: Hidden = flag("masks", "What cross-attention does not see: mask tokens, the whole segment, or nothing.")
    min_length: int = flag(5, "Rows of fewer tokens, special ones included, are left out.")
    language: str = flag("", "Name of the language of texts without a tag.")
    static: bool = flag(False, "The same masks in every epoch instead of new ones.")


@dataclass(frozen=True)
class MaskedSegmentOptions(SegmentOptions):
    """Options of `MaskedSegment`."""

    by_sentence: bool = flag(True, "Each sentence is a row; False: as many sentences of a document as fit.")


class MaskedSegment(Objective):
    """MASS's objective: write the masked segment of a text from the rest of it and from the segment's tokens before.

    A row is a sentence (a longer one than `max_length` is cut and continued), or with `by_sentence=False` whole
    sentences of a document, as many as fit. Texts of several languages have tags (`--language_tags`), and each row has
    one language.

    | document | source | targets |
    |---|---|---|
    | `a b c d e f` | `</s> a b _ _ _ f </s>` | `c d e`, given `b c d` at their positions |

    References: Song et al. 2019 (arXiv 1905.02450), section 3.1, and the released code.
    Related: `MaskedTranslation` is for texts with translations; `Denoising` writes the whole text.

    Example:
        >>> MaskedSegment(tokenizer, max_length=512, seed=0, share=0.15, block=64, hidden="nothing", by_sentence=False)
    """

    auto_class = "AutoModelForSeq2SeqLM"
    Options: ClassVar[type] = MaskedSegmentOptions
    Collator: ClassVar[type[DataCollatorForMaskedSegment]] = DataCollatorForMaskedSegment
    skip_reason: ClassVar[str] = "texts are too short"
    collate: DataCollatorForMaskedSegment

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        check_at_least(3, min_length=self.options.min_length)
        if max_length < self.options.min_length:
            raise CtxError(
                f"Rows have at most max_length={max_length} tokens, and those of fewer than "
                f"min_length={self.options.min_length} are left out.",
                hint="raise max_length, or lower min_length.",
            )
        self.template = RowTemplate(tokenizer, segments=1)
        self.room = self.template.room(max_length)
        self.reader = LanguageReader(tokenizer, self.options.language)
        self.collate = self.Collator(tokenizer, seed=seed, **collator_options(self.Collator, self.options))
        self.baseline = replace(self.baseline, excluded_ids=[int(tokenizer.pad_token_id)])

    @property
    def config_fields(self) -> dict[str, Any]:
        """The languages, and the token that a text begins with, which the decoder starts from."""
        names = self.reader.names if self.reader.is_multilingual else []
        start = int(self.template.fill(np.zeros(0, dtype=np.int32))[0])
        known = {"lang2id": {name: number for number, name in enumerate(names)}} if names else {}
        return {"n_langs": max(1, len(names)), "decoder_start_token_id": start, **known}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Rows with input_ids, and language with several languages; raises CtxError if all texts are left out."""
        some = False
        for batch in document_batches(documents):
            for document in self.reader.read(batch):
                self.statistics.update(
                    documents=1, sentences=len(document), tokens=sum(len(ids) for _, ids in document)
                )
                for language, ids in self._texts(document):
                    if len(ids) + self.template.special_tokens < self.options.min_length:
                        self.statistics["left_out"] += 1
                        continue
                    row: Example = {"input_ids": self.template.fill(ids)}
                    some = True
                    yield row | ({"language": language} if self.reader.is_multilingual else {})
        if not some:
            raise self.nothing_left()

    def nothing_left(self) -> CtxError:
        """The error for text of which no row is left."""
        return CtxError(
            f"No row is left: all {self.statistics['left_out']:,} {self.skip_reason}.",
            hint=f"raise max_length={self.max_length}, lower min_length={self.options.min_length}, or give other text.",
        )

    def _texts(self, document: list[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
        """The language and (tokens,) ids of each row's text."""
        waiting: list[np.ndarray] = []
        current = 0
        for language, ids in document:
            for start in range(0, len(ids), self.room):
                piece = ids[start : start + self.room]
                joins = not self.options.by_sentence and language == current
                if waiting and not (joins and sum(map(len, waiting)) + len(piece) <= self.room):
                    yield current, np.concatenate(waiting)
                    waiting = []
                waiting.append(piece)
                current = language
        if waiting:
            yield current, np.concatenate(waiting)

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        masks = int((batch["input_ids"] == self.tokenizer.mask_token_id).sum())
        tokens = int(batch["attention_mask"].sum())
        return {
            "rows": len(batch["labels"]),
            "tokens": tokens,
            "positions": batch["attention_mask"].numel(),
            "targets": int((batch["labels"] != IGNORE_INDEX).sum()),
            "target_positions": batch["labels"].numel(),
            "masks": masks,
        }

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        return {
            "fill": counts["tokens"] / max(1, counts["positions"]),
            "target_fill": counts["targets"] / max(1, counts["target_positions"]),
            "segment": counts["targets"] / max(1, counts["tokens"]),
            "masks": counts["masks"] / max(1, counts["targets"]),
        }
