"""Permutation language modeling (Yang et al. 2019, "XLNet", sections 2.2 to 2.5)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import NO_TARGET
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, pad_targets
from hf_ctxmodels.data.seeding import Purpose, generator
from hf_ctxmodels.data.training_set import ExampleSampling
from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.features import NonSpecialTokens, feature_generator, feature_word_ids, padded_columns
from hf_ctxmodels.objectives.spans import Units, harmonic, sample_spans, trim_to_budget
from hf_ctxmodels.objectives.tokenized_documents import (
    NO_WORD,
    SpecialTokensTemplate,
    TokenizedDocument,
    concatenate_words,
    tokenized_batches,
)

RANDOM_SEGMENT_SHARE = 0.5  # share of examples with a random segment B, as in the released data preparation
UNPREDICTED_RANK = -1  # of a token of the first block that is not predicted


@dataclass
class DataCollatorForPermutationLM(PaddingCollator):
    """Pads a batch, selects the tokens to predict, and samples the factorization order of each example.

    `input_ids` are the real tokens: the content stream sees them, and only the query stream, which knows a target's
    position but not its token, predicts. (`transformers.DataCollatorForPermutationLanguageModeling` puts mask tokens
    into the content stream, so that no prediction sees an earlier one.)

    Targets are spans of 1 to `max_span` words or tokens, p(n) proportional to 1/n, each at a random position in a
    context of `partial_prediction` times its length. Special tokens are never targets. Every example with at least one
    other token has at least one target.

    The content of position i sees position j if `permutation_order[j] <= permutation_order[i]`; the query of target i
    sees j if `permutation_order[j] < permutation_order[i]`. Each target has a different rank, and all other tokens have
    rank -1, visible to every position. (In the released code special tokens keep random ranks, too: tokens of rank -1
    do not see them, and they see targets of lower ranks.)

    With `reuse_length` an example has two blocks: its first `reuse_length` tokens, whose hidden states are the memory
    of the next example, and the rest. The order is sampled within each block. All ranks of the second block are higher
    than all ranks of the first, so that it sees the whole first block, which does not see it: its tokens that are not
    targets share its lowest rank instead of -1.

    Each feature holds:
        input_ids: (tokens,) with special tokens; any length.
        word_ids: (tokens,), required with `whole_word`; None or -1 for special tokens.
        attention_mask, token_type_ids: (tokens,), optional, padded and returned.

    Returns, in addition to input_ids and attention_mask (batch, width), all int64:
        permutation_order: (batch, width) ranks; see above. -1 at padding.
        target_positions: (batch, targets) positions of the targets, ascending; -1 after the last target of an example.
        labels: (batch, targets) their tokens; -100 after the last target of an example.
    """

    partial_prediction: float = flag(6.0, "One in this many tokens is predicted (the paper's K).")
    max_span: int = flag(5, "Maximum span length in words.")
    num_predictions: int | None = flag(None, "Exact number of predictions in an example instead of one token in K.")
    whole_word: bool = False
    reuse_length: int | None = flag(None, "Tokens of an example in the memory of the next; by default half of it.")
    static: bool = flag(False, "The same targets and order in every epoch instead of new ones.")
    seed: int = 0
    pad_to_multiple_of: int | None = flag(None, "Round the width of a batch up to a multiple of this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "partial_prediction", "max_span", at_least=1)
        check_range(self, "num_predictions", "reuse_length", at_least=1)
        self.first_block = self.reuse_length
        self.non_special = NonSpecialTokens(self.tokenizer)
        self.span_lengths = harmonic(self.max_span)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for their columns and the returned ones."""
        sequences = [np.asarray(feature["input_ids"]) for feature in features]
        padder, inputs = self.pad_inputs(sequences, self.pad_to_multiple_of)
        orders, targets, labels = [], [], []
        for feature, ids, offset in zip(features, sequences, padder.offsets.tolist()):
            words = feature_word_ids(feature) if self.whole_word else None
            rng = feature_generator(feature, self.seed, period=1 if self.static else None)
            order, positions = self.sample_order(ids, words, rng)
            orders.append(order)
            targets.append(positions + offset)
            labels.append(ids[positions])
        return {
            **inputs,
            "permutation_order": padder.pad(orders, UNPREDICTED_RANK),
            "target_positions": pad_targets(targets, NO_TARGET),
            "labels": pad_targets(labels),
            **padded_columns(features, ("attention_mask", "token_type_ids"), padder, self.tokenizer),
        }

    def sample_order(
        self, ids: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks (tokens,) of one example, and its targets' positions, ascending; see the class."""
        candidates = self.non_special.candidates(ids)
        bounds = [0, len(ids)]
        if self.first_block is not None and self.first_block < len(ids):
            bounds.insert(1, self.first_block)
        blocks = [slice(start, stop) for start, stop in pairwise(bounds)]
        units = [Units.of(candidates[block], None if word_ids is None else word_ids[block]) for block in blocks]
        targets_by_block = self._select(units, rng)
        order = np.empty(len(ids), dtype=np.int64)
        lowest = UNPREDICTED_RANK
        for block, targets in zip(blocks, targets_by_block):
            ranks = order[block]  # a view
            ranks[:] = lowest
            ranks[targets] = lowest + 1 + rng.permutation(len(targets))
            lowest += 1 + len(targets)
        return order, np.concatenate([block.start + targets for block, targets in zip(blocks, targets_by_block)])

    def _select(self, blocks: list[Units], rng: np.random.Generator) -> list[np.ndarray]:
        """Positions of the targets within each block."""
        spans_by_block = [sample_spans(len(units), self.span_lengths, self.partial_prediction, rng) for units in blocks]
        if self.num_predictions is not None:
            ends = np.cumsum([0, *(len(units.positions) for units in blocks)])
            # each block's share of the number of predictions
            budgets = np.diff(np.round(ends * min(self.num_predictions / max(1, ends[-1]), 1.0)).astype(np.int64))
            return [
                trim_to_budget(spans, units, budget, rng)
                for spans, units, budget in zip(spans_by_block, blocks, budgets.tolist())
            ]
        marks_by_block = [np.zeros(len(units), dtype=bool) for units in blocks]
        for marks, spans in zip(marks_by_block, spans_by_block):
            for start, stop in spans.tolist():
                marks[start:stop] = True
        if not any(marks.any() for marks in marks_by_block):
            unit = int(rng.integers(max(1, sum(map(len, blocks)))))
            for marks in marks_by_block:
                marks[unit : unit + 1] = True
                unit -= len(marks)
                if unit < 0:
                    break
        return [units.tokens(marks) for units, marks in zip(blocks, marks_by_block)]

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Examples, non-special tokens, targets and spans of a collated batch."""
        ids, positions = batch["input_ids"], batch["target_positions"]
        non_special = torch.from_numpy(self.non_special.table).to(ids.device)[ids].sum()
        before = torch.nn.functional.pad(positions, (1, 0), value=NO_TARGET - 1)[:, :-1]
        targets = positions != NO_TARGET
        spans = targets & (positions != before + 1)
        totals = torch.stack([non_special, targets.sum(), spans.sum()]).tolist()
        return {"examples": len(ids), **dict(zip(("non_special_tokens", "targets", "spans"), totals))}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Share of predicted tokens, predictions per example, and tokens per span."""
        targets = counts["targets"]
        return {
            "selected_share": targets / max(1, counts["non_special_tokens"]),
            "predictions_per_example": targets / max(1, counts["examples"]),
            "tokens_per_span": targets / max(1, counts["spans"]),
        }


@dataclass
class PermutationLM(DataCollatorForPermutationLM, Objective):
    """XLNet's objective: predict one token in six, in a random order, from the preceding tokens in that order.

    `reused text, segment A <sep> segment B <sep> <cls>` is cut from the concatenated documents. In one half of the
    examples B continues A; in the other it is text from a random position. A ends at a sentence end, if there is one.

    Without memory an example begins where the text of the previous one ended, and the last ones are shorter. With
    `memory_length` the sampling is contiguous, and example i + 1 begins `reuse_length` tokens after example i, so that
    the reused parts form the text without gaps. All examples then have the full length; the remaining text is counted
    as truncated.

    A span has 1 to 5 words, and its context includes it (section 3.1). In the released code it begins with a word but
    has 1 to 5 tokens, and its context does not include it.

    | document | example | targets |
    |---|---|---|
    | running text | `A <sep> B <sep> <cls>` | about 1/6 of the tokens, in spans of 1 to 5 words |

    References: Yang et al. 2019, sections 2.3 (partial prediction), 2.4 (memory), 2.5 (segments), 3.1 (spans), and the
    released data preparation.
    Related: `MaskedLM` predicts all targets at once and puts mask tokens into the input; `CausalLM` has one fixed
    order.

    Example:
        >>> PermutationLM(tokenizer, max_length=512, seed=0, memory_length=384, reuse_length=256, num_predictions=85)
    """

    auto_class = "AutoModelForPreTraining"
    whole_word: bool = flag(True, "Spans consist of whole words instead of tokens.")
    memory_length: int = flag(0, "Number of earlier hidden states that an example attends to; 0: no memory.")
    document_end: str = flag("<eod>", "Token after every document; `none` for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "memory_length", at_least=0)
        self.template = SpecialTokensTemplate(self.tokenizer, segments=2)
        self.max_text_tokens = self.template.num_text_tokens(self.max_length)
        self.first_block = None
        if self.memory_length:
            self.first_block = self._first_block()
            self.sampling = ExampleSampling(contiguous=True)
            self.config_fields = {"mem_len": self.memory_length, "reuse_len": self.first_block, "use_mems_train": True}
        elif self.reuse_length is not None:
            raise CtxError(f"reuse_length={self.reuse_length} needs a memory.", hint="set memory_length as well.")
        if self.document_end not in ("none", *self.tokenizer.get_vocab()):
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no token {self.document_end!r} for the end of a document.",
                hint="name another special token, or use document_end=none.",
            )

    def _first_block(self) -> int:
        """Number of tokens that an example shares with the next one."""
        if self.template.leading:
            raise CtxError(
                f"{type(self.tokenizer).__name__} begins examples with special tokens, so they cannot be continued.",
                hint="use a tokenizer that puts them at the end (A <sep> B <sep> <cls>), or memory_length=0.",
            )
        reuse_length = self.max_length // 2 if self.reuse_length is None else self.reuse_length
        if not 0 < reuse_length <= self.max_text_tokens - 2:
            raise CtxError(
                f"reuse_length={reuse_length} is out of range for examples of {self.max_length} tokens.",
                hint=f"use 1 to {self.max_text_tokens - 2}, so that two segments fit after it.",
            )
        return reuse_length

    def examples(self, documents: Iterable[list[str]], epoch: int = 0) -> Iterator[Example]:
        """Examples with input_ids, token_type_ids and, with `whole_word`, word_ids; raises CtxError if, with a memory,
        the text is shorter than an example."""
        text, start, number = concatenate([]), 0, 0
        for batch in tokenized_batches(self.tokenizer, documents, self.whole_word):
            for document in batch:
                self.statistics.update(documents=1, sentences=len(document), tokens=len(document.ids))
            ended = [self._with_end(document) for document in batch if len(document)]
            text = concatenate([*([_from(text, start)] if len(text.ids) else []), *ended])
            start = 0
            while start + self.max_text_tokens <= len(text.ids):  # full examples
                example, start = self._example(text, start, generator(self.seed, epoch, number, Purpose.PAIRING))
                yield example
                number += 1
        if self.first_block is None:
            while start < len(text.ids):  # shorter examples at the end of the text
                example, start = self._example(text, start, generator(self.seed, epoch, number, Purpose.PAIRING))
                yield example
                number += 1
        elif not number and len(text.ids):
            raise CtxError(
                f"The text has {self.statistics['tokens']} tokens, but with a memory every example has "
                f"{self.max_length}.",
                hint="use more text, a smaller max_length, or memory_length=0.",
            )
        else:
            self.statistics["truncated_tokens"] += len(text.ids) - start

    def _with_end(self, document: TokenizedDocument) -> TokenizedDocument:
        """The document with its end token."""
        if self.document_end == "none":
            return document
        words, end = document.word_ids, self.tokenizer.convert_tokens_to_ids(self.document_end)
        return TokenizedDocument(
            np.append(document.ids, np.int32(end)),
            None if words is None else np.append(words, np.int32(NO_WORD)),
            np.append(document.bounds[:-1], document.bounds[-1] + 1),
        )

    def _example(self, text: TokenizedDocument, start: int, rng: np.random.Generator) -> tuple[Example, int]:
        """The example that begins at token `start`, and the start of the next one.

            | reused text | segment A | segment B |
            start         a_start     a_end       stop

        There is no reused text without memory. B continues A as drawn, or is text [b_start, b_end) from a random
        sentence on. The next example begins at `a_start` with a memory, else at `stop`, or at `a_end` if B is random.
        """
        a_start = start + (self.first_block or 0)
        stop = min(start + self.max_text_tokens, len(text.ids))
        first, last = np.searchsorted(text.bounds, a_start, "right"), np.searchsorted(text.bounds, stop, "left")
        sentence_ends = text.bounds[first:last]
        if stop - a_start < 2:
            a_end = stop  # a single token remains
        elif len(sentence_ends):
            a_end = int(rng.choice(sentence_ends))
        else:
            a_end = int(rng.integers(a_start + 1, stop))
        b_start, b_end, next_start = a_end, stop, stop
        if a_end == stop or rng.random() < RANDOM_SEGMENT_SHARE:  # at most `length` tokens from a random sentence on
            length = self.max_text_tokens - (a_end - start)
            sentence = int(text.bounds[rng.integers(len(text))])
            b_start = max(0, min(sentence, len(text.ids) - length))
            b_end, next_start = min(b_start + length, len(text.ids)), a_end
        example = self.template.example(text, (start, a_end), (b_start, b_end), with_token_types=True)
        return example, a_start if self.first_block else next_start


def concatenate(documents: list[TokenizedDocument]) -> TokenizedDocument:
    """Concatenate documents, and renumber their words."""
    starts = np.cumsum([0, *(len(document.ids) for document in documents)])
    bounds = [document.bounds[:-1] + start for document, start in zip(documents, starts)]
    words = [document.word_ids for document in documents if document.word_ids is not None]
    return TokenizedDocument(
        np.concatenate([np.empty(0, dtype=np.int32), *(document.ids for document in documents)]),
        concatenate_words(words) if len(words) == len(documents) else None,
        np.concatenate([*bounds, starts[-1:]]).astype(np.int64),
    )


def _from(text: TokenizedDocument, start: int) -> TokenizedDocument:
    """The text from token `start` on, its words numbered from zero."""
    bounds = text.bounds[np.searchsorted(text.bounds, start, "right") :] - start
    remaining = TokenizedDocument(text.ids[start:], None, np.concatenate([[0], bounds]))
    if text.word_ids is None:
        return remaining
    words = text.word_ids[start:]
    is_word = words != NO_WORD
    lowest = int(words[is_word].min()) if is_word.any() else 0
    return replace(remaining, word_ids=np.where(is_word, words - lowest, NO_WORD).astype(np.int32))


def expand_permutation(
    permutation_order: torch.Tensor, target_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masks of `transformers.XLNetLMHeadModel`, from the compact form of the collator.

    Returns:
        perm_mask: (batch, width, width) float, 1 where position i may not see position j. A target does not see itself;
            the model lets its content stream do so.
        target_mapping: (batch, targets, width) float, one-hot; all zeros for none.
    """
    is_target = target_positions != NO_TARGET
    target_mapping = torch.nn.functional.one_hot(target_positions.clamp(min=0), permutation_order.shape[1])
    target_mapping = target_mapping * is_target[..., None]
    hidden = permutation_order[:, None, :] > permutation_order[:, :, None]
    hidden |= torch.diag_embed(target_mapping.any(dim=1))
    return hidden.float(), target_mapping.float()
