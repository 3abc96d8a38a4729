"""A fixed vector for each word of a list, found by the characters of a word."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_ctxmodels.layers.characters import row_keys

_UPPER = range(ord("A") + 1, ord("Z") + 2)  # character ids: bytes from 1 on
_TO_LOWER = ord("a") - ord("A")
_NO_WORD = torch.iinfo(torch.int64).max


class CharacterVectors(nn.Module):
    """Words by their characters -> their vectors; words that are not in the list have that of the last row, zeros.

    A word is found by one number that is made of its characters.

    Args:
        words: Number of words at most.
        width: Of a vector.
        padding_character: What fills a word behind its end.
        lower_case: Whether the words of the list are lower-cased. Letters from A to Z of what is looked up then are,
            too; others stay.
        trainable: Whether the vectors are parameters to be trained.
    """

    keys: Tensor

    def __init__(self, words: int, width: int, *, padding_character: int, lower_case: bool, trainable: bool) -> None:
        super().__init__()
        self.padding_character, self.lower_case = padding_character, lower_case
        self.fixed_parameters = () if trainable else ("table",)
        self.table = nn.Parameter(torch.zeros(words + 1, width), requires_grad=trainable)
        self.register_buffer("keys", torch.full((words,), _NO_WORD))

    @torch.no_grad()
    def fill(self, character_ids: Tensor, vectors: Tensor) -> None:
        """Set the words, (n, characters) ids, and their vectors, (n, width); where two are spelled alike, the first."""
        keys, order = self._keys_of(character_ids).sort(stable=True)
        differs = torch.ones_like(keys, dtype=torch.bool)
        differs[1:] = keys[1:] != keys[:-1]
        keys, order = keys[differs], order[differs]
        every = torch.full_like(self.keys, _NO_WORD)
        every[: len(keys)] = keys.to(every.device)
        table = torch.zeros_like(self.table)
        table[: len(keys)] = vectors[order].to(table)
        init.copy_(self.keys, every)
        init.copy_(self.table, table)

    def _keys_of(self, character_ids: Tensor) -> Tensor:
        ids = character_ids.masked_fill(character_ids == self.padding_character, 0)  # whatever a word is filled up to
        if self.lower_case:
            ids = ids + _TO_LOWER * ((ids >= _UPPER[0]) & (ids <= _UPPER[-1]))
        return row_keys(ids)

    def forward(self, character_ids: Tensor) -> Tensor:
        """(..., characters) ids -> (..., width)."""
        keys = self._keys_of(character_ids.flatten(0, -2))
        unknown = len(self.keys)
        places = torch.searchsorted(self.keys, keys).clamp(max=unknown - 1)
        places = torch.where(self.keys[places] == keys, places, unknown)
        return F.embedding(places, self.table).unflatten(0, character_ids.shape[:-1])
