"""Byte-level BPE tokenizer of RoBERTa (Liu et al. 2019, section 4.4)."""

from typing import Any, ClassVar

from tokenizers import AddedToken, processors

from hf_ctxmodels.tokenizers.base import make_mask_token
from hf_ctxmodels.tokenizers.bpe import CtxByteBPETokenizer


class CtxRobertaTokenizer(CtxByteBPETokenizer):
    """Tokenizer of RoBERTa: GPT-2's byte-level BPE, <s> A </s>, pairs <s> A </s></s> B </s>.

    Produces the same ids as `transformers.RobertaTokenizer` on the same files. <mask> absorbs the preceding space, as
    in the released tokenizer.json. See `CtxByteBPETokenizer` for arguments, training and errors.

    Example:
        >>> tokenizer = CtxRobertaTokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=270)
        >>> tokenizer.decode(tokenizer("A cat sat.", "It ran.").input_ids)
        '<s>A cat sat.</s></s>It ran.</s>'
    """

    first_tokens = ("<s>", "<pad>", "</s>", "<unk>")
    last_tokens = ("<mask>",)

    defaults: ClassVar[dict[str, Any]] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "cls_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }

    def __init__(self, *args: Any, mask_token: str | AddedToken | None = "<mask>", **kwargs: Any) -> None:
        super().__init__(*args, mask_token=make_mask_token(mask_token), **kwargs)

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """The template <s> A </s> and <s> A </s></s> B </s>, with a single segment, without tokens that are None."""
        sep, cls = (
            None if token is None else (str(token), self.convert_tokens_to_ids(str(token)))
            for token in (self.sep_token, self.cls_token)
        )
        if sep is not None and cls is not None:
            return processors.RobertaProcessing(sep, cls, self.trim_offsets, add_prefix_space)
        first = "" if cls is None else f"{cls[0]}:0 "
        last = "" if sep is None else f" {sep[0]}:0"
        template = processors.TemplateProcessing(
            single=f"{first}$A:0{last}",
            pair=f"{first}$A:0{last}{last} $B:0{last}",
            special_tokens=[token for token in (sep, cls) if token is not None],
        )
        return processors.Sequence([super().build_post_processor(add_prefix_space), template])
