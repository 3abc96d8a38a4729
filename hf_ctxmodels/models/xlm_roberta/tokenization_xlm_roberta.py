"""SentencePiece tokenizer of XLM-R (Conneau et al. 2020, section 3), with the ids of its release in fairseq."""

from typing import Any, ClassVar

from tokenizers import AddedToken

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import make_mask_token
from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer, Pieces


class CtxXLMRobertaTokenizer(CtxUnigramTokenizer):
    """Tokenizer of XLM-R: SentencePiece unigram for all languages, <s> A </s>, pairs <s> A </s></s> B </s>.

    Produces the same ids as `transformers.XLMRobertaTokenizer` on the same files (`sentencepiece.bpe.model` or
    `tokenizer.json`): <s> 0, <pad> 1, </s> 2, <unk> 3, then the other tokens, <mask> last. <mask> absorbs the preceding
    space, as in the released tokenizer.json. See `CtxUnigramTokenizer` for arguments, training and errors.

    Example:
        >>> tokenizer = CtxXLMRobertaTokenizer.train(["A cat sat on a mat.", "Eine Katze lief."], vocab_size=40)
        >>> tokenizer.decode(tokenizer("A cat sat.").input_ids)
        '<s> A cat sat.</s>'
    """

    vocab_files_names = {"vocab_file": "sentencepiece.bpe.model", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    first_tokens = ("<unk>", "<s>", "</s>")
    templates = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0")
    normalizes_quotes = False

    defaults: ClassVar[dict[str, Any]] = {
        "do_lower_case": False,
        "keep_accents": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "cls_token": "<s>",
    }

    def __init__(self, *args: Any, mask_token: str | AddedToken | None = "<mask>", **kwargs: Any) -> None:
        super().__init__(*args, mask_token=make_mask_token(mask_token), **kwargs)

    @classmethod
    def reorder_vocabulary(cls, pieces: Pieces) -> Pieces:
        """Reorder as in fairseq: four special tokens instead of the three in the file, the other tokens, <mask>.

        Raises:
            CtxError: The file starts with other tokens.
        """
        if tuple(piece for piece, _ in pieces[: len(cls.first_tokens)]) != cls.first_tokens:
            raise CtxError(
                f"The SentencePiece model starts with {', '.join(piece for piece, _ in pieces[:3])}, expected "
                f"{', '.join(cls.first_tokens)}.",
                hint="load the file with the tokenizer of its family.",
            )
        first = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        return [*first, *pieces[len(cls.first_tokens) :], ("<mask>", 0.0)]
