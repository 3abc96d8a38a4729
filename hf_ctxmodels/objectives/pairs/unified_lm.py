"""Masked tokens of rows that are read in four ways (Dong et al. 2019, "UniLM")."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX, masking_rates
from hf_ctxmodels.objectives.components.skipgrams import SkipgramRule
from hf_ctxmodels.objectives.components.tokenized_documents import TokenizedDocument
from hf_ctxmodels.objectives.masked.masked_lm import SelectionOptions
from hf_ctxmodels.objectives.pairs.next_sentence import CONTINUATION, RANDOM, DataCollatorForMaskedLMWithNextSentence
from hf_ctxmodels.objectives.pairs.sentence_pairs import Choice, Piece, SentencePairs, filling_stop, random_split

KINDS = ("bidirectional", "sequence_to_sequence", "left_to_right", "right_to_left")
"""How a row is read."""

# Labels of a `Choice` beside those of a bidirectional pair, and the segments of such rows in place of 0 and 1.
SEQUENCE_TO_SEQUENCE, LEFT_TO_RIGHT, RIGHT_TO_LEFT = -1, -2, -3
_SEGMENTS = {SEQUENCE_TO_SEQUENCE: (4, 5), LEFT_TO_RIGHT: (2, 2), RIGHT_TO_LEFT: (3, 3)}


@dataclass
class DataCollatorForUnifiedLM(DataCollatorForMaskedLMWithNextSentence):
    """Masks rows as `DataCollatorForMaskedLM` does, runs of tokens as `SkipgramRule` says, and carries
    `next_sentence_label`.

    Each feature holds, in addition to what the masking collator needs:
        token_type_ids: (tokens,), which say how the row is read.
        next_sentence_label: Of a bidirectional pair; -100 of other rows.

    Returns: what the masking collator returns, and next_sentence_label (batch,) int64.

    Args:
        skipgram_probability, skipgram_size: See `SkipgramRule`.
    """

    objective = "UnifiedLM"

    skipgram_probability: float = 0.2
    skipgram_size: int = 3

    def rule(self) -> SkipgramRule:
        """The rule of these arguments."""
        return SkipgramRule(
            probability=self.mlm_probability,
            mask_share=self.mask_share,
            random_share=self.random_share,
            whole_word=self.whole_word,
            max_predictions=self.max_predictions,
            skipgram_probability=self.skipgram_probability,
            skipgram_size=self.skipgram_size,
        )


@dataclass(frozen=True)
class SkipgramOptions(SelectionOptions):
    """Options of all objectives that select as `SkipgramRule` does."""

    whole_word: bool = flag(False, "Mask all pieces of a word or none.")
    skipgram_probability: float = flag(0.2, "Probability of a run of several tokens in place of a single one.")
    skipgram_size: int = flag(3, "Longest run of tokens.")


@dataclass(frozen=True)
class UnifiedLMOptions(SkipgramOptions):
    """Options of `UnifiedLM`; the shares have a sum of 1."""

    bidirectional: float = flag(1 / 3, "Share of the rows that are pairs, read in both directions.")
    sequence_to_sequence: float = flag(1 / 3, "Share of the rows that are a source and its target.")
    left_to_right: float = flag(1 / 6, "Share of the rows read from left to right.")
    right_to_left: float = flag(1 / 6, "Share of the rows read from right to left.")
    short_seq_probability: float = flag(0.1, "Share of the documents whose rows get a random shorter length.")


class UnifiedLM(SentencePairs):
    """UniLM's objective: predict masked tokens of rows that are read in four ways.

    How a row is read is drawn by the shares, and its segments say it to the model. A bidirectional row is a pair as for
    next-sentence prediction, of which half the second segments are of another document, with its label. A source and
    its target are two neighbouring segments of a document, of which the tokens of both are masked; a single sentence
    is cut at a random token. A row in one direction is one segment. Rows are filled as `SentencePairs` says.

    | row | segments | a token sees |
    |---|---|---|
    | `[CLS] A [SEP] B [SEP]`, bidirectional | 0, 1 | all |
    | `[CLS] A [SEP] B [SEP]`, sequence to sequence | 4, 5 | of A all of A; of B all of A, and B up to itself |
    | `[CLS] A [SEP]`, left to right | 2 | those up to itself |
    | `[CLS] A [SEP]`, right to left | 3 | those from itself on |

    Targets are 15% of the tokens, selected one by one and with probability 0.2 in runs of two or three: 80% masked, 10%
    random, 10% unchanged. Needs at least two documents, unless no row is bidirectional.

    References: Dong et al. 2019 (arXiv 1905.03197), sections 2.3 and 2.4. The pretraining code was not released; the
    selection of tokens is that of the released fine-tuning code.
    Related: `MaskedLMWithNextSentence` has bidirectional pairs only; `MaskedSequenceToSequence` fine-tunes on pairs of
    source and target.

    Example:
        >>> UnifiedLM(tokenizer, max_length=512, seed=0, max_predictions=80)
    """

    Options: ClassVar[type] = UnifiedLMOptions
    Collator = DataCollatorForUnifiedLM
    collate: DataCollatorForUnifiedLM

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, seed: int, **options: Any) -> None:
        super().__init__(tokenizer, max_length=max_length, seed=seed, **options)
        self.shares = np.array([getattr(self.options, kind) for kind in KINDS])
        if self.shares.min() < 0 or abs(self.shares.sum() - 1) > 1e-6:
            given = ", ".join(f"{kind}={share:g}" for kind, share in zip(KINDS, self.shares))
            raise CtxError(f"{given} are not shares of a whole.", hint="use non-negative numbers with a sum of 1.")

    @property
    def config_fields(self) -> dict[str, Any]:
        """The tokens that the writing head needs."""
        return generation_config_fields(self.tokenizer, self.tokenizer.mask_token_id)

    @property
    def samples_other_documents(self) -> bool:
        """See `SentencePairs`."""
        return bool(self.shares[0] > 0)

    def choices(
        self, document: TokenizedDocument, target: int, other: Callable[[int], Piece], rng: np.random.Generator
    ) -> Iterator[Choice]:
        """See `SentencePairs.choices`; the label is that of a bidirectional pair, or says how the row is read."""
        start = 0
        while start < len(document):
            stop = filling_stop(document, start, target)
            split = random_split(start, stop, rng)
            first, rest = Piece.of(document, start, split), Piece.of(document, split, stop)
            whole = Piece.of(document, start, stop)
            kind = KINDS[int(rng.choice(len(KINDS), p=self.shares / self.shares.sum()))]
            if kind == "bidirectional" and (not len(rest) or rng.random() < 0.5):
                yield Choice((first, other(target - len(first))), RANDOM)
                stop = split
            elif kind == "bidirectional":
                yield Choice((first, rest), CONTINUATION)
            elif kind == "sequence_to_sequence" and len(whole) > 1:
                yield Choice((first, rest) if len(rest) else cut_in_two(whole, rng), SEQUENCE_TO_SEQUENCE)
            else:
                yield Choice((whole,), RIGHT_TO_LEFT if kind == "right_to_left" else LEFT_TO_RIGHT)
            start = stop

    def _row(self, choice: Choice, rng: np.random.Generator) -> Example:
        own = _SEGMENTS.get(choice.label)
        if own is None:
            return super()._row(choice, rng)
        row = super()._row(choice._replace(label=IGNORE_INDEX), rng)
        row["token_type_ids"] = np.asarray(own, dtype=np.uint8)[row["token_type_ids"]]
        return row

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """See `Objective.count`."""
        types, labels = batch["token_type_ids"].amax(1), batch[self.Collator.label]
        own = {"sequence_to_sequence": types >= 4, "left_to_right": types == 2, "right_to_left": types == 3}
        kinds = {"bidirectional": int((types <= 1).sum())} | {kind: int(rows.sum()) for kind, rows in own.items()}
        return {**self.collate.masker.count(batch), **kinds, "random_next": int((labels == RANDOM).sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """See `Objective.rates`."""
        rows = max(1, counts["rows"])
        return {
            **masking_rates(counts),
            **{f"{kind}_share": counts[kind] / rows for kind in KINDS},
            "random_next_share": counts["random_next"] / max(1, counts["bidirectional"]),
        }


def cut_in_two(piece: Piece, rng: np.random.Generator) -> tuple[Piece, Piece]:
    """A piece of two tokens or more, cut at a random one."""
    place = piece.start + int(rng.integers(1, len(piece)))
    return Piece(piece.document, piece.start, place), Piece(piece.document, place, piece.stop)


def generation_config_fields(tokenizer: PreTrainedTokenizerBase, query: int | None) -> dict[str, Any]:
    """Fields of the configuration of an encoder that writes.

    Args:
        tokenizer: Its separator ends a target, its first token is the first of `decoder_input_ids`.
        query: Id of the token that predicts.

    Raises:
        CtxError: One of these tokens is None.
    """
    needed = {"mask_token": query, "cls_token": tokenizer.cls_token_id, "sep_token": tokenizer.sep_token_id}
    for name, number in needed.items():
        if number is None:
            raise CtxError(
                f"{type(tokenizer).__name__} has no {name}: each token of a target is predicted by a mask token, after "
                "a first token ([CLS]) and up to a separator ([SEP]).",
                hint=f"use the family's tokenizer; or set it, tokenizer.{name} = ..., to a token of the vocabulary.",
            )
    return {
        "query_token_id": query,
        "decoder_start_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
