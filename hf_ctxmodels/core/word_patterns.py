"""Regular expressions for the words of all scripts, for the module `regex`.

In the module `re`, `\\w` does not match the marks of letters: vowels in Hindi, Thai and pointed Hebrew or Arabic, and
accents in decomposed text.
"""

import regex

LETTER = r"[\w\p{N}]"
"""A letter, mark, number or underscore."""
# soft hyphens and joiners are parts of a word, as in Unicode's annex 29; a zero-width space separates words
_RUN = rf"{LETTER}+(?:[\p{{Cf}}--\u200b]+{LETTER}+)*"
_MARK = rf"(?!{LETTER}|[\s\x1c-\x1f\p{{Cf}}])\X"
_URL = rf"{LETTER}++://[^\s<>\"]*(?:{LETTER}|/)"
_ABBREVIATION = rf"(?:\p{{L}}\.){{2,}}(?!{LETTER}|\.)"
_WORD = rf"{_RUN}(?:[-'’.]{_RUN}|(?<=\d)[,:]\d{LETTER}*)*"
WORD = regex.compile(rf"{_URL}|{_ABBREVIATION}|{_WORD}|{_MARK}", regex.V1)
"""A word, or a punctuation mark, symbol or emoji with its modifiers; invisible format characters are no words.

Contractions ("don't"), possessives, hyphenated words, numbers ("1,000.5", "10:30"), abbreviations of letters ("U.S.")
and URLs ("https://a.b/c") are words.
"""
RUN_OR_MARK = regex.compile(rf"{_RUN}|{_MARK}", regex.V1)
"""As `WORD`, but hyphens, apostrophes and other marks separate words."""
