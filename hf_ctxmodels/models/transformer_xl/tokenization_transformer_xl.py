"""Word-level tokenizer of Transformer-XL (the released code's `Vocab`)."""

import re
from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.moses import MosesTokenizer
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxTransformerXLTokenizer(MosesTokenizer, CtxWordTokenizer):
    """Splits text into words, ordered by frequency; `<eos>` follows each text.

    WikiText-103 is split into words in advance, so by default a tokenizer with a given vocabulary splits at white space
    and keeps the case. With `moses_language="en"` it also splits the words, hyphens and numbers of running text as in
    WikiText (`1 @,@ 000`), like the tokenizer of transformers 4. `train` lower-cases and splits at punctuation by
    default. See `CtxWordTokenizer` and `MosesTokenizer` for arguments, training and errors.

    Example:
        >>> rules = {"do_lower_case": False, "split_punctuation": False}  # for text that is split in advance
        >>> tokenizer = CtxTransformerXLTokenizer.train(["The cat sat ."] * 5, vocab_size=20, **rules)
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

    def _split_into_words(self, text: str, language: str, **options: Any) -> str:
        words = super()._split_into_words(text, language, aggressive_dash_splits=True, **options)
        return re.sub(r"(?<=\d)[,.](?=\d)", r" @\g<0>@ ", words)
