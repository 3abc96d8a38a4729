"""Word vectors looked up by the characters of a word."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.characters import row_hashes

_UPPER = range(ord("A") + 1, ord("Z") + 2)  # character ids: bytes from 1 on
_TO_LOWER = ord("a") - ord("A")
_NO_WORD = torch.iinfo(torch.int64).max


class CharacterVectors(nn.Module):
    """Characters of words -> word vectors, by a hash of the characters. Words outside the table have the vector of its
    last row, zeros.

    Args:
        words: Maximum number of words.
        width: Width of the vectors.
        padding_character: Id of padding after a word's end.
        lower_case: Whether the table's words are lower-cased; the look-up then lower-cases the letters A to Z.
        trainable: Whether the vectors are trained.
    """

    keys: Tensor

    def __init__(self, words: int, width: int, *, padding_character: int, lower_case: bool, trainable: bool) -> None:
        super().__init__()
        self.padding_character, self.lower_case = padding_character, lower_case
        self.fixed_parameters = () if trainable else ("table",)
        self.table = nn.Parameter(torch.zeros(words + 1, width), requires_grad=trainable)
        self.register_buffer("keys", torch.full((words,), _NO_WORD))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Empty the table."""
        init.zeros_(self.table)
        init.constant_(self.keys, _NO_WORD)

    @torch.no_grad()
    def fill(self, character_ids: Tensor, vectors: Tensor) -> None:
        """Set the words, (n, characters) ids, and their vectors, (n, width); the first of words with equal keys counts.

        Raises:
            CtxError: The vectors have another width, or are too many.
        """
        if len(vectors) > len(self.keys) or vectors.shape[1] != self.table.shape[1]:
            raise CtxError(f"The vectors are {tuple(vectors.shape)}, but the table is {tuple(self.table[1:].shape)}.")
        keys, order = self._keys_of(character_ids).sort(stable=True)
        differs = torch.ones_like(keys, dtype=torch.bool)
        differs[1:] = keys[1:] != keys[:-1]
        keys, order = keys[differs], order[differs]
        every = torch.full_like(self.keys, _NO_WORD)
        every[: len(keys)] = keys.to(every.device)
        table = torch.zeros_like(self.table)
        table[: len(keys)] = vectors[order].to(table)
        self.keys.copy_(every)
        self.table.copy_(table)

    def _keys_of(self, character_ids: Tensor) -> Tensor:
        # so that keys do not depend on the padded width
        ids = character_ids.masked_fill(character_ids == self.padding_character, 0)
        if self.lower_case:
            ids = ids + _TO_LOWER * ((ids >= _UPPER[0]) & (ids <= _UPPER[-1]))
        return row_hashes(ids)

    def forward(self, character_ids: Tensor) -> Tensor:
        """(..., characters) ids -> (..., width)."""
        keys = self._keys_of(character_ids.flatten(0, -2))
        unknown = len(self.keys)
        places = torch.searchsorted(self.keys, keys).clamp(max=unknown - 1)
        places = torch.where(self.keys[places] == keys, places, unknown)
        return F.embedding(places, self.table).unflatten(0, character_ids.shape[:-1])
