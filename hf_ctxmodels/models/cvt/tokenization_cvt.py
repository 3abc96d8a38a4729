"""Tokenizer of CVT."""

from typing import Any, ClassVar

from transformers import BatchEncoding

from hf_ctxmodels.tokenizers.character_level import CtxCharacterTokenizer
from hf_ctxmodels.tokenizers.word_level import CtxTranslationTokenizer, CtxWordTokenizer


class CtxCvtTokenizer(CtxTranslationTokenizer, CtxCharacterTokenizer):
    r"""Words as characters, see `CtxCharacterTokenizer`; no vocabulary is needed. For translation, `text_target` is
    split reversibly into words of a target vocabulary, see `CtxTranslationTokenizer`.

    Example:
        >>> tokenizer = CtxCvtTokenizer.train(["a cat\teine Katze"], vocab_size=10, min_count=1, min_target_count=1)
        >>> tokenizer.decode_target(tokenizer(text_target=["eine Katze"]).input_ids)
        ['eine Katze']
    """

    requires_target_words: ClassVar[bool] = False

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding:
        """Characters of source words, ids of target words."""
        if self._tokenizer is self._target:
            return CtxWordTokenizer._encode_plus(self, text, text_pair, **kwargs)
        return super()._encode_plus(text, text_pair, **kwargs)
