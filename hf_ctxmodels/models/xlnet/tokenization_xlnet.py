"""SentencePiece tokenizer of XLNet (Yang et al. 2019, section 2.5 and the released code)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tokenizers import AddedToken

from hf_ctxmodels.tokenizers.base import make_mask_token
from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer

END_TOKENS = ("<eop>", "<eod>")
"""End of a paragraph and of a document."""


class CtxXLNetTokenizer(CtxUnigramTokenizer):
    """XLNet's tokenizer: cased, without accents, SentencePiece unigram, A <sep> B <sep> <cls>, padded on the left.

    Produces the same ids as `transformers.XLNetTokenizer` on the same files (`spiece.model` or `tokenizer.json`).
    Unlike that class, it returns the segments (`token_type_ids`: 0 for A, 1 for B, 2 for <cls>, 3 for padding) by
    default, and `keep_accents` has an effect. See `CtxUnigramTokenizer` for other arguments, training and errors.

    Args:
        extra_special_tokens, additional_special_tokens: Additional special tokens (the latter is the former name);
            <eop> and <eod> are always included.

    Example:
        >>> tokenizer = CtxXLNetTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=40)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        'A cat sat.<sep><cls>'
    """

    padding_side = "left"
    first_tokens = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
    templates = ("$A:0 {sep}:0 {cls}:2", "$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2")
    defaults: ClassVar[dict[str, Any]] = {
        "do_lower_case": False,
        "keep_accents": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "<sep>",
        "pad_token": "<pad>",
        "cls_token": "<cls>",
    }

    def __init__(
        self,
        *args: Any,
        mask_token: str | AddedToken | None = "<mask>",
        extra_special_tokens: Sequence[str | AddedToken] | None = None,
        additional_special_tokens: Sequence[str | AddedToken] | None = None,
        **kwargs: Any,
    ) -> None:
        extra = list(extra_special_tokens or additional_special_tokens or ())
        extra += [token for token in END_TOKENS if token not in map(str, extra)]
        super().__init__(*args, mask_token=make_mask_token(mask_token), extra_special_tokens=extra, **kwargs)
        self._pad_token_type_id = 3  # segments 0 and 1 are the texts, 2 is <cls>
