"""Byte-level BPE tokenizer of RoBERTa (Liu et al. 2019, section 4.4)."""

from typing import Any

from tokenizers import AddedToken, processors

from hf_ctxmodels.tokenizers.base import word_like
from hf_ctxmodels.tokenizers.byte_bpe import CtxByteBPETokenizer


class CtxRobertaTokenizer(CtxByteBPETokenizer):
    """RoBERTa's tokenizer: GPT-2's byte-level BPE, <s> A </s>, pairs <s> A </s></s> B </s>.

    Gives the ids of `transformers.RobertaTokenizer` on the same files. <mask> takes the space before it, as it does in
    the released tokenizer.json.

    Args:
        vocab, merges, errors, add_prefix_space, trim_offsets: See `CtxByteBPETokenizer`.
        **kwargs: Passed on to `TokenizersBackend` (`model_max_length`, `padding_side`, ...).

    Raises:
        CtxError: See `CtxByteBPETokenizer`.

    Example:
        >>> tokenizer = CtxRobertaTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=270)
        >>> tokenizer.decode(tokenizer("A cat sat.", "It ran.").input_ids)
        '<s>A cat sat.</s></s>It ran.</s>'
    """

    first_tokens = ("<s>", "<pad>", "</s>", "<unk>")
    last_tokens = ("<mask>",)

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        merges: str | list[Any] | None = None,
        errors: str = "replace",
        bos_token: str = "<s>",
        eos_token: str = "</s>",
        sep_token: str = "</s>",
        cls_token: str = "<s>",
        unk_token: str = "<unk>",
        pad_token: str = "<pad>",
        mask_token: str | AddedToken = "<mask>",
        add_prefix_space: bool = False,
        trim_offsets: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            vocab,
            merges,
            errors=errors,
            bos_token=bos_token,
            eos_token=eos_token,
            sep_token=sep_token,
            cls_token=cls_token,
            unk_token=unk_token,
            pad_token=pad_token,
            mask_token=word_like(mask_token),
            add_prefix_space=add_prefix_space,
            trim_offsets=trim_offsets,
            **kwargs,
        )

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """<s> A </s>, and <s> A </s></s> B </s>; all of one segment."""
        sep, cls = ((str(token), self.convert_tokens_to_ids(str(token))) for token in (self.sep_token, self.cls_token))
        return processors.RobertaProcessing(sep, cls, self.trim_offsets, add_prefix_space)
