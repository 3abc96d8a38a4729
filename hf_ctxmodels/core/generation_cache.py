"""The cache that `generate` gives a Transformer decoder: new tokens are written in place, and beams move little."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 32  # columns that a full buffer gets at least


class PreallocatedCache(DynamicCache):
    """A `DynamicCache` of the same content with less copying.

    transformers concatenates all keys and values with those of each new token, and copies all of them when beams are
    reordered. Here new tokens are written into buffers with room for more, and a row that continues another beam copies
    only what it does not share with that beam: their common beginning is the same already.

    Where gradients are recorded or the graph is compiled, tokens are concatenated as in transformers.

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
        self._written_by: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes what row `beam_idx[r]`, (rows,), was."""
        length, beam_idx = self.get_seq_length(), beam_idx.cpu()
        writers = self._writers(len(beam_idx), length)
        (moved,) = (beam_idx != torch.arange(len(beam_idx))).nonzero(as_tuple=True)
        sources = beam_idx[moved]
        differs = (writers[moved] != writers[sources]).any(0)
        first = int(differs.int().argmax()) if bool(differs.any()) else length
        for layer in self.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.copy_rows(moved, sources, first)
            else:
                layer.reorder_cache(beam_idx)
        self._written_by = writers[beam_idx]

    def _writers(self, rows: int, length: int) -> Tensor:
        """(rows, length) row that computed each column: rows with the same one have the same keys there."""
        known = self._written_by
        if known is None or known.shape[0] != rows or known.shape[1] > length:
            known = torch.empty(rows, 0, dtype=torch.long)
        new = torch.arange(rows)[:, None].expand(rows, length - known.shape[1])
        return torch.cat([known, new], 1)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers."""
        super().crop(*args, **kwargs)
        if self._written_by is not None:
            self._written_by = self._written_by[:, : self.get_seq_length()]

    def reset(self) -> None:
        """As in transformers."""
        super().reset()
        self._written_by = None

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers."""
        super().batch_repeat_interleave(*args, **kwargs)
        self._written_by = None

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers."""
        super().batch_select_indices(*args, **kwargs)
        self._written_by = None


class SharedSourceCache(DynamicCache):
    """Keys and values of a decoder's sources, kept once for all rows that write a target for the same source.

    `generate` repeats each source for its beams, or for the targets drawn for it, and beams never change their source.
    Keys and values therefore need one row per source, and none is moved when beams are reordered.

    Args:
        args, kwargs: As for `DynamicCache`.
        targets_per_source: Consecutive rows of the batch that have the same source.
    """

    def __init__(self, *args: Any, targets_per_source: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.targets_per_source = targets_per_source

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes what row `beam_idx[r]`, (rows,), was."""
        own = torch.arange(len(beam_idx), device=beam_idx.device) // self.targets_per_source
        if not torch.equal(beam_idx // self.targets_per_source, own):
            self._separate()
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row: more rows share a source."""
        self.targets_per_source *= repeats

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows with these indices."""
        self._separate()
        super().batch_select_indices(indices)

    def _separate(self) -> None:
        """Give every row keys and values of its own."""
        if self.targets_per_source > 1:
            super().batch_repeat_interleave(self.targets_per_source)
            self.targets_per_source = 1


class BeamSearchCache(EncoderDecoderCache):
    """A `PreallocatedCache` of the target beside a `SharedSourceCache`: the places of beams leave a GPU once in a step.

    Both caches look at them, and each look waits for what the GPU computes.
    """

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes what row `beam_idx[r]`, (rows,), was."""
        super().reorder_cache(beam_idx.cpu())


def get_targets_per_source(cache: Cache | None) -> int:
    """How many consecutive rows of a batch share what the cross-attention of this cache keeps."""
    return getattr(getattr(cache, "cross_attention_cache", None), "targets_per_source", 1)


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, length, head size), at the front of larger buffers."""

    keys: Tensor
    values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in transformers."""
        recorded = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if recorded or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        stop = length + key_states.shape[-2]
        if not self._has_room(stop):
            self._buffers = (self._grown(self.keys, key_states, stop), self._grown(self.values, value_states, stop))
        keys, values = self._buffers  # type: ignore[misc]
        keys[:, :, length:stop] = key_states
        values[:, :, length:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values

    def _has_room(self, length: int) -> bool:
        """Whether the buffers hold this layer's tokens, and have room for `length` in all."""
        if self._buffers is None:
            return False
        return (
            all(
                kept.data_ptr() == buffer.data_ptr() and kept.stride() == buffer.stride() and len(kept) == len(buffer)
                for kept, buffer in zip((self.keys, self.values), self._buffers, strict=True)
            )
            and length <= self._buffers[0].shape[2]
        )

    @staticmethod
    def _grown(kept: Tensor, new: Tensor, length: int) -> Tensor:
        """A buffer of at least `length` columns that begins with what is kept."""
        rows, heads, _, size = new.shape
        buffer = new.new_empty(rows, heads, length + max(_LEAST_ROOM, length // 4), size)
        if kept.numel():
            buffer[:, :, : kept.shape[2]] = kept
        return buffer

    def copy_rows(self, rows: Tensor, sources: Tensor, first: int) -> None:
        """Give rows, (moved,), what others have from column `first` on."""
        length = self.get_seq_length()
        if first >= length:
            return
        if self.keys.requires_grad or self.values.requires_grad:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        for states in (self.keys, self.values):
            tail = states[:, :, first:]
            tail[rows.to(states.device)] = tail[sources.to(states.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes what row `beam_idx[r]` was."""
        self.copy_rows(torch.arange(len(beam_idx)), beam_idx, 0)

    def reset(self) -> None:
        """As in transformers."""
        super().reset()
        self._buffers = None
