"""SentencePiece tokenizer of ALBERT (Lan et al. 2019, section 4.1)."""

from typing import Any

from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer


class CtxAlbertTokenizer(CtxUnigramTokenizer):
    """ALBERT's tokenizer: lower-cased and without accents, SentencePiece unigram, [CLS] A [SEP] B [SEP].

    Gives the ids of `transformers.AlbertTokenizer` on the same files (`spiece.model` or `tokenizer.json`), and the
    segments (`token_type_ids`) too, which that class leaves out unless asked.

    Args:
        vocab: (piece, log probability) in the order of the ids.
        do_lower_case: lower-case the text.
        keep_accents: leave combining accents in the text.
        add_prefix_space, _spm_precompiled_charsmap: see `CtxUnigramTokenizer`.
        **kwargs: passed on to `TokenizersBackend` (`model_max_length`, `padding_side`, ...).

    Raises:
        CtxError: the vocabulary is missing, damaged, of another kind, or without one of the special tokens.

    Example:
        >>> tokenizer = CtxAlbertTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=40)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        '[CLS] a cat sat.[SEP]'
    """

    first_tokens = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    templates = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")

    def __init__(
        self,
        vocab: list[tuple[str, float]] | None = None,
        do_lower_case: bool = True,
        keep_accents: bool = False,
        bos_token: str = "[CLS]",
        eos_token: str = "[SEP]",
        unk_token: str = "<unk>",
        sep_token: str = "[SEP]",
        pad_token: str = "<pad>",
        cls_token: str = "[CLS]",
        mask_token: str = "[MASK]",
        _spm_precompiled_charsmap: bytes | None = None,
        add_prefix_space: bool = True,
        **kwargs: Any,
    ) -> None:
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
            mask_token=mask_token,
            _spm_precompiled_charsmap=_spm_precompiled_charsmap,
            **kwargs,
        )
