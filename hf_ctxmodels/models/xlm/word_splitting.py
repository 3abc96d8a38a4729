"""Word splitting of XLM: the Moses rules (package sacremoses), then lower-casing."""

import re
import unicodedata

from hf_ctxmodels.tokenizers.moses import load_moses

# full-width digits and punctuation -> ASCII
_PUNCTUATION = str.maketrans(
    {
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **dict.fromkeys("\u201c\u201d\u300a\u300b\u300c\u300d", '"'),
        **dict.fromkeys("\uff0c\u3001", ","),
        **dict.fromkeys("\u2236\uff1a", ":"),
        **dict(zip("\uff1f\uff01\uff1b\uff08\uff09\uff05\uff5e", "?!;()%~", strict=True)),
        **dict(zip("\u2019\u2501\u3008\u3009\u3010\u3011", "'-<>[]", strict=True)),
        "\u2026": "...",
    }
)
_FULL_STOP = re.compile("[\u3002\uff0e]\\s*")
# Romanian letters with diacritics -> without
_ROMANIAN = str.maketrans(
    "\u015e\u015f\u0162\u0163\u0218\u0219\u021a\u021b\u0102\u0103\u00c2\u00e2\u00ce\u00ee", "SsTtSsTtAaAaIi"
)


def split_words(text: str, language: str, do_lower_case: bool) -> list[str]:
    """Split a text into words: normalize punctuation, split by the Moses rules with the abbreviations of the language
    (English for unknown languages), and, with `do_lower_case`, lower-case and remove accents; raises CtxError as
    `load_moses`."""
    normalizer, tokenizer = load_moses(language)
    text = normalizer.normalize(_FULL_STOP.sub(". ", text).translate(_PUNCTUATION))
    text = "".join(character for character in text if not unicodedata.category(character).startswith("C"))
    words = tokenizer.tokenize(text.translate(_ROMANIAN) if language == "ro" else text, return_str=False, escape=False)
    if do_lower_case:
        words = without_accents(" ".join(words)).split(" ")
    return [word for word in words if word]


def without_accents(text: str) -> str:
    """Lower-case a text and remove combining marks."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn").lower()
