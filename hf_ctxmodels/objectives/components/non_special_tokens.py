"""The non-special tokens of a vocabulary: only these are predicted, masked or drawn as replacements."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.objectives.components.features import check_token_ids


class NonSpecialTokens:
    """The non-special tokens of a tokenizer's vocabulary.

    Attributes:
        table: (largest id + 1,) bool, True for non-special ids.
        ids: The non-special ids, ascending.

    Raises:
        CtxError: There is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = np.unique(np.fromiter(tokenizer.get_vocab().values(), dtype=np.int64))
        self.table = np.zeros(int(ids[-1]) + 1, dtype=bool)
        self.table[ids] = True
        self.table[tokenizer.all_special_ids] = False
        self.ids = np.flatnonzero(self.table)
        if not len(self.ids):
            raise CtxError("The tokenizer's vocabulary holds special tokens only.", hint="train it on some text first.")

    def candidates(self, ids: np.ndarray) -> np.ndarray:
        """(tokens,) bool, True for tokens that are not special; raises CtxError for an id outside the vocabulary."""
        check_token_ids(ids, len(self.table))
        return self.table[ids]
