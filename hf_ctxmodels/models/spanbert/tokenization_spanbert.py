"""WordPiece tokenizer of SpanBERT (Joshi et al. 2020, section 4.2): BERT's cased one."""

from collections.abc import Iterable
from typing import Any, Self

from hf_ctxmodels.tokenizers.wordpiece import WordPieceTokenizer


class CtxSpanBertTokenizer(WordPieceTokenizer):
    """Tokenizer of SpanBERT: BERT's, cased by default. See `WordPieceTokenizer` for arguments, training and errors.

    Released checkpoints have only a `vocab.txt`, with which `transformers.BertTokenizer` lower-cases text by default.

    Example:
        >>> texts = ["A cat sat on a mat", "A cat ran"]
        >>> tokenizer = CtxSpanBertTokenizer.train(texts, vocab_size=40, min_frequency=1)
        >>> tokenizer.decode(tokenizer("A cat sat").input_ids)
        '[CLS] A cat sat [SEP]'
    """

    def __init__(self, vocab: str | dict[str, int] | None = None, do_lower_case: bool = False, **kwargs: Any) -> None:
        super().__init__(vocab, do_lower_case, **kwargs)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, do_lower_case: bool = False, **kwargs: Any) -> Self:
        """Learn a vocabulary, see `WordPieceTokenizer.train`."""
        return super().train(texts, vocab_size, do_lower_case=do_lower_case, **kwargs)
