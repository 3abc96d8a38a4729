"""Word-level tokenizer of Transformer-XL (the released code's `Vocab`)."""

from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxTransformerXLTokenizer(CtxWordTokenizer):
    """Splits text at white space into words, with their case, ordered by frequency; `<eos>` follows each text.

    WikiText-103 is split into words in advance. For running text, train with `split_punctuation=True`. See
    `CtxWordTokenizer` for arguments, training and errors.

    Example:
        >>> tokenizer = CtxTransformerXLTokenizer.train(["The cat sat . The cat ran ."], vocab_size=20, min_count=1)
        >>> tokenizer.tokenize("The cat slept .")
        ['The', 'cat', '<unk>', '.']
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("<eos>", "<unk>")
    defaults: ClassVar[dict[str, Any]] = {
        "do_lower_case": False,
        "split_punctuation": False,
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<eos>",
    }
    templates = ("$A:0 {eos}:0", "$A:0 {eos}:0 $B:1 {eos}:1")
