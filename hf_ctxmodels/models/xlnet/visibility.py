"""Which key each row of two-stream attention sees (Yang et al. 2019, sections 2.2 to 2.4)."""

import torch
from torch import Tensor
from torch.nn import functional as F


def visible_keys(
    shape: tuple[int, int],
    device: torch.device,
    *,
    tokens: Tensor | None = None,
    same_sequence: Tensor | None = None,
    order: Tensor | None = None,
    hidden_pairs: Tensor | None = None,
    target_positions: Tensor | None = None,
    memory_length: int = 0,
    memory_tokens: Tensor | None = None,
    causal: bool = False,
    same_length: bool = False,
) -> Tensor | None:
    """Which key each row sees: (batch, length + queries, memory + length) bool, or None if all see all.

    Args:
        shape: (batch, length).
        device: Where the batch lies.
        tokens: (batch, length) bool; padding is seen by none.
        same_sequence: (batch, length) number of the sequence a position belongs to; others are not seen.
        order: (batch, length) rank of each position in the factorisation order (section 2.2). Content sees its own
            rank and lower ones, a query lower ones.
        hidden_pairs: (batch, length, length) bool in place of `order`: row i does not see key j. Content sees itself.
        target_positions: (batch, queries), -1 for a query row without a target, which sees nothing.
        memory_length: Keys in front, seen by all ...
        memory_tokens: ... where this (batch, memory) is true.
        causal: No row sees what stands behind it.
        same_length: Causal rows see equally far back, so that the first of them do not see more memory than the last.
    """
    batch_size, length = shape
    given = (tokens, same_sequence, order, hidden_pairs, target_positions, memory_tokens)
    if not causal and all(tensor is None for tensor in given):
        return None
    everything = torch.ones(1, length, memory_length + length, dtype=torch.bool, device=device)
    own = torch.eye(length, dtype=torch.bool, device=device)
    content = queries = everything[..., memory_length:]
    if order is not None:
        content = order[:, None, :] <= order[:, :, None]
        queries = order[:, None, :] < order[:, :, None]
    elif hidden_pairs is not None:
        content, queries = ~hidden_pairs | own, ~hidden_pairs
    streams = [content]
    if target_positions is not None:
        streams.append(queries)
    for number, seen in enumerate(streams):
        seen = torch.cat([everything[..., :memory_length].expand(len(seen), -1, -1), seen], -1)
        if causal:
            seen = seen & _causal(length, memory_length, same_length, device)
        streams[number] = seen.expand(batch_size, -1, -1)
    if same_sequence is not None:
        pairs = F.pad(same_sequence[:, :, None] == same_sequence[:, None, :], (memory_length, 0), value=True)
        streams = [seen & pairs for seen in streams]
    if target_positions is not None:
        places = target_positions.clamp(min=0)[..., None].expand(-1, -1, memory_length + length)
        streams[1] = streams[1].gather(1, places) & (target_positions >= 0)[..., None]
    visible = torch.cat(streams, 1)
    if memory_tokens is not None:
        visible = visible & F.pad(memory_tokens, (0, length), value=True)[:, None]
    return visible if tokens is None else visible & F.pad(tokens, (memory_length, 0), value=True)[:, None]


def _causal(length: int, memory_length: int, same_length: bool, device: torch.device) -> Tensor:
    """(length, memory + length) bool: the row's own place and before, but with `same_length` not too far."""
    rows = torch.arange(length, device=device)[:, None]
    columns = torch.arange(memory_length + length, device=device)
    seen = columns <= rows + memory_length
    return seen & ((columns >= rows) | (columns >= length)) if same_length else seen
