"""Tokenizer of LASER."""

from typing import Any

from transformers import BatchEncoding

from hf_ctxmodels.tokenizers.bpe import JointBPETokenizer
from hf_ctxmodels.tokenizers.moses import load_moses, map_texts


class CtxLaserTokenizer(JointBPETokenizer):
    """Joint BPE of all languages; see `JointBPETokenizer` for other arguments, training and errors.

    Args:
        moses_language: Normalize punctuation and split words by the Moses rules of this language (package sacremoses),
            as in the released code, before BPE; None for the rules of `JointBPETokenizer`. The attribute can be
            changed. Chinese and Japanese must be split beforehand, and Greek be romanized. Offsets refer to the split
            text.
    """

    def __init__(self, *args: Any, moses_language: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, moses_language=moses_language, **kwargs)
        self.moses_language = moses_language

    @property
    def moses_language(self) -> str | None:
        """Language of the Moses rules; None if they are not used."""
        return self._moses_language

    @moses_language.setter
    def moses_language(self, language: str | None) -> None:
        self._moses_language = self.init_kwargs["moses_language"] = language
        self.reads_unchanged_text = language is None

    def _encode_plus(self, text: Any, text_pair: Any = None, *args: Any, **kwargs: Any) -> BatchEncoding:
        if self.moses_language is not None:
            text, text_pair = (map_texts(self, texts, self._split_into_words) for texts in (text, text_pair))
        return super()._encode_plus(text, text_pair, *args, **kwargs)

    def _split_into_words(self, text: str) -> str:
        normalizer, tokenizer = load_moses(str(self.moses_language))
        return tokenizer.tokenize(normalizer.normalize(text), return_str=True, escape=False)
