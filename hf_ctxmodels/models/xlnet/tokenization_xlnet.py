"""SentencePiece tokenizer of XLNet (Yang et al. 2019, section 2.5 and the released code)."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from hf_ctxmodels.tokenizers.base import make_mask_token
from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer

END_TOKENS = ("<eop>", "<eod>")
"""End of a paragraph and of a document."""


class CtxXLNetTokenizer(CtxUnigramTokenizer):
    """XLNet's tokenizer: cased, without accents, SentencePiece unigram, A <sep> B <sep> <cls>, padded on the left.

    Produces the same ids as `transformers.XLNetTokenizer` on the same files (`spiece.model` or `tokenizer.json`).
    Unlike that class, it returns the segments (`token_type_ids`: 0 for A, 1 for B, 2 for <cls>, 3 for padding) by
    default, and `keep_accents` has an effect.

    Args:
        vocab: (token, log probability) in the order of the ids.
        do_lower_case: Lower-case the text.
        keep_accents: Keep combining accents.
        extra_special_tokens, additional_special_tokens: Additional special tokens (the latter is the former name);
            <eop> and <eod> are always included.
        add_prefix_space, _spm_precompiled_charsmap: See `CtxUnigramTokenizer`.
        **kwargs: Passed to `TokenizersBackend` (`model_max_length`, ...).

    Raises:
        CtxError: The vocabulary is missing, damaged, not a unigram model, or lacks a special token.

    Example:
        >>> tokenizer = CtxXLNetTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=40)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        'A cat sat.<sep><cls>'
    """

    padding_side = "left"
    first_tokens = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
    templates = ("$A:0 {sep}:0 {cls}:2", "$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2")

    def __init__(
        self,
        vocab: list[tuple[str, float]] | None = None,
        do_lower_case: bool = False,
        keep_accents: bool = False,
        bos_token: str = "<s>",
        eos_token: str = "</s>",
        unk_token: str = "<unk>",
        sep_token: str = "<sep>",
        pad_token: str = "<pad>",
        cls_token: str = "<cls>",
        mask_token: str | AddedToken = "<mask>",
        _spm_precompiled_charsmap: bytes | None = None,
        extra_special_tokens: Sequence[str | AddedToken] | None = None,
        additional_special_tokens: Sequence[str | AddedToken] | None = None,
        add_prefix_space: bool = True,
        **kwargs: Any,
    ) -> None:
        extra = list(extra_special_tokens or additional_special_tokens or ())
        extra += [token for token in END_TOKENS if token not in map(str, extra)]
        super().__init__(
            vocab,
            do_lower_case=do_lower_case,
            keep_accents=keep_accents,
            add_prefix_space=add_prefix_space,
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=make_mask_token(mask_token),
            extra_special_tokens=extra,
            _spm_precompiled_charsmap=_spm_precompiled_charsmap,
            **kwargs,
        )
        self._pad_token_type_id = 3  # segments 0 and 1 are the texts, 2 is <cls>
