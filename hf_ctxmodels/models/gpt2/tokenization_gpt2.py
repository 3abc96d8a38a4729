"""Byte-level BPE tokenizer of GPT-2 (Radford et al. 2019, section 2.2)."""

from typing import Any, ClassVar

from hf_ctxmodels.tokenizers.bpe import CtxByteBPETokenizer


class CtxGpt2Tokenizer(CtxByteBPETokenizer):
    """Tokenizer of GPT-2. <|endoftext|> is the only special token; no special tokens are added to a text.

    Produces the same ids as `transformers.GPT2Tokenizer` on the same files. Unlike there, <|endoftext|> is also the
    padding token, so that texts can be batched; the models mark padding by the attention mask. See
    `CtxByteBPETokenizer` for arguments, training and errors.

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
