"""WordPiece tokenizer of ERNIE-GEN, with tokens for queries and noise (Xiao et al. 2020, section 3.1)."""

from typing import Any

from hf_ctxmodels.tokenizers.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer

OWN_TOKENS = ("[ATTN]", "[NOISE]")


class CtxErnieGenTokenizer(WordPieceTokenizer):
    """BERT's tokenizer with `[ATTN]`, whose state predicts a token, and `[NOISE]`, which stands in place of one.

    A vocabulary without them, as BERT's, opens as it is: the mask token is then the query token. See
    `WordPieceTokenizer` for arguments, training and errors.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxErnieGenTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.convert_tokens_to_ids("[ATTN]")
        5
    """

    first_tokens = (*SPECIAL_TOKENS, *OWN_TOKENS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        known = [token for token in OWN_TOKENS if token in self._vocab]
        if known:
            self.add_special_tokens({"extra_special_tokens": known}, replace_extra_special_tokens=False)
