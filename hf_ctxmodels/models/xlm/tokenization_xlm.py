"""Tokenizer of XLM."""

from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.word_bpe import WordBPETokenizer


class CtxXLMTokenizer(WordBPETokenizer):
    """XLM's tokenizer."""

    first_tokens = ("<s>", "</s>", "<pad>", "<unk>", *(f"<special{number}>" for number in range(10)))
    defaults: ClassVar[dict[str, Any]] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<special1>",
    }
    templates = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0")
