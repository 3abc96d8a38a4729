"""The cache of recurrent models, for `generate`, beam search, decoders and the training loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache

from hf_ctxmodels.core.errors import CtxError

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

    @property
    def is_croppable(self) -> bool:
        """Always False: tokens cannot be removed from a recurrent state."""
        return False

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

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows with these indices, in place."""
        self.reorder_cache(indices)

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


def validate_cache(cache: Any, expected: Sequence[Sequence[tuple[int, ...]]]) -> None:
    """Raise CtxError unless `past_key_values` is a `RecurrentCache` with these shapes, a list for each layer."""
    hint = "pass past_key_values of an earlier forward pass with the same number of rows, or None."
    if not isinstance(cache, RecurrentCache):
        raise CtxError(f"past_key_values is a {type(cache).__name__}, expected a RecurrentCache.", hint=hint)
    shapes = [[tuple(tensor.shape) for tensor in state] for state in cache.states]
    if shapes != [*map(list, expected)]:
        raise CtxError(f"The states of past_key_values are {shapes}, expected {[*map(list, expected)]}.", hint=hint)
