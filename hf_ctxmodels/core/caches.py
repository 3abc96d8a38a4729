"""Caches for `generate`: of recurrent models, and of Transformer decoders with fewer copies than in transformers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, to_device

_SEEN = "seen_tokens"


class RecurrentCache(Cache):
    """The states of all recurrent layers after the preceding tokens, as `past_key_values` of a model.

    It has the interface of transformers' caches, so `generate` reorders it under beam search and continues from it. A
    forward pass returns a new cache and does not change its argument, so several continuations may start from the same
    cache. Tokens cannot be removed: `crop` raises, and transformers rejects assisted generation (`_is_stateful`).

    Args:
        states: Tensors (rows, ...) of each layer, for example hidden and cell state.
        seen_tokens: Number of columns of the batch so far.
    """

    is_croppable = False

    def __init__(self, states: Iterable[Iterable[Tensor]], seen_tokens: int = 0) -> None:
        super().__init__(layers=[])
        self.states = [tuple(state) for state in states]
        self.seen_tokens = seen_tokens

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layers, {self.batch_size} rows, {self.seen_tokens} tokens)"

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 without layers."""
        return len(self.states[0][0]) if self.states else -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns of the batch so far."""
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: a recurrent state has no maximum length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raise CtxError: tokens cannot be removed from a state."""
        raise CtxError("Tokens cannot be removed from a recurrent state.", hint="encode the shorter sequence again.")

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new cache with `function` applied to every tensor."""
        return type(self)(([function(tensor) for tensor in state] for state in self.states), self.seen_tokens)

    def select(self, rows: Tensor) -> Self:
        """A new cache of the rows with these indices (or of a mask)."""
        return self.map(lambda tensor: tensor[rows.to(tensor.device)])

    def mask_rows(self, rows: Tensor) -> Self:
        """A new cache with zero states where `rows`, (rows,) bool, is False."""
        return self.map(lambda tensor: torch.where(rows.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0))

    def detach(self) -> Self:
        """A new cache detached from the graph."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """A new cache on this device."""
        return self.map(lambda tensor: tensor.to(device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row `beam_idx[i]`, in place."""
        self.states = self.select(beam_idx).states

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, in place."""
        self.states = self.map(lambda tensor: tensor.repeat_interleave(repeats, 0)).states

    def reset(self) -> None:
        """Set all states to zero, in place."""
        self.states, self.seen_tokens = self.map(torch.zeros_like).states, 0

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> contiguous tensor (rows, ...); rows may be split or concatenated before `from_state_dict`."""
        tensors = {
            f"{layer}.{index}": tensor.detach().contiguous()
            for layer, state in enumerate(self.states)
            for index, tensor in enumerate(state)
        }
        return {**tensors, _SEEN: torch.full((max(0, self.batch_size),), self.seen_tokens)}

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The cache of a `state_dict`."""
        indices = sorted(tuple(map(int, name.split("."))) for name in tensors if name != _SEEN)
        states: list[list[Tensor]] = [[] for _ in {layer for layer, _ in indices}]
        for layer, index in indices:
            states[layer].append(tensors[f"{layer}.{index}"])
        return cls(states, int(tensors[_SEEN].max()) if tensors[_SEEN].numel() else 0)


def check_recurrent_cache(cache: Any, expected: list[list[tuple[int, ...]]]) -> None:
    """Raise CtxError unless `past_key_values` is a `RecurrentCache` with these shapes, a list for each layer."""
    hint = "pass past_key_values of an earlier forward pass with the same number of rows, or None."
    if not isinstance(cache, RecurrentCache):
        raise CtxError(f"past_key_values is a {type(cache).__name__}, expected a RecurrentCache.", hint=hint)
    shapes = [[tuple(tensor.shape) for tensor in state] for state in cache.states]
    if shapes != expected:
        raise CtxError(f"The states of past_key_values are {shapes}, expected {expected}.", hint=hint)


_MIN_FREE_COLUMNS = 32  # of a new buffer


class PreallocatedCache(DynamicCache):
    """A `DynamicCache` with the same content that copies less.

    transformers copies all keys and values when a token is appended and when beams are reordered. Here new tokens are
    written into larger buffers, and a row that continues another beam copies only the columns that differ from that
    beam: their common prefix is already equal. With gradients and in compiled graphs, tokens are concatenated as in
    transformers.
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
        length, beam_idx = self.get_seq_length(), host_copy(beam_idx)
        source_rows, rows = self._source_rows, torch.arange(len(beam_idx))
        if source_rows is None or len(source_rows) != len(rows) or source_rows.shape[1] > length:
            source_rows = torch.empty(len(rows), 0, dtype=torch.long)
        # (rows, length) the row that computed each column: rows with the same one have equal keys there
        source_rows = torch.cat([source_rows, rows[:, None].expand(-1, length - source_rows.shape[1])], 1)
        (changed,) = (beam_idx != rows).nonzero(as_tuple=True)
        sources = beam_idx[changed]
        differs = (source_rows[changed] != source_rows[sources]).any(0)
        start = int(differs.int().argmax()) if bool(differs.any()) else length
        device = next((layer.keys.device for layer in self.layers if layer.is_initialized), changed.device)
        changed_rows, source_indices = to_device(changed, device), to_device(sources, device)
        for layer in self.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.copy_rows(changed_rows, source_indices, start)
            else:
                layer.reorder_cache(beam_idx)
        self._source_rows = source_rows[beam_idx]

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
    values therefore need one row per source, and none is copied when beams are reordered. `targets_per_source`
    consecutive rows of the batch have the same source.
    """

    def __init__(self, *args: Any, targets_per_source: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.targets_per_source = targets_per_source

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row r by row `beam_idx[r]`, (rows,)."""
        sources = torch.arange(len(beam_idx)) // self.targets_per_source
        if not torch.equal(host_copy(beam_idx) // self.targets_per_source, sources):
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
        has_room = self._buffers is not None and stop <= self._buffers[0].shape[2]
        if not has_room or not all(  # the buffers may hold the tokens of earlier rows
            states.data_ptr() == buffer.data_ptr() and states.stride() == buffer.stride() and len(states) == len(buffer)
            for states, buffer in zip((self.keys, self.values), self._buffers or (), strict=True)
        ):
            self._buffers = _new_buffer(self.keys, key_states, stop), _new_buffer(self.values, value_states, stop)
        keys, values = self._buffers  # type: ignore[misc]
        keys[:, :, length:stop] = key_states
        values[:, :, length:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values

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
