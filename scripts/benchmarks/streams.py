"""Random batches of UniLM and ERNIE-GEN, and the same for BERT: one padded sequence and a mask of who sees whom."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.heads.base import IGNORE_INDEX
from hf_ctxmodels.models.ernie_gen.configuration_ernie_gen import TARGET_SEGMENT

_MASKED_SHARE = 0.15
_SPAN = 3  # tokens of a span of ERNIE-GEN
# Segments of the first and the second half of a row, for six rows in turn: 1/3 each is read as source and target or in
# both directions, 1/6 each in one (Dong et al. 2019, section 2.3).
_SEGMENTS = torch.tensor([(4, 5), (2, 2), (0, 1), (3, 3), (4, 5), (0, 1)])
_SHARED, _AHEAD, _BACK = torch.tensor([0, 1, 4]), torch.tensor([2, 5]), torch.tensor([3])  # see `segment_mask_spec`

Batches = dict[str, dict[str, Tensor]]


def segment_batches(config: Any, lengths: Tensor) -> tuple[Batches, int]:
    """Masked words of rows of UniLM's four kinds.

    Args:
        config: UniLM's.
        lengths: (batch,) tokens of each row.

    Returns:
        "ours" and "peer" -> the arguments of `forward`; and the number of targets.
    """
    columns = torch.arange(int(lengths.max()))
    real = columns < lengths[:, None]
    ids = torch.randint(config.vocab_size // 10, config.vocab_size, real.shape) * real
    halves = (columns >= lengths[:, None] // 2).long()
    types = _SEGMENTS[torch.arange(len(lengths)) % len(_SEGMENTS)].gather(1, halves) * real
    order = torch.rand(real.shape).masked_fill(~real, 2).argsort(1).argsort(1)
    chosen = order < (lengths[:, None] * _MASKED_SHARE).round()
    batch = {"input_ids": ids, "token_type_ids": types, "labels": ids.where(chosen, IGNORE_INDEX)}
    before = columns <= columns[:, None]
    seen = torch.isin(types, _SHARED)[:, None] | (torch.isin(types, _AHEAD)[..., None] & before)
    seen = seen | (torch.isin(types, _BACK)[..., None] & before.T)
    masks = {"ours": real.long(), "peer": _ready(seen, real)}
    return {side: batch | {"attention_mask": mask} for side, mask in masks.items()}, int(chosen.sum())


def infilling_batches(config: Any, lengths: Tensor) -> tuple[Batches, int]:
    """Sources and targets of ERNIE-GEN, of which both streams of queries predict the targets.

    Args:
        config: ERNIE-GEN's.
        lengths: (batch,) tokens of source and target together.

    Returns:
        "ours" and "peer" -> the arguments of `forward`; and the number of predictions.
    """
    low, size = config.vocab_size // 10, config.vocab_size
    sources, targets = lengths // 2, lengths - lengths // 2
    steps = torch.arange(int(targets.max()))
    read, written = torch.arange(int(sources.max())) < sources[:, None], steps < targets[:, None]
    source_ids = torch.randint(low, size, read.shape) * read
    target_ids = torch.randint(low, size, written.shape)
    labels = target_ids.where(written, IGNORE_INDEX)
    spans = (steps // _SPAN).expand_as(labels)
    ours = {"input_ids": source_ids, "attention_mask": read.long(), "labels": labels, "span_ids": spans}

    columns = torch.arange(int(lengths.max()))  # of the content: the source, the start, and the target but its last
    content, second = columns < lengths[:, None], columns >= sources[:, None]
    shifted = torch.cat([torch.full_like(target_ids[:, :1], config.decoder_start_token_id or 0), target_ids], 1)
    of_target = shifted.gather(1, (columns - sources[:, None]).clamp(0, len(steps) - 1))
    of_source = source_ids.gather(1, columns.clamp(max=read.shape[1] - 1).expand_as(content))
    queries = torch.full((len(lengths), 2 * len(steps)), config.query_token_id)
    joined = torch.cat([torch.where(second, of_target, of_source) * content, queries], 1)
    types = torch.cat([second * TARGET_SEGMENT, torch.full_like(queries, TARGET_SEGMENT)], 1)
    places = sources[:, None] + 1 + steps
    peer = {
        "input_ids": joined,
        "attention_mask": _infilling_mask(sources, content, written, spans),
        "token_type_ids": types,
        "position_ids": torch.cat([columns.expand_as(content), places, places], 1),
        "labels": torch.cat([torch.full_like(of_target, IGNORE_INDEX), labels, labels], 1),
    }
    return {"ours": ours, "peer": peer}, 2 * int(written.sum())


def _infilling_mask(sources: Tensor, content: Tensor, written: Tensor, spans: Tensor) -> Tensor:
    """(batch, 1, L, L) over [content; a query for each token; a query for each token, by spans]."""
    columns, steps = torch.arange(content.shape[1]), torch.arange(written.shape[1])
    of_content = (columns < sources[:, None])[:, None] | (columns <= columns[:, None])
    first = sources[:, None, None] + 1  # column of what follows the start token
    of_tokens = columns < first + steps[:, None]
    starts = (spans[:, :, None] == spans[:, None]).int().argmax(2)  # the first step of each one's span
    of_spans = columns < first + starts[..., None]
    rows, width = len(sources), written.shape[1]
    hidden = torch.zeros(rows, 1, 1, dtype=torch.bool)
    alone, together = torch.eye(width, dtype=torch.bool).expand(rows, -1, -1), spans[:, :, None] == spans[:, None]
    none = hidden.expand(rows, width, width)
    seen = torch.cat(
        [
            torch.cat([of_content, hidden.expand(rows, len(columns), 2 * width)], 2),
            torch.cat([of_tokens, alone, none], 2),
            torch.cat([of_spans, none, together], 2),
        ],
        1,
    )
    return _ready(seen, torch.cat([content, written, written], 1))


def _ready(seen: Tensor, real: Tensor) -> Tensor:
    """(batch, 1, L, L) bool: who sees whom among real tokens; padding, which nobody reads, sees the first."""
    mask = seen & real[:, None]
    mask[..., 0] |= ~real
    return mask[:, None]
