"""Tokenizer of task networks."""

from typing import Any

import numpy as np
from torch import Tensor

from hf_ctxmodels.tokenizers.character_level import BYTES, CtxCharacterTokenizer


class CtxTaskNetworkTokenizer(CtxCharacterTokenizer):
    """Splits texts into words, and represents each word by its bytes, from which the network restores it.

    `input_ids` are (batch, words, bytes). There are no special tokens; the second text of a pair has `token_type_ids`
    of 1. See `CtxCharacterTokenizer`.

    Example:
        >>> tokenizer = CtxTaskNetworkTokenizer.from_words([])
        >>> tokenizer("A cat", return_tensors="pt").input_ids.shape
        torch.Size([1, 2, 100])
    """

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    special_tokens = ("[PAD]", "[UNK]")
    defaults = {**CtxCharacterTokenizer.defaults, "bos_token": None, "eos_token": None}
    templates = ("$A:0", "$A:0 $B:1")

    def __init__(self, *args: Any, max_characters: int = 100, **kwargs: Any) -> None:
        super().__init__(*args, max_characters=max_characters, **kwargs)


def decode_words(character_ids: Tensor) -> list[str]:
    """The words of (words, bytes) ids on the CPU."""
    ids = character_ids.numpy()
    is_byte = (ids > 0) & (ids <= BYTES)
    characters = np.where(is_byte, ids - 1, 0).astype(np.uint8)
    lengths = is_byte.sum(1)
    starts = is_byte.argmax(1)
    return [
        row[start : start + length].tobytes().decode("utf-8", "replace")
        for row, start, length in zip(characters, starts, lengths, strict=True)
    ]
