"""The Moses rules for punctuation and words (package sacremoses), on which some released models were trained."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError

UNSEGMENTED_LANGUAGES = ("ja", "th", "zh")  # written without spaces, which Moses does not split


@lru_cache
def load_moses(language: str) -> tuple[Any, Any]:
    """The punctuation normalizer and the tokenizer of a language, with the abbreviations of English for unknown ones.

    Raises:
        CtxError: sacremoses is not installed, or the language is one of `UNSEGMENTED_LANGUAGES`.
    """
    if language in UNSEGMENTED_LANGUAGES:
        raise CtxError(
            f"Moses does not support {language!r}, which is written without spaces between words.",
            hint="split the words beforehand, and use a tokenizer that splits at white space.",
        )
    try:
        import sacremoses
    except ImportError as error:
        raise CtxError(
            "The tokenizer splits words by the Moses rules of sacremoses, which is not installed.",
            hint="pip install 'hf_ctxmodels[moses]', or use a tokenizer with other rules, which splits some words "
            "differently.",
        ) from error
    return sacremoses.MosesPunctNormalizer(lang=language), sacremoses.MosesTokenizer(lang=language)


def map_texts(tokenizer: PreTrainedTokenizerBase, texts: Any, function: Callable[[str], str]) -> Any:
    """Apply a function to (nested lists of) texts between special tokens, which are separated by spaces; None is
    unchanged."""
    if not isinstance(texts, str):
        return texts if texts is None else [map_texts(tokenizer, text, function) for text in texts]
    special = "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))
    segments = re.split(f"({special})", texts)
    segments[::2] = map(function, segments[::2])
    return " ".join(segments)
