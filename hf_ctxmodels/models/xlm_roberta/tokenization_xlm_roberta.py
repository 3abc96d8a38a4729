"""SentencePiece tokenizer of XLM-R (Conneau et al. 2020, section 3), with the ids of its release in fairseq."""

from typing import Any

from tokenizers import AddedToken

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import word_like
from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer, Pieces


class CtxXLMRobertaTokenizer(CtxUnigramTokenizer):
    """XLM-R's tokenizer: SentencePiece unigram for all languages, <s> A </s>, pairs <s> A </s></s> B </s>.

    Gives the ids of `transformers.XLMRobertaTokenizer` on the same files (`sentencepiece.bpe.model` or
    `tokenizer.json`): <s> 0, <pad> 1, </s> 2, <unk> 3, then the pieces, <mask> last. <mask> takes the space before it,
    as it does in the released tokenizer.json.

    Args:
        vocab: (piece, log probability) in the order of the ids.
        do_lower_case: Lower-case the text.
        keep_accents: Leave combining accents in the text.
        add_prefix_space, _spm_precompiled_charsmap: See `CtxUnigramTokenizer`.
        **kwargs: Passed on to `TokenizersBackend` (`model_max_length`, `padding_side`, ...).

    Raises:
        CtxError: The vocabulary is missing, damaged, of another kind, or without one of the special tokens.

    Example:
        >>> tokenizer = CtxXLMRobertaTokenizer.train(["A cat sat on a mat.", "Eine Katze lief."], vocab_size=40)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        '<s> A cat sat.</s>'
    """

    vocab_files_names = {"vocab_file": "sentencepiece.bpe.model", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    first_tokens = ("<unk>", "<s>", "</s>")
    templates = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0")
    plain_quotes = False

    def __init__(
        self,
        vocab: Pieces | None = None,
        do_lower_case: bool = False,
        keep_accents: bool = True,
        bos_token: str = "<s>",
        eos_token: str = "</s>",
        unk_token: str = "<unk>",
        sep_token: str = "</s>",
        pad_token: str = "<pad>",
        cls_token: str = "<s>",
        mask_token: str | AddedToken = "<mask>",
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
            mask_token=word_like(mask_token),
            _spm_precompiled_charsmap=_spm_precompiled_charsmap,
            **kwargs,
        )

    @classmethod
    def arrange(cls, pieces: Pieces) -> Pieces:
        """fairseq's order: its own special tokens, of which SentencePiece's file begins with three, then the pieces.

        Raises:
            CtxError: The file begins with other tokens.
        """
        if tuple(piece for piece, _ in pieces[: len(cls.first_tokens)]) != cls.first_tokens:
            raise CtxError(
                f"The SentencePiece model begins with {', '.join(piece for piece, _ in pieces[:3])}, not with "
                f"{', '.join(cls.first_tokens)}: it is another family's.",
                hint="open it with that family's tokenizer.",
            )
        first = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        return [*first, *pieces[len(cls.first_tokens) :], ("<mask>", 0.0)]
