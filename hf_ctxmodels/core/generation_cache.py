"""Caches for `generate` of Transformer decoders, which copy less than transformers' caches."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

_MIN_FREE_COLUMNS = 32  # of a new buffer


class PreallocatedCache(DynamicCache):
    """A `DynamicCache` with the same content that copies less.

    transformers copies all keys and values when a token is appended and when beams are reordered. Here new tokens are
    written into larger buffers, and a row that continues another beam copies only the columns that differ from that
    beam: their common prefix is already equal.

    With gradients and in compiled graphs, tokens are concatenated as in transformers.

    Args:
        args, kwargs: As for `DynamicCache`.
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = PreallocatedLayer
        self._source_rows: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row r by row `beam_idx[r]`, (rows,)."""
        length, beam_idx = self.get_seq_length(), beam_idx.cpu()
        source_rows = self._extend_source_rows(len(beam_idx), length)
        (changed,) = (beam_idx != torch.arange(len(beam_idx))).nonzero(as_tuple=True)
        sources = beam_idx[changed]
        differs = (source_rows[changed] != source_rows[sources]).any(0)
        start = int(differs.int().argmax()) if bool(differs.any()) else length
        for layer in self.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.copy_rows(changed, sources, start)
            else:
                layer.reorder_cache(beam_idx)
        self._source_rows = source_rows[beam_idx]

    def _extend_source_rows(self, rows: int, length: int) -> Tensor:
        """(rows, length) the row that computed each column: rows with the same one have equal keys there."""
        source_rows = self._source_rows
        if source_rows is None or source_rows.shape[0] != rows or source_rows.shape[1] > length:
            source_rows = torch.empty(rows, 0, dtype=torch.long)
        new_columns = torch.arange(rows)[:, None].expand(rows, length - source_rows.shape[1])
        return torch.cat([source_rows, new_columns], 1)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Crop as in transformers."""
        super().crop(*args, **kwargs)
        if self._source_rows is not None:
            self._source_rows = self._source_rows[:, : self.get_seq_length()]

    def reset(self) -> None:
        """Reset as in transformers."""
        super().reset()
        self._source_rows = None

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        """Repeat rows as in transformers."""
        super().batch_repeat_interleave(*args, **kwargs)
        self._source_rows = None

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        """Select rows as in transformers."""
        super().batch_select_indices(*args, **kwargs)
        self._source_rows = None


class SharedSourceCache(DynamicCache):
    """Keys and values of a decoder's sources, stored once for all rows that generate a target for the same source.

    `generate` repeats each source for its beams, or for several samples, and beams never change their source. Keys and
    values therefore need one row per source, and none is copied when beams are reordered.

    Args:
        args, kwargs: As for `DynamicCache`.
        targets_per_source: Number of consecutive rows of the batch that have the same source.
    """

    def __init__(self, *args: Any, targets_per_source: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.targets_per_source = targets_per_source

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row r by row `beam_idx[r]`, (rows,)."""
        sources = torch.arange(len(beam_idx), device=beam_idx.device) // self.targets_per_source
        if not torch.equal(beam_idx // self.targets_per_source, sources):
            self._repeat_sources()
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row: more rows share a source."""
        self.targets_per_source *= repeats

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows with these indices."""
        self._repeat_sources()
        super().batch_select_indices(indices)

    def _repeat_sources(self) -> None:
        """Store separate keys and values for every row."""
        if self.targets_per_source > 1:
            super().batch_repeat_interleave(self.targets_per_source)
            self.targets_per_source = 1


class BeamSearchCache(EncoderDecoderCache):
    """A `PreallocatedCache` of the target with a `SharedSourceCache`, which copies the beam indices from a GPU once per
    step instead of once for each of the two caches."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row r by row `beam_idx[r]`, (rows,)."""
        super().reorder_cache(beam_idx.cpu())


def get_targets_per_source(cache: Cache | None) -> int:
    """Number of consecutive rows of a batch that share a row of this cache's cross-attention."""
    return getattr(getattr(cache, "cross_attention_cache", None), "targets_per_source", 1)


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, length, head size), at the start of larger buffers."""

    keys: Tensor
    values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values as in transformers."""
        needs_grad = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if needs_grad or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        stop = length + key_states.shape[-2]
        if not self._has_room(stop):
            self._buffers = _new_buffer(self.keys, key_states, stop), _new_buffer(self.values, value_states, stop)
        keys, values = self._buffers  # type: ignore[misc]
        keys[:, :, length:stop] = key_states
        values[:, :, length:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values

    def _has_room(self, length: int) -> bool:
        """Whether the buffers hold this layer's tokens, and have room for `length` tokens."""
        if self._buffers is None or length > self._buffers[0].shape[2]:
            return False
        return all(
            states.data_ptr() == buffer.data_ptr() and states.stride() == buffer.stride() and len(states) == len(buffer)
            for states, buffer in zip((self.keys, self.values), self._buffers, strict=True)
        )

    def copy_rows(self, rows: Tensor, sources: Tensor, start: int) -> None:
        """Replace `rows`, (changed,), by the rows `sources`, from column `start` on."""
        if start >= self.get_seq_length():
            return
        if self.keys.requires_grad or self.values.requires_grad:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        for states in (self.keys, self.values):
            columns = states[:, :, start:]
            columns[rows.to(states.device)] = columns[sources.to(states.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row r by row `beam_idx[r]`."""
        self.copy_rows(torch.arange(len(beam_idx)), beam_idx, 0)

    def reset(self) -> None:
        """Reset as in transformers."""
        super().reset()
        self._buffers = None


def _new_buffer(states: Tensor, new_states: Tensor, length: int) -> Tensor:
    """A buffer of at least `length` columns that starts with `states`."""
    rows, heads, _, size = new_states.shape
    buffer = new_states.new_empty(rows, heads, length + max(_MIN_FREE_COLUMNS, length // 4), size)
    if states.numel():
        buffer[:, :, : states.shape[2]] = states
    return buffer
