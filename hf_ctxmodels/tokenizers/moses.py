"""The Moses rules for punctuation and words (package sacremoses), on which some released models were trained."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

from transformers import BatchEncoding, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import CtxTokenizer

UNSEGMENTED_LANGUAGES = ("ja", "th", "zh")  # written without spaces, which Moses does not split


def check_moses_language(language: Any) -> None:
    """Raise CtxError for a value that is not the name of a language, or a language that Moses does not split."""
    if not isinstance(language, str):
        raise CtxError(f"Expected the name of a language, such as 'en', got {language!r}.", hint="use 'en', 'de', ...")
    if language in UNSEGMENTED_LANGUAGES:
        raise CtxError(
            f"Moses does not support {language!r}, which is written without spaces between words.",
            hint="split the words beforehand, and use moses_language=None, or, for XLM, word_splitting='whitespace'.",
        )


@lru_cache
def load_moses(language: str) -> tuple[Any, Any]:
    """The punctuation normalizer and the tokenizer of a language, with the abbreviations of English for unknown ones.

    Raises:
        CtxError: sacremoses is not installed, or as in `check_moses_language`.
    """
    check_moses_language(language)
    try:
        import sacremoses
    except ImportError as error:
        raise CtxError(
            "The tokenizer splits words by the Moses rules of sacremoses, which is not installed.",
            hint="pip install 'hf_ctxmodels[moses]', or use moses_language=None, or, for XLM, "
            "word_splitting='punctuation', which splits some words differently.",
        ) from error
    return sacremoses.MosesPunctNormalizer(lang=language), sacremoses.MosesTokenizer(lang=language)


def map_texts(tokenizer: PreTrainedTokenizerBase, texts: Any, function: Callable[[str], str]) -> Any:
    """Apply a function to (nested lists of) texts between special tokens, which are separated by spaces; None is
    unchanged."""
    special_tokens = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, special_tokens))})")

    def apply(texts: Any) -> Any:
        if not isinstance(texts, str):
            return texts if texts is None else [apply(text) for text in texts]
        segments = pattern.split(texts)
        segments[::2] = map(function, segments[::2])
        return " ".join(segments)

    return apply(texts)


class MosesTokenizer(CtxTokenizer):
    """Base class of tokenizers that can split running text into words by the Moses rules.

    Args:
        moses_language: Normalize punctuation and split words by the rules of this language (package sacremoses) before
            the rules of the class; None for the rules of the class alone. The attribute can be changed. Texts that are
            split into words (`is_split_into_words`) are not split again. Offsets refer to the split text.

    Raises:
        CtxError: As `check_moses_language`.

    Attributes:
        prepares_subwords: Whether `prepare_text` also splits words, of all texts.
    """

    prepares_subwords: bool = False

    def __init__(self, *args: Any, moses_language: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, moses_language=moses_language, **kwargs)
        self.moses_language = moses_language

    @property
    def moses_language(self) -> str | None:
        """Language of the Moses rules; None if they are not used."""
        return self._moses_language

    @moses_language.setter
    def moses_language(self, language: str | None) -> None:
        if language is not None:
            self.check_language(language)
        self._moses_language = self.init_kwargs["moses_language"] = language
        self.reads_unchanged_text = language is None and not self.prepares_subwords

    def check_language(self, language: Any) -> None:
        """Raise CtxError for an unsupported language, see `check_moses_language`."""
        check_moses_language(language)

    @classmethod
    def train(cls, *args: Any, **kwargs: Any) -> Self:
        """Train a tokenizer; raises CtxError for `moses_language`, since training does not split texts by its rules."""
        if kwargs.get("moses_language") is not None:
            raise CtxError(
                "Tokenizers are not trained on texts split by the Moses rules.",
                location=f"moses_language={kwargs['moses_language']!r}",
                hint="split the texts beforehand, or omit moses_language.",
            )
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *args: Any, is_split_into_words: bool = False, **kwargs: Any
    ) -> BatchEncoding:
        if self.prepares_subwords or (self.moses_language is not None and not is_split_into_words):
            text, text_pair = (
                map_texts(self, texts, lambda segment: self.prepare_text(segment, is_split_into_words))
                for texts in (text, text_pair)
            )
        return super()._encode_plus(text, text_pair, *args, is_split_into_words=is_split_into_words, **kwargs)

    def prepare_text(self, text: str, is_split_into_words: bool) -> str:
        """Prepare a text, or a word of a text that is split into words, for the backend."""
        if self.moses_language is None or is_split_into_words:
            return text
        return self._split_into_words(text, self.moses_language)

    def _split_into_words(self, text: str, language: str, **options: Any) -> str:
        """The words of a text, separated by spaces; the options are arguments of `sacremoses.MosesTokenizer`."""
        normalizer, tokenizer = load_moses(language)
        return tokenizer.tokenize(normalizer.normalize(text), return_str=True, escape=False, **options)
