"""Sentinels, the tokens that stand for spans (Raffel et al. 2020, section 3.1.4)."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import SENTINEL_TOKEN
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.components.features import check_token_ids


class Sentinels:
    """Replaces the spans of a row by the sentinels <extra_id_0>, <extra_id_1>, ... of a tokenizer.

    Attributes:
        ids: (sentinels,) their ids in this order.
        vocab_size: Ids of the tokenizer's vocabulary are below it.

    Raises:
        CtxError: The tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocab = tokenizer.get_vocab()
        ids: list[int] = []
        while (token := SENTINEL_TOKEN.format(len(ids))) in vocab:
            ids.append(vocab[token])
        if not ids:
            raise CtxError(
                f"{type(tokenizer).__name__} has no sentinel {SENTINEL_TOKEN.format(0)}, which stands for a span.",
                hint="use a tokenizer of the family t5, or add_tokens(['<extra_id_99>', ..., '<extra_id_0>']), and "
                "resize the model's embeddings.",
            )
        self.ids = np.array(ids)
        self.vocab_size = max(vocab.values()) + 1
        self._are_sentinels = np.zeros(self.vocab_size, dtype=bool)
        self._are_sentinels[self.ids] = True

    def replace(self, ids: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """The row with its first span replaced by the first sentinel, the second one by the second, ...

        Args:
            ids: (tokens,).
            spans: (tokens,) bool; every run of True is a span.

        Raises:
            CtxError: There are more spans than sentinels.
        """
        starts = spans & ~np.append(False, spans[:-1])
        number = int(starts.sum())
        if number > len(self.ids):
            raise CtxError(
                f"A row of {len(ids)} tokens has {number} spans, but the tokenizer {len(self.ids)} sentinels.",
                hint="use shorter rows (max_length), less noise, longer spans, or a tokenizer with more sentinels.",
            )
        row = ids.copy()
        row[starts] = self.ids[:number]
        return row[starts | ~spans]

    def check_text(self, ids: np.ndarray) -> None:
        """Raise CtxError if a row of text holds a sentinel, which would stand for a span of no row, or an id outside
        the vocabulary."""
        check_token_ids(ids, self.vocab_size)
        found = self._are_sentinels[ids]
        if found.any():
            place = int(found.argmax())
            raise CtxError(
                f"The text holds the sentinel {SENTINEL_TOKEN.format(int((self.ids == ids[place]).argmax()))}, at token "
                f"{place} of a row.",
                hint="take such strings out of the text; a sentinel stands for a span that the model predicts.",
            )
