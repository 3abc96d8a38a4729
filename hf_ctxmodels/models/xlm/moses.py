"""Words of running text as XLM's models read them: the Moses rules, by the package sacremoses, then lower-casing."""

import re
import unicodedata
from functools import lru_cache
from typing import Any

from hf_ctxmodels.core.errors import CtxError

SEGMENTED = ("ja", "th", "zh")  # written without spaces: Moses does not split them

_FULL_WIDTH = {chr(0xFF10 + digit): str(digit) for digit in range(10)}
_PUNCTUATION = str.maketrans(
    {
        **_FULL_WIDTH,
        **dict.fromkeys("\u201c\u201d\u300a\u300b\u300c\u300d", '"'),
        **dict.fromkeys("\uff0c\u3001", ","),
        **dict.fromkeys("\u2236\uff1a", ":"),
        "\uff1f": "?",
        "\uff01": "!",
        "\uff1b": ";",
        "\uff08": "(",
        "\uff09": ")",
        "\uff05": "%",
        "\uff5e": "~",
        "\u2019": "'",
        "\u2026": "...",
        "\u2501": "-",
        "\u3008": "<",
        "\u3009": ">",
        "\u3010": "[",
        "\u3011": "]",
    }
)
_FULL_STOP = re.compile("[\u3002\uff0e]\\s*")
# Romanian letters with a comma, a cedilla, a breve or a circumflex, as their plain ones
_ROMANIAN = str.maketrans(
    "\u015e\u015f\u0162\u0163\u0218\u0219\u021a\u021b\u0102\u0103\u00c2\u00e2\u00ce\u00ee", "SsTtSsTtAaAaIi"
)


def split_words(text: str, language: str, do_lower_case: bool) -> list[str]:
    """The words of a text: punctuation made plain, split by the rules of Moses, lower-cased without accents.

    Args:
        text: Running text.
        language: Its language, which has its own abbreviations; English for those that Moses does not know.
        do_lower_case: Lower-case, and take accents off.

    Raises:
        CtxError: sacremoses is not installed, or the language is one of `SEGMENTED`.
    """
    normalizer, tokenizer = _moses(language)
    text = normalizer.normalize(_FULL_STOP.sub(". ", text).translate(_PUNCTUATION))
    text = "".join(character for character in text if not unicodedata.category(character).startswith("C"))
    words = tokenizer.tokenize(text.translate(_ROMANIAN) if language == "ro" else text, return_str=False, escape=False)
    if do_lower_case:
        words = without_accents(" ".join(words)).split(" ")
    return [word for word in words if word]


def without_accents(text: str) -> str:
    """The text in lower case, decomposed, without combining marks."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn").lower()


@lru_cache
def _moses(language: str) -> tuple[Any, Any]:
    """The normaliser of punctuation and the splitter of a language."""
    if language in SEGMENTED:
        raise CtxError(
            f"The Moses rules do not split {language!r}, which is written without spaces between words.",
            hint="split the words yourself and open the tokenizer with word_splitting='whitespace'.",
        )
    try:
        import sacremoses
    except ImportError as error:
        raise CtxError(
            "The released XLM tokenizers split words by the Moses rules, for which sacremoses is not installed.",
            hint="pip install hf_ctxmodels[moses]; or open it with word_splitting='punctuation', whose ids differ "
            "where Moses splits otherwise.",
        ) from error
    return sacremoses.MosesPunctNormalizer(lang=language), sacremoses.MosesTokenizer(lang=language)
