"""Batches of nodes of prefix trees: padding, masks, rows of caches, and predictions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from hf_ctxmodels.architectures.prefix_trees import PrefixNode, TreeLayout
from hf_ctxmodels.core.caches import RecurrentCache


class NodeBatch(NamedTuple):
    """Logits (batch, columns, vocabulary) of a batch of nodes, from `first_column` on; `cache` and `mask` include the
    tokens before the nodes."""

    nodes: list[PrefixNode]
    logits: Tensor
    first_column: int
    cache: Any
    mask: Tensor | None

    def predictions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each target of the nodes: request, log-probability in nats, and whether it is the most probable token."""
        targets = [
            (row, target.column - self.first_column, target.token_id, target.request)
            for row, node in enumerate(self.nodes)
            for target in node.targets
        ]
        rows, columns, token_ids, requests = np.array(targets, dtype=np.int64).reshape(-1, 4).T
        positions, inverse = np.unique(np.stack([rows, columns]), axis=1, return_inverse=True)
        device = self.logits.device
        logits = self.logits[tuple(torch.from_numpy(positions).to(device))].float()
        indices, ids = torch.from_numpy(inverse.reshape(-1)).to(device), torch.from_numpy(token_ids).to(device)
        values = logits[indices, ids] - logits.logsumexp(-1)[indices]
        is_best = logits.argmax(-1)[indices] == ids
        return requests, values.double().cpu().numpy(), is_best.cpu().numpy()


def pad_rows(sequences: Sequence[np.ndarray], value: int) -> tuple[Tensor, Tensor]:
    """(batch, length) ids with padding on the right, and their mask."""
    lengths = np.array([len(sequence) for sequence in sequences])
    filled = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(filled.shape, value, dtype=np.int64)
    ids[filled] = np.concatenate(sequences)
    return torch.from_numpy(ids), torch.from_numpy(filled.astype(np.int64))


def select_cache(cache: Any, rows: Tensor) -> Any:
    """A new cache with these rows of a cache, which is unchanged."""
    if isinstance(cache, RecurrentCache):
        return cache.select(rows)
    selected = DynamicCache()
    for layer in cache.layers:  # the constructor would copy the tensors again
        new_layer = DynamicLayer()
        new_layer.lazy_initialization(layer.keys, layer.values)
        new_layer.keys, new_layer.values = select_rows(layer.keys, rows), select_rows(layer.values, rows)
        selected.layers.append(new_layer)
    return selected


def select_rows(value: Any, rows: Tensor) -> Any:
    """Rows of the tensors in an output of a model, which has one row per source."""
    if isinstance(value, Tensor):
        if len(value) == 1:
            return value.expand(len(rows), *value.shape[1:])
        return value if torch.equal(rows, torch.arange(len(value))) else value[rows.to(value.device)]
    if isinstance(value, RecurrentCache):
        return value.select(rows)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: select_rows(item, rows) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(select_rows(item, rows) for item in value)
    return value


def tree_mask(layouts: Sequence[TreeLayout | None], mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(batch, 1, width, columns) attention mask and (batch, width) positions of rows of which some are trees.

    Args:
        layouts: Layout of each row; None for successive tokens.
        mask: (batch, columns) mask of cached tokens and of the rows.
        width: Columns of the rows.
    """
    past = mask[:, :-width]
    visible = torch.ones(width, width).tril().bool().repeat(len(mask), 1, 1)
    positions = torch.arange(width).repeat(len(mask), 1)
    for row, layout in enumerate(layouts):
        if layout is not None:
            length = len(layout.positions)
            visible[row, :length, :length] = torch.from_numpy(layout.visible)
            positions[row, :length] = torch.from_numpy(layout.positions)
            positions[row, length:] = 0
    row_mask = visible & mask[:, None, -width:].bool()
    attended = torch.cat([past.bool()[:, None].expand(-1, width, -1), row_mask], 2)
    return attended[:, None], positions + past.sum(1, keepdim=True)
