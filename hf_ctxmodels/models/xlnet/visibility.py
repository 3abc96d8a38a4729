"""Which keys are visible to each row of two-stream attention (Yang et al. 2019, sections 2.2 to 2.4)."""

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
    """The keys visible to each row: (batch, length + queries, memory + length) bool, or None if every key is.

    Args:
        shape: (batch, length).
        device: Where the batch lies.
        tokens: (batch, length) bool; padding is visible to no row.
        same_sequence: (batch, length) number of the sequence a position belongs to; other sequences are hidden.
        order: (batch, length) rank of each position in the factorisation order (section 2.2): to a content row its own
            rank and lower ones are visible, to a query row lower ones.
        hidden_pairs: (batch, length, length) bool in place of `order`: hides key j from row i, not from content row j.
        target_positions: (batch, queries), -1 for a query row without a target, from which all keys are hidden.
        memory_length: Keys before those of the batch, visible to all rows ...
        memory_tokens: ... where this (batch, memory) is true.
        causal: Later positions are hidden from a row.
        same_length: As many keys are visible to each causal row, so that the first rows do not see more memory.
    """
    batch_size, length = shape
    given = (tokens, same_sequence, order, hidden_pairs, target_positions, memory_tokens)
    if not causal and all(tensor is None for tensor in given):
        return None
    every_key = torch.ones(1, length, memory_length + length, dtype=torch.bool, device=device)
    own = torch.eye(length, dtype=torch.bool, device=device)
    content = queries = every_key[..., memory_length:]
    if order is not None:
        content = order[:, None, :] <= order[:, :, None]
        queries = order[:, None, :] < order[:, :, None]
    elif hidden_pairs is not None:
        content, queries = ~hidden_pairs | own, ~hidden_pairs
    streams = [content]
    if target_positions is not None:
        streams.append(queries)
    for number, keys in enumerate(streams):
        keys = torch.cat([every_key[..., :memory_length].expand(keys.shape[0], -1, -1), keys], -1)
        if causal:
            keys = keys & _causal(length, memory_length, same_length, device)
        streams[number] = keys.expand(batch_size, -1, -1)
    if same_sequence is not None:
        pairs = F.pad(same_sequence[:, :, None] == same_sequence[:, None, :], (memory_length, 0), value=True)
        streams = [keys & pairs for keys in streams]
    if target_positions is not None:
        columns = target_positions.clamp(min=0)[..., None].expand(-1, -1, memory_length + length)
        streams[1] = streams[1].gather(1, columns) & (target_positions >= 0)[..., None]
    visible = torch.cat(streams, 1)
    if memory_tokens is not None:
        visible = visible & F.pad(memory_tokens, (0, length), value=True)[:, None]
    return visible if tokens is None else visible & F.pad(tokens, (memory_length, 0), value=True)[:, None]


def _causal(length: int, memory_length: int, same_length: bool, device: torch.device) -> Tensor:
    """(length, memory + length) bool: the row's own position and earlier ones; with `same_length` no farther back
    than from the last row."""
    rows = torch.arange(length, device=device)[:, None]
    columns = torch.arange(memory_length + length, device=device)
    visible = columns <= rows + memory_length
    return visible & ((columns >= rows) | (columns >= length)) if same_length else visible
