"""Permutation language modelling (Yang et al. 2019, "XLNet", sections 2.2 to 2.5)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.padding import Batch, PaddingCollator, RowPadder
from hf_ctxmodels.data.training_set import SamplingPolicy
from hf_ctxmodels.objectives.autoregressive.contiguous_text import ContiguousText
from hf_ctxmodels.objectives.base import Objective, check_at_least
from hf_ctxmodels.objectives.components.features import (
    NonSpecialTokens,
    feature_generator,
    feature_word_ids,
    padded_columns,
)
from hf_ctxmodels.objectives.components.spans import Units, harmonic, sample_spans, trim_to_budget
from hf_ctxmodels.objectives.components.tokenized_documents import (
    DOCUMENTS_PER_BATCH,
    SpecialTokensTemplate,
    tokenized_batches,
)

UNPREDICTED_RANK = -1
"""Rank of a token that is not predicted (in the first block of an example)."""
NO_TARGET = -1
"""Padding of `target_positions`."""


@dataclass
class DataCollatorForPermutationLM(PaddingCollator):
    """Pads a batch, selects the tokens to predict, and samples the factorisation order of each example.

    `input_ids` are the real tokens: the content stream sees them, and only the query stream, which knows a target's
    position but not its token, predicts. (`transformers.DataCollatorForPermutationLanguageModeling` puts mask tokens
    into the content stream, so that no prediction sees an earlier one; it also requires even lengths and samples from
    global state.)

    Targets are spans of 1 to `max_span` words or tokens, p(n) proportional to 1/n, each at a random position in a
    context of `partial_prediction` times its length. Special tokens are never targets; every other example has at least
    one.

    Visibility depends only on `permutation_order`. The content of position i sees position j if
    `order[j] <= order[i]`; the query of target i sees j if `order[j] < order[i]`. Each target has a different rank; all
    other tokens have the rank -1, so every position sees them. Hence nothing that a target's query sees, directly or
    through other positions, depends on the target or on later ones.

    With `reuse_length` an example has two blocks: its first `reuse_length` tokens, whose hidden states are the memory
    of the next example, and the rest. The order is sampled within each block, and all ranks of the second are higher:
    it sees the whole first block, which does not see it. So the memory depends on no target of the next example.

    Each feature holds:
        input_ids: (tokens,) with special tokens; any length.
        example_index, epoch: Integers that seed targets and order.
        word_ids: (tokens,), required with `whole_word`; None or -1 for special tokens.
        attention_mask, token_type_ids: (tokens,), optional, padded and returned.

    Returns, all int64:
        input_ids, attention_mask (batch, width), and token_type_ids if the features hold them.
        permutation_order: (batch, width) ranks; see above. -1 at padding.
        target_positions: (batch, targets) positions of the targets, ascending; -1 after the last target of an example.
        labels: (batch, targets) their tokens; -100 after the last target of an example.

    Args:
        tokenizer: With a padding token.
        partial_prediction: One in this many tokens is predicted (K).
        max_span: Maximum span length, in words or tokens.
        num_predictions: Exact number of targets per example (at most its non-special tokens), instead of about 1/K.
        whole_word: Spans consist of whole words.
        reuse_length: Length of the first block; None if examples share no text.
        static: The same targets and order in every epoch.
        seed: Seed of targets and order.
        pad_to_multiple_of: Round the width of the batch up.

    Raises:
        CtxError: A feature lacks a column, or contains ids outside the tokenizer's vocabulary.

    Example:
        >>> collate = DataCollatorForPermutationLM(tokenizer, seed=1)
        >>> batch = collate([{"input_ids": tokenizer("a cat sat").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels', 'permutation_order', 'target_positions']
    """

    partial_prediction: float = flag(6.0, "One in this many tokens is predicted (the paper's K).")
    max_span: int = flag(5, "Maximum span length in words.")
    num_predictions: int | None = flag(None, "Exact number of predictions in an example instead of one token in K.")
    whole_word: bool = False
    reuse_length: int | None = flag(
        None, "Tokens of an example in the memory of the next one; by default half of the example."
    )
    static: bool = flag(False, "The same targets and order in every epoch instead of new ones.")
    seed: int = 0
    pad_to_multiple_of: int | None = flag(None, "Round the width of a batch up to a multiple of this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial_prediction < 1:
            raise CtxError(
                f"partial_prediction={self.partial_prediction} is out of range.",
                hint="use 1 (predict all tokens) or more; the paper uses 6 or 7.",
            )
        check_at_least(1, max_span=self.max_span, num_predictions=self.num_predictions, reuse_length=self.reuse_length)
        self.first_block = self.reuse_length
        self.non_special = NonSpecialTokens(self.tokenizer)
        self.span_lengths = harmonic(self.max_span)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for their columns and the returned ones."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        padder = RowPadder([len(ids) for ids in rows], self.tokenizer.padding_side, self.pad_to_multiple_of)
        orders, targets, labels = [], [], []
        for feature, ids, offset in zip(features, rows, padder.offsets.tolist()):
            words = feature_word_ids(feature) if self.whole_word else None
            order, positions = self.sample_order(ids, words, feature_generator(feature, self.seed, self.static))
            orders.append(order)
            targets.append(positions + offset)
            labels.append(ids[positions])
        target_padder = RowPadder([len(positions) for positions in targets], "right")
        return {
            "input_ids": padder.pad(rows, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "permutation_order": padder.pad(orders, UNPREDICTED_RANK),
            "target_positions": target_padder.pad(targets, NO_TARGET),
            "labels": target_padder.pad(labels, IGNORE_INDEX),
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

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Examples, non-special tokens, targets and spans of a collated batch."""
        ids, positions = batch["input_ids"], batch["target_positions"]
        non_special = torch.from_numpy(self.non_special.table).to(ids.device)[ids].sum()
        before = torch.nn.functional.pad(positions, (1, 0), value=NO_TARGET - 1)[:, :-1]
        targets = positions != NO_TARGET
        spans = targets & (positions != before + 1)
        totals = torch.stack([non_special, targets.sum(), spans.sum()]).tolist()
        return {"rows": len(ids), **dict(zip(("non_special_tokens", "targets", "spans"), totals))}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Share of predicted tokens, predictions per example, and tokens per span."""
        targets = counts["targets"]
        return {
            "selected_share": targets / max(1, counts["non_special_tokens"]),
            "predictions_per_row": targets / max(1, counts["rows"]),
            "tokens_per_span": targets / max(1, counts["spans"]),
        }


@dataclass
class PermutationLM(DataCollatorForPermutationLM, Objective):
    """XLNet's objective: predict one token in six, in a random order, from the preceding tokens in that order.

    `ContiguousText` cuts the examples from the text. With `memory_length` the first `reuse_length` tokens of an example
    are the memory of the next one, and the sampling is contiguous.

    | document | example | targets |
    |---|---|---|
    | running text | `A <sep> B <sep> <cls>` | about 1/6 of the tokens, in spans of 1 to 5 words |

    References: Yang et al. 2019, sections 2.3 (partial prediction), 2.4 (memory), 2.5 (segments), 3.1 (spans).
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
        self.template = SpecialTokensTemplate(self.tokenizer, segments=2)
        self.first_block = self._first_block(self.template.room(self.max_length))
        self.sampling = SamplingPolicy(contiguous=self.first_block is not None)
        self.text = ContiguousText(
            self.template, self.max_length, self.first_block or 0, self._document_end_id(), self.seed
        )

    @property
    def config_fields(self) -> dict[str, Any]:
        """The lengths of the memory and of the reused part of an example."""
        if self.first_block is None:
            return {}
        return {"mem_len": self.memory_length, "reuse_len": self.first_block, "use_mems_train": True}

    def examples(self, documents: Iterable[list[str]], pass_index: int = 0) -> Iterator[Example]:
        """Examples with input_ids, token_type_ids and, with `whole_word`, word_ids.

        Raises:
            CtxError: With a memory, the text is shorter than an example.
        """
        batches = tokenized_batches(self.tokenizer, documents, DOCUMENTS_PER_BATCH, self.whole_word)
        is_empty = True
        for example in self.text.cut(batches, pass_index, self.statistics):
            is_empty = False
            yield example
        if is_empty and self.first_block is not None and self.statistics["tokens"]:
            raise CtxError(
                f"The text has {self.statistics['tokens']} tokens, but with a memory every example has "
                f"{self.max_length}.",
                hint="use more text, a smaller max_length, or memory_length=0.",
            )

    def _first_block(self, room: int) -> int | None:
        """Number of tokens that an example shares with the next one; None without memory."""
        memory_length, reuse_length = self.memory_length, self.reuse_length
        if memory_length < 0:
            raise CtxError(f"memory_length={memory_length} is negative.", hint="use 0 for no memory.")
        if not memory_length:
            if reuse_length is not None:
                raise CtxError(f"reuse_length={reuse_length} needs a memory.", hint="set memory_length as well.")
            return None
        if self.template.leading:
            raise CtxError(
                f"{type(self.tokenizer).__name__} begins examples with special tokens, so they cannot be continued.",
                hint="use a tokenizer that puts them at the end (A <sep> B <sep> <cls>), or memory_length=0.",
            )
        reuse_length = self.max_length // 2 if reuse_length is None else reuse_length
        if not 0 < reuse_length <= room - 2:
            raise CtxError(
                f"reuse_length={reuse_length} is out of range for examples of {self.max_length} tokens.",
                hint=f"use 1 to {room - 2}, so that two segments fit after it.",
            )
        return reuse_length

    def _document_end_id(self) -> int | None:
        token = self.document_end
        if token == "none":
            return None
        if token not in self.tokenizer.get_vocab():
            raise CtxError(
                f"{type(self.tokenizer).__name__} has no token {token!r} for the end of a document.",
                hint="name another special token, or use document_end=none.",
            )
        return self.tokenizer.convert_tokens_to_ids(token)


def expand_permutation(
    permutation_order: torch.Tensor, target_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masks of `transformers.XLNetLMHeadModel`, from the compact form of the collator.

    Args:
        permutation_order: (batch, width) int64.
        target_positions: (batch, targets) int64, -1 for none.

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
