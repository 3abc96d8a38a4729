"""Targets and factorisation orders of permutation language modelling (Yang et al. 2019, sections 2.2 and 2.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.padding import PaddingCollator, RowPadder
from hf_ctxmodels.objectives.base import Batch, check_at_least
from hf_ctxmodels.objectives.components.features import feature_generator, feature_word_ids, padded_columns
from hf_ctxmodels.objectives.components.masking import IGNORE_INDEX
from hf_ctxmodels.objectives.components.non_special_tokens import NonSpecialTokens
from hf_ctxmodels.objectives.components.spans import Units, harmonic, sample_spans, trim_to_budget

SEEN_BY_ALL = -1
"""Rank of a token that is not predicted (in the first block of a row)."""
NO_TARGET = -1
"""Padding of `target_positions`."""


@dataclass
class DataCollatorForPermutationLM(PaddingCollator):
    """Pads a batch, chooses the tokens to predict, and draws the order in which each row is factorised.

    `input_ids` are the real tokens: the content stream sees them, and only the query stream, which knows a target's
    position but not its token, predicts. (`transformers.DataCollatorForPermutationLM` puts mask tokens
    into the content stream, so that no prediction sees an earlier one; it also needs rows of even length and draws from
    global state.)

    Targets are spans of 1 to `max_span` words or tokens, p(n) proportional to 1/n, each at a random place in a context
    of `partial_prediction` times its length. Special tokens are never targets; every other row has at least one.

    Visibility depends only on `permutation_order`. The content of position i sees position j if
    `order[j] <= order[i]`; the query of target i sees j if `order[j] < order[i]`. Each target has its own rank; all
    other tokens have the rank -1, so every position sees them. Hence nothing that a target's query sees, directly or
    through other positions, depends on the target or on later ones.

    With `reuse_length` a row has two blocks: its first `reuse_length` tokens, whose hidden states are the memory of the
    next row, and the rest. The order is drawn within each block, and all ranks of the second are higher: it sees the
    whole first block, which does not see it. So the memory depends on no target of the next row.

    Each feature holds:
        input_ids: (tokens,) with special tokens; any length.
        example_index, epoch: Integers that seed targets and order.
        word_ids: (tokens,), needed with `whole_word`; None or -1 for special tokens.
        attention_mask, token_type_ids: (tokens,), optional, padded and returned.

    Returns, all int64:
        input_ids, attention_mask (batch, width), and token_type_ids if the features hold them.
        permutation_order: (batch, width) ranks; see above. -1 at padding.
        target_positions: (batch, targets) positions of the targets, ascending; -1 after a row's last one.
        labels: (batch, targets) their tokens; -100 after a row's last one.

    Args:
        tokenizer: With a padding token.
        partial_prediction: One in this many tokens is predicted (K).
        max_span: The longest span, in words or tokens.
        num_predictions: Exact number of targets per row (at most its non-special tokens), instead of about 1/K.
        whole_word: Spans are of whole words.
        reuse_length: Number of tokens at a row's start that are the memory of the next; None if rows share no text.
        static: The same targets and order in every epoch.
        seed: Seed of targets and order.
        pad_to_multiple_of: Round the width of the batch up.

    Raises:
        CtxError: A feature lacks a field, or holds ids outside the tokenizer's vocabulary.

    Example:
        >>> collate = DataCollatorForPermutationLM(tokenizer, seed=1)
        >>> batch = collate([{"input_ids": tokenizer("a cat sat").input_ids, "example_index": 0, "epoch": 0}])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels', 'permutation_order', 'target_positions']
    """

    partial_prediction: float = 6.0
    max_span: int = 5
    num_predictions: int | None = None
    whole_word: bool = False
    reuse_length: int | None = None
    static: bool = False
    seed: int = 0
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial_prediction < 1:
            raise CtxError(
                f"partial_prediction={self.partial_prediction} is out of range.",
                hint="use 1 (predict all tokens) or more; the paper has 6 or 7.",
            )
        sizes = {name: getattr(self, name) for name in ("max_span", "num_predictions", "reuse_length")}
        check_at_least(1, **{name: value for name, value in sizes.items() if value is not None})
        self.non_special = NonSpecialTokens(self.tokenizer)
        self.span_lengths = harmonic(self.max_span)

    def torch_call(self, features: list[dict[str, Any]]) -> Batch:
        """Collate features; see the class for what they hold and what is returned."""
        rows = [np.asarray(feature["input_ids"]) for feature in features]
        lengths = [len(ids) for ids in rows]
        padder = RowPadder(lengths, self.tokenizer.padding_side, self.pad_to_multiple_of)
        orders, targets, labels = [], [], []
        for feature, ids, offset in zip(features, rows, padder.offsets.tolist()):
            words = feature_word_ids(feature) if self.whole_word else None
            order, chosen = self.draw(ids, words, feature_generator(feature, self.seed, self.static))
            orders.append(order)
            targets.append(chosen + offset)
            labels.append(ids[chosen])
        target_padder = RowPadder([len(chosen) for chosen in targets], "right")
        return {
            "input_ids": padder.pad(rows, self.tokenizer.pad_token_id),
            "attention_mask": padder.attention_mask(),
            "permutation_order": padder.pad(orders, SEEN_BY_ALL),
            "target_positions": target_padder.pad(targets, NO_TARGET),
            "labels": target_padder.pad(labels, IGNORE_INDEX),
            **padded_columns(features, ("attention_mask", "token_type_ids"), padder, self.tokenizer),
        }

    def draw(
        self, ids: np.ndarray, word_ids: np.ndarray | None, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks (tokens,) of one row, and its targets' positions, ascending; see the class."""
        candidates = self.non_special.candidates(ids)
        bounds = [0, len(ids)]
        if self.reuse_length is not None and self.reuse_length < len(ids):
            bounds.insert(1, self.reuse_length)
        blocks = [slice(start, stop) for start, stop in pairwise(bounds)]
        units = [Units.of(candidates[block], None if word_ids is None else word_ids[block]) for block in blocks]
        chosen = self._select(units, rng)
        order = np.empty(len(ids), dtype=np.int64)
        lowest = SEEN_BY_ALL
        for block, targets in zip(blocks, chosen):
            ranks = order[block]  # a view
            ranks[:] = lowest
            ranks[targets] = lowest + 1 + rng.permutation(len(targets))
            lowest += 1 + len(targets)
        return order, np.concatenate([block.start + targets for block, targets in zip(blocks, chosen)])

    def _select(self, blocks: list[Units], rng: np.random.Generator) -> list[np.ndarray]:
        """Positions of the targets within each block."""
        spans = [sample_spans(len(units), self.span_lengths, self.partial_prediction, rng) for units in blocks]
        if self.num_predictions is not None:
            ends = np.cumsum([0, *(len(units.positions) for units in blocks)])
            # each block's share of the row's number
            budgets = np.diff(np.round(ends * min(self.num_predictions / max(1, ends[-1]), 1.0)).astype(np.int64))
            return [trim_to_budget(*of_block, rng) for of_block in zip(spans, blocks, budgets.tolist())]
        marked = [np.zeros(len(units), dtype=bool) for units in blocks]
        for marks, block in zip(marked, spans):
            for start, stop in block.tolist():
                marks[start:stop] = True
        if not any(marks.any() for marks in marked):
            at = int(rng.integers(max(1, sum(map(len, blocks)))))
            for marks in marked:
                marks[at : at + 1] = True
                at -= len(marks)
                if at < 0:
                    break
        return [units.tokens(marks) for units, marks in zip(blocks, marked)]

    def count(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Rows, non-special tokens, targets and spans of a collated batch."""
        ids, positions = batch["input_ids"], batch["target_positions"]
        non_special = torch.from_numpy(self.non_special.table).to(ids.device)[ids].sum()
        before = torch.nn.functional.pad(positions, (1, 0), value=NO_TARGET - 1)[:, :-1]
        targets = positions != NO_TARGET
        spans = targets & (positions != before + 1)
        totals = torch.stack([non_special, targets.sum(), spans.sum()]).tolist()
        return {"rows": len(ids), **dict(zip(("non_special_tokens", "targets", "spans"), totals))}


def expand_permutation(
    permutation_order: torch.Tensor, target_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masks of `transformers.XLNetLMHeadModel`, from the compact form of the collator.

    Args:
        permutation_order: (batch, width) int64.
        target_positions: (batch, targets) int64, -1 for none.

    Returns:
        perm_mask: (batch, width, width) float, 1 where row i may not see column j. A target does not see itself; the
            model lets its content stream do so.
        target_mapping: (batch, targets, width) float, one-hot; all zeros for none.
    """
    is_target = target_positions != NO_TARGET
    target_mapping = torch.nn.functional.one_hot(target_positions.clamp(min=0), permutation_order.shape[1])
    target_mapping = target_mapping * is_target[..., None]
    hidden = permutation_order[:, None, :] > permutation_order[:, :, None]
    hidden |= torch.diag_embed(target_mapping.any(dim=1))
    return hidden.float(), target_mapping.float()
