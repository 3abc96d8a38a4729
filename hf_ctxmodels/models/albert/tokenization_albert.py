"""SentencePiece tokenizer of ALBERT (Lan et al. 2019, section 4.1)."""

from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer


class CtxAlbertTokenizer(CtxUnigramTokenizer):
    """Tokenizer of ALBERT: lower-cased SentencePiece unigram without accents, [CLS] A [SEP] B [SEP].

    Produces the same ids as `transformers.AlbertTokenizer` on the same files (`spiece.model` or `tokenizer.json`); the
    segments (`token_type_ids`) are returned by default. See `CtxUnigramTokenizer` for arguments, training and errors.

    Example:
        >>> tokenizer = CtxAlbertTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=40)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        '[CLS] a cat sat.[SEP]'
    """

    first_tokens = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    templates = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")
    defaults: ClassVar[dict[str, Any]] = {
        "do_lower_case": True,
        "keep_accents": False,
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "unk_token": "<unk>",
        "sep_token": "[SEP]",
        "pad_token": "<pad>",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }
