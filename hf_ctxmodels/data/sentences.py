"""Splitting paragraphs into sentences by rule.

A sentence ends after `.`, `!`, `?` or `...` (with closing quotes and brackets), when white space follows and the next
word begins like a sentence: with a capital letter, a digit, or an opening quote or bracket. It does not end after a
known abbreviation or a single initial ("J. Smith"). The full-width marks of Chinese and Japanese end a sentence with
or without white space. Pretraining only needs pieces that mostly are sentences, and so no language model is used.
"""

from __future__ import annotations

import re

ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt gov sen rep pres mt ft no nos vol fig eq sec ch art pp ed eds "
    "vs cf al approx dept est inc ltd co corp jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e u.s u.k u.n z.b "
    "bzw ca usw nr str bd hr fr mme mlle sra srta dra".split()
)

_CLOSING = "\"'”’»)\\]"
_CANDIDATE = re.compile(rf"(?:[.!?…]+[{_CLOSING}]*(?=\s+[\"'“‘«(\[¿¡]*[^\W_a-zß-öø-ÿ]))|(?:[。！？]+[」』”’）]*)")
_LAST_WORD = re.compile(r"([^\W\d_][\w.]*)\.$")


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph, stripped, none empty.

    >>> split_sentences("Mr. Smith left. Was it late? It was 4.30 p.m. by the clock.")
    ['Mr. Smith left.', 'Was it late?', 'It was 4.30 p.m. by the clock.']
    """
    sentences, start = [], 0
    for match in _CANDIDATE.finditer(paragraph):
        if _is_abbreviation(paragraph[start : match.end()]):
            continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviation(text: str) -> bool:
    """Whether the full stop at the end of `text` belongs to its last word."""
    match = _LAST_WORD.search(text[-32:])
    if match is None:
        return False
    word = match.group(1)
    return (len(word) == 1 and word.isupper()) or word.lower() in ABBREVIATIONS
