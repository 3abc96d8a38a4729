"""Byte-level BPE tokenizer of GPT-2 (Radford et al. 2019, section 2.2)."""

from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.byte_bpe import CtxByteBPETokenizer


class CtxGpt2Tokenizer(CtxByteBPETokenizer):
    """GPT-2's tokenizer: <|endoftext|> is the only special token and is added to no text.

    Gives the ids of `transformers.GPT2Tokenizer` on the same files. Unlike there <|endoftext|> is also the padding
    token, so that texts can be batched; the models know padding by the attention mask only. See `CtxByteBPETokenizer`
    for arguments, training and errors.

    Example:
        >>> tokenizer = CtxGpt2Tokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=270)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        'A cat sat.'
    """

    last_tokens = ("<|endoftext|>",)

    defaults: ClassVar[dict[str, Any]] = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
