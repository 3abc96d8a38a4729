"""Rule-based sentence splitting, fast and deterministic.

A sentence ends after `.`, `!`, `?` or `…` (and closing quotes and brackets) if white space follows and the next word,
without opening quotes and brackets, does not begin with a lower-case letter. It does not end after a known abbreviation
or an initial ("J. Smith"). Full-width marks of Chinese and Japanese end a sentence with or without white space. In a
paragraph without capitals a sentence ends at every such mark but an ellipsis.
"""

import re

ABBREVIATIONS = frozenset(
    # titles and names, references, firms, months, dotted words, German, French and Spanish
    """
    mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt gov sen rep pres mt ft
    no nos vol fig eq sec ch art pp ed eds vs cf al approx
    dept est inc ltd co corp
    jan feb mar apr jun jul aug sep sept oct nov dec
    e.g i.e u.s u.k u.n
    z.b bzw ca usw nr str bd hr mme mlle sra srta dra
    """.split()  # noqa: SIM905  (a block of words is more readable than a list of literals)
)

_END = re.compile(
    r"""
    [.!?…]+ ["'”’»)\]]*              # a mark and closing quotes and brackets,
    (?=\s+ ["'“‘«(\[¿¡]* (?P<next>\w))  # before a word,
    | [。！？]+ [」』”’）]*            # or a full-width mark
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"([^\W\d_][\w.]*)\.$")
_LONGEST_WORD = 32


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, stripped and non-empty, with all of their visible characters.

    >>> split_sentences("Mr. Smith left. Was it late? It was 4.30 p.m. by the clock.")
    ['Mr. Smith left.', 'Was it late?', 'It was 4.30 p.m. by the clock.']
    >>> split_sentences("mr. smith left . was it late ... or not ? it was .")
    ['mr. smith left .', 'was it late ... or not ?', 'it was .']
    """
    sentences, start = [], 0
    has_capitals = not paragraph.islower()
    for match in _END.finditer(paragraph):
        following = match["next"]
        if following:
            continued = following.islower() if has_capitals else match[0].startswith(("..", "…"))
            if continued or _ends_in_abbreviation(paragraph[start : match.end()]):
                continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_in_abbreviation(text: str) -> bool:
    """Whether the full stop at the end of `text` is part of its last word."""
    match = _LAST_WORD.search(text[-_LONGEST_WORD:])
    if match is None:
        return False
    word = match[1]
    return (len(word) == 1 and word.isupper()) or word.lower() in ABBREVIATIONS
