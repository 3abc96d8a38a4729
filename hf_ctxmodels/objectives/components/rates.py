"""Counts of tokens and targets in a collated batch, and their rates."""

from collections.abc import Mapping

import torch

from hf_ctxmodels.core.constants import IGNORE_INDEX


def count_targets(batch: Mapping[str, torch.Tensor], unknown_id: int) -> dict[str, int]:
    """Rows, tokens, positions with and without padding, targets, and targets that are the unknown token."""
    return {
        "rows": len(batch["labels"]),
        "tokens": int(batch["attention_mask"].sum()),
        "positions": batch["attention_mask"].numel(),
        "targets": int((batch["labels"] != IGNORE_INDEX).sum()),
        "target_positions": batch["labels"].numel(),
        "unknown_targets": int((batch["labels"] == unknown_id).sum()),
    }


def target_rates(counts: Mapping[str, int]) -> dict[str, float]:
    """Rates from the summed counts of `count_targets`; "fill" is the share of positions that are not padding."""
    return {
        "fill": counts["tokens"] / max(1, counts["positions"]),
        "targets_per_word": counts["targets"] / max(1, counts["tokens"]),
        "unknown_targets": counts["unknown_targets"] / max(1, counts["targets"]),
    }
