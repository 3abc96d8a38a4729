"""Attention by loops over tokens and heads, the reference for converted checkpoints."""

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(states: Tensor, memory: Tensor, layers: list[tuple[Tensor, Tensor]], heads: int, causal: bool) -> Tensor:
    """(queries, width) states and (keys, width) memory -> (queries, width); `layers` are the weights and biases of q,
    k, v and output."""
    query, key, value = (F.linear(x, *layer) for x, layer in zip((states, memory, memory), layers))
    head_dim, context = states.shape[1] // heads, []
    for step in range(len(states)):
        visible, head_contexts = slice(0, step + 1 if causal else None), []
        for head in range(heads):
            dims = slice(head * head_dim, (head + 1) * head_dim)
            scores = key[visible, dims] @ query[step, dims] / head_dim**0.5
            head_contexts.append(scores.softmax(0) @ value[visible, dims])
        context.append(torch.cat(head_contexts))
    return F.linear(torch.stack(context), *layers[3])
