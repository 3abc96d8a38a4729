"""Random batches of UniLM and ERNIE-GEN, and equal ones for BERT with a 4-d attention mask."""

from typing import Any

import torch
from torch import Tensor

from hf_ctxmodels.heads.base import IGNORE_INDEX
from hf_ctxmodels.models.ernie_gen.configuration_ernie_gen import TARGET_SEGMENT

_MASK_FRACTION = 0.15
_SPAN_LENGTH = 3  # tokens per span of ERNIE-GEN
# Segment ids of the first and the second half of a sequence, for six sequences in turn: 1/3 sequence-to-sequence, 1/3
# bidirectional, 1/6 left-to-right and 1/6 right-to-left (Dong et al. 2019, section 2.3).
_SEGMENTS = torch.tensor([(4, 5), (2, 2), (0, 1), (3, 3), (4, 5), (0, 1)])
_BIDIRECTIONAL, _LEFT_TO_RIGHT, _RIGHT_TO_LEFT = (
    torch.tensor([0, 1, 4]),
    torch.tensor([2, 5]),
    torch.tensor([3]),
)  # see `segment_mask_spec`

Batches = dict[str, dict[str, Tensor]]


def segment_batches(config: Any, lengths: Tensor) -> tuple[Batches, int]:
    """Masked tokens in sequences of UniLM's four objectives.

    Args:
        config: Configuration of UniLM.
        lengths: (batch,) number of tokens of each sequence.

    Returns:
        Arguments of `forward` for "model" and "reference", and the number of predicted tokens.
    """
    columns = torch.arange(int(lengths.max()))
    is_token = columns < lengths[:, None]
    ids = torch.randint(config.vocab_size // 10, config.vocab_size, is_token.shape) * is_token
    halves = (columns >= lengths[:, None] // 2).long()
    types = _SEGMENTS[torch.arange(len(lengths)) % len(_SEGMENTS)].gather(1, halves) * is_token
    order = torch.rand(is_token.shape).masked_fill(~is_token, 2).argsort(1).argsort(1)
    is_masked = order < (lengths[:, None] * _MASK_FRACTION).round()
    batch = {"input_ids": ids, "token_type_ids": types, "labels": ids.where(is_masked, IGNORE_INDEX)}
    causal = columns <= columns[:, None]
    visible = torch.isin(types, _BIDIRECTIONAL)[:, None] | (torch.isin(types, _LEFT_TO_RIGHT)[..., None] & causal)
    visible = visible | (torch.isin(types, _RIGHT_TO_LEFT)[..., None] & causal.T)
    masks = {"model": is_token.long(), "reference": _attention_mask(visible, is_token)}
    return {name: batch | {"attention_mask": mask} for name, mask in masks.items()}, int(is_masked.sum())


def infilling_batches(config: Any, lengths: Tensor) -> tuple[Batches, int]:
    """Sources and targets of ERNIE-GEN; the word-level and the span-level query streams predict the targets.

    Args:
        config: Configuration of ERNIE-GEN.
        lengths: (batch,) number of source and target tokens together.

    Returns:
        Arguments of `forward` for "model" and "reference", and the number of predicted tokens.
    """
    min_id, vocab_size = config.vocab_size // 10, config.vocab_size
    sources, targets = lengths // 2, lengths - lengths // 2
    steps = torch.arange(int(targets.max()))
    source_mask, target_mask = torch.arange(int(sources.max())) < sources[:, None], steps < targets[:, None]
    source_ids = torch.randint(min_id, vocab_size, source_mask.shape) * source_mask
    target_ids = torch.randint(min_id, vocab_size, target_mask.shape)
    labels = target_ids.where(target_mask, IGNORE_INDEX)
    spans = (steps // _SPAN_LENGTH).expand_as(labels)
    model = {"input_ids": source_ids, "attention_mask": source_mask.long(), "labels": labels, "span_ids": spans}

    columns = torch.arange(int(lengths.max()))  # content: source, start token, target without its last token
    content, is_target = columns < lengths[:, None], columns >= sources[:, None]
    shifted = torch.cat([torch.full_like(target_ids[:, :1], config.decoder_start_token_id or 0), target_ids], 1)
    content_targets = shifted.gather(1, (columns - sources[:, None]).clamp(0, len(steps) - 1))
    content_sources = source_ids.gather(1, columns.clamp(max=source_mask.shape[1] - 1).expand_as(content))
    queries = torch.full((len(lengths), 2 * len(steps)), config.query_token_id)
    reference_ids = torch.cat([torch.where(is_target, content_targets, content_sources) * content, queries], 1)
    types = torch.cat([is_target * TARGET_SEGMENT, torch.full_like(queries, TARGET_SEGMENT)], 1)
    query_positions = sources[:, None] + 1 + steps
    reference = {
        "input_ids": reference_ids,
        "attention_mask": _infilling_mask(sources, content, target_mask, spans),
        "token_type_ids": types,
        "position_ids": torch.cat([columns.expand_as(content), query_positions, query_positions], 1),
        "labels": torch.cat([torch.full_like(content_targets, IGNORE_INDEX), labels, labels], 1),
    }
    return {"model": model, "reference": reference}, 2 * int(target_mask.sum())


def _infilling_mask(sources: Tensor, content: Tensor, target_mask: Tensor, spans: Tensor) -> Tensor:
    """(batch, 1, L, L) attention mask over the content, the word-level queries and the span-level queries."""
    columns, steps = torch.arange(content.shape[1]), torch.arange(target_mask.shape[1])
    content_to_content = (columns < sources[:, None])[:, None] | (columns <= columns[:, None])
    first = sources[:, None, None] + 1  # column after the start token
    words_to_content = columns < first + steps[:, None]
    starts = (spans[:, :, None] == spans[:, None]).int().argmax(2)  # first step of the span of each token
    spans_to_content = columns < first + starts[..., None]
    batch_size, length = len(sources), target_mask.shape[1]
    invisible = torch.zeros(batch_size, 1, 1, dtype=torch.bool)
    same_token = torch.eye(length, dtype=torch.bool).expand(batch_size, -1, -1)
    same_span = spans[:, :, None] == spans[:, None]
    no_queries = invisible.expand(batch_size, length, length)
    visible = torch.cat(
        [
            torch.cat([content_to_content, invisible.expand(batch_size, len(columns), 2 * length)], 2),
            torch.cat([words_to_content, same_token, no_queries], 2),
            torch.cat([spans_to_content, no_queries, same_span], 2),
        ],
        1,
    )
    return _attention_mask(visible, torch.cat([content, target_mask, target_mask], 1))


def _attention_mask(visible: Tensor, is_token: Tensor) -> Tensor:
    """(batch, 1, L, L) bool mask; padding is masked, and padding queries attend to the first token."""
    mask = visible & is_token[:, None]
    mask[..., 0] |= ~is_token
    return mask[:, None]
