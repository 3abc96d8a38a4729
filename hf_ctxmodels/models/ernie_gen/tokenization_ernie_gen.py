"""WordPiece tokenizer of ERNIE-GEN, with tokens for queries and noise (Xiao et al. 2020, section 3.1)."""

from typing import Any

from hf_ctxmodels.tokenizers.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer

GENERATION_TOKENS = ("[ATTN]", "[NOISE]")


class CtxErnieGenTokenizer(WordPieceTokenizer):
    """Tokenizer of ERNIE-GEN: BERT's with the query token `[ATTN]` and the noise token `[NOISE]`.

    A vocabulary without them, such as BERT's, is supported: the mask token is then the query token. See
    `WordPieceTokenizer` for arguments, training and errors.

    Example:
        >>> texts = ["a cat sat on a mat", "a cat ran"]
        >>> tokenizer = CtxErnieGenTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.convert_tokens_to_ids("[ATTN]")
        5
    """

    first_tokens = (*SPECIAL_TOKENS, *GENERATION_TOKENS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tokens = [token for token in GENERATION_TOKENS if token in self._vocab]
        if tokens:
            self.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
