"""Sentinels, the tokens that replace spans (Raffel et al. 2020, section 3.1.4)."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import SENTINEL_TOKEN
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.components.features import check_token_ids


class Sentinels:
    """Replaces the spans of a sequence by the sentinels <extra_id_0>, <extra_id_1>, ... of a tokenizer.

    Attributes:
        ids: (sentinels,) their ids in this order.
        vocab_size: One more than the largest id of the tokenizer's vocabulary.

    Raises:
        CtxError: The tokenizer has no sentinels.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocab = tokenizer.get_vocab()
        ids: list[int] = []
        while (token := SENTINEL_TOKEN.format(len(ids))) in vocab:
            ids.append(vocab[token])
        if not ids:
            raise CtxError(
                f"{type(tokenizer).__name__} has no sentinel {SENTINEL_TOKEN.format(0)} to replace a span.",
                hint="use a tokenizer of the family t5, or call add_tokens(['<extra_id_99>', ..., '<extra_id_0>']), "
                "and resize the model's embeddings.",
            )
        self.ids = np.array(ids)
        self.vocab_size = max(vocab.values()) + 1
        self._is_sentinel = np.zeros(self.vocab_size, dtype=bool)
        self._is_sentinel[self.ids] = True

    def replace(self, ids: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """The sequence with its first span replaced by the first sentinel, the second one by the second, ...

        Args:
            ids: (tokens,).
            spans: (tokens,) bool; each run of True is a span.

        Raises:
            CtxError: There are more spans than sentinels.
        """
        starts = spans & ~np.append(False, spans[:-1])
        count = int(starts.sum())
        if count > len(self.ids):
            raise CtxError(
                f"A sequence of {len(ids)} tokens has {count} spans, but there are {len(self.ids)} sentinels.",
                hint="use a smaller max_length, less noise, longer spans, or a tokenizer with more sentinels.",
            )
        replaced = ids.copy()
        replaced[starts] = self.ids[:count]
        return replaced[starts | ~spans]

    def check_text(self, ids: np.ndarray) -> None:
        """Raise CtxError if a text contains a sentinel, or an id outside the vocabulary."""
        check_token_ids(ids, self.vocab_size)
        is_sentinel = self._is_sentinel[ids]
        if is_sentinel.any():
            position = int(is_sentinel.argmax())
            sentinel = SENTINEL_TOKEN.format(int((self.ids == ids[position]).argmax()))
            raise CtxError(
                f"The text contains the sentinel {sentinel}, at token {position} of a sequence.",
                hint="remove such strings from the text; a sentinel represents a span to be predicted.",
            )
