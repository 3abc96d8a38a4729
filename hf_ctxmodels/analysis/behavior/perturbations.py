"""Perturbations of texts, without a parser: each returns variants of a text that differ from it.

A perturbation that does not apply to a text returns no variant; the text is then no case of the test.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

Texts = tuple[str, ...]
"""A text, or a pair of texts."""

NAMES = (
    *("Alice", "Anna", "Ben", "Carlos", "Carol", "Chen", "Clara", "Daniel", "David", "Elena", "Emma", "Fatima"),
    *("Grace", "Hannah", "Ivan", "James", "John", "Julia", "Kofi", "Laura", "Lucas", "Maria", "Mark", "Mary"),
    *("Michael", "Nina", "Olga", "Omar", "Paul", "Peter", "Priya", "Robert", "Rosa", "Samuel", "Sara", "Sofia"),
    *("Thomas", "Victor", "Wei", "William", "Yuki", "Zoe"),
)
PLACES = (
    *("Amsterdam", "Athens", "Berlin", "Boston", "Brazil", "Cairo", "Canada", "Chicago", "China", "Denmark"),
    *("Dublin", "Egypt", "England", "France", "Germany", "Greece", "India", "Ireland", "Italy", "Japan", "Kenya"),
    *("Lima", "Lisbon", "London", "Madrid", "Mexico", "Moscow", "Nairobi", "Norway", "Oslo", "Paris", "Peru"),
    *("Poland", "Portugal", "Prague", "Rome", "Scotland", "Spain", "Sweden", "Sydney", "Tokyo", "Toronto"),
    *("Turkey", "Vienna", "Warsaw"),
)
_CONTRACTIONS = {
    **{f"{verb} not": f"{verb}n't" for verb in ("are", "could", "did", "do", "does", "had", "has", "have", "is")},
    **{f"{verb} not": f"{verb}n't" for verb in ("must", "need", "should", "was", "were", "would")},
    "cannot": "can't",
    "will not": "won't",
    "i am": "i'm",
    "i have": "i've",
    "let us": "let's",
    **{f"{word} is": f"{word}'s" for word in ("he", "here", "it", "she", "that", "there", "what", "where", "who")},
    **{f"{word} are": f"{word}'re" for word in ("they", "we", "you")},
    **{f"{word} will": f"{word}'ll" for word in ("he", "i", "it", "she", "they", "we", "you")},
    **{f"{word} have": f"{word}'ve" for word in ("they", "we", "you")},
}
_EXPANSIONS = {short: long for long, short in _CONTRACTIONS.items()}
_AUXILIARIES = "am|are|can|could|did|do|does|had|has|have|is|may|might|must|should|was|were|will|would"


def swap_letters(text: str, generator: Random, count: int = 1) -> list[str]:
    """Swap `count` pairs of different adjacent letters inside words (typing errors)."""
    characters = list(text)
    for _ in range(count):
        positions = [
            index
            for index, (first, second) in enumerate(pairwise(characters))
            if first.isalpha() and second.isalpha() and first != second
        ]
        if not positions:
            return []
        index = generator.choice(positions)
        characters[index : index + 2] = characters[index + 1], characters[index]
    return ["".join(characters)]


def change_punctuation(text: str, generator: Random, value: Any = None) -> list[str]:
    """The text without punctuation at its end, and with a full stop."""
    stripped = text.rstrip(" .!?…")
    return [stripped, f"{stripped}."] if stripped else []


def change_contractions(text: str, generator: Random, value: Any = None) -> list[str]:
    """The text with all contractions expanded ("is not"), and with all phrases contracted ("isn't")."""
    return [_replace_words(text, _EXPANSIONS), _replace_words(text, _CONTRACTIONS)]


def _replace_words(text: str, replacements: Mapping[str, str]) -> str:
    """Replace whole words in any case; a capital at the start is preserved."""
    by_key = {key.lower(): value for key, value in replacements.items()}
    keys = "|".join(re.escape(key) for key in sorted(by_key, key=len, reverse=True))

    def replacement(match: re.Match[str]) -> str:
        value = by_key[match[0].lower()]
        return value[0].upper() + value[1:] if match[0][0].isupper() and value else value

    return re.sub(rf"(?<![\w'’])(?:{keys})(?![\w'’])", replacement, text, flags=re.IGNORECASE)


def negate(text: str, generator: Random, value: Any = None) -> list[str]:
    """Negate the first auxiliary verb, or remove its negation."""
    expanded = _replace_words(text, _EXPANSIONS)
    negated = re.compile(rf"\b({_AUXILIARIES}) not\b|\b(can)not\b", re.IGNORECASE)
    if negated.search(expanded):
        return [negated.sub(lambda match: match[1] or match[2], expanded, count=1)]
    for match in re.finditer(rf"\b({_AUXILIARIES})\b", expanded, re.IGNORECASE):
        preceding = expanded[: match.start()].rstrip(" \"'")
        starts_sentence = not preceding or preceding[-1] in ".!?:"
        if starts_sentence or match[0] not in ("May", "Will"):  # a month and a name
            return [f"{expanded[: match.end()]} not{expanded[match.end() :]}"]
    return []


def replace_entries(text: str, generator: Random, entries: Sequence[str]) -> list[str]:
    """Replace each name that is in a list by another one of the list, the same one for all its occurrences."""
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(entries, key=len, reverse=True)))})\b")
    occurring = list(dict.fromkeys(pattern.findall(text)))
    available = [entry for entry in entries if entry not in occurring]
    if not occurring or len(available) < len(occurring):
        return []
    substitutes = dict(zip(occurring, generator.sample(available, len(occurring)), strict=True))
    return [pattern.sub(lambda match: substitutes[match[0]], text)]


def change_numbers(text: str, generator: Random, value: Any = None) -> list[str]:
    """Replace each whole number by a different random one with as many digits."""

    def replacement(match: re.Match[str]) -> str:
        low = 0 if len(match[0]) == 1 else 10 ** (len(match[0]) - 1)
        span = 10 ** len(match[0]) - low
        return str(low + (int(match[0]) - low + generator.randrange(1, span)) % span)

    return [re.sub(r"(?<![\w.,])\d{1,9}(?![\w]|[.,]\d)", replacement, text)]


def replace_words(text: str, generator: Random, replacements: Mapping[str, str]) -> list[str]:
    """Replace whole words, in any case."""
    return [_replace_words(text, replacements)]


def append_texts(text: str, generator: Random, additions: Sequence[str]) -> list[str]:
    """The text with each addition after it."""
    return [f"{text.rstrip()} {addition}" for addition in additions]


def prepend_texts(text: str, generator: Random, additions: Sequence[str]) -> list[str]:
    """The text with each addition before it."""
    return [f"{addition} {text.lstrip()}" for addition in additions]


# name -> function, type of the value in a YAML file, and value if there is none
PERTURBATIONS: dict[str, tuple[Callable[[str, Random, Any], list[str]], Any, Any]] = {
    "typos": (swap_letters, int, 1),
    "punctuation": (change_punctuation, None, None),
    "contractions": (change_contractions, None, None),
    "negation": (negate, None, None),
    "names": (replace_entries, list[str], NAMES),
    "places": (replace_entries, list[str], PLACES),
    "numbers": (change_numbers, None, None),
    "replace": (replace_words, dict[str, str], None),
    "append": (append_texts, list[str], None),
    "prepend": (prepend_texts, list[str], None),
}
ORDER = "order"
"""The perturbation that swaps the texts of a pair."""


def perturb(texts: Texts, name: str, value: Any, generator: Random) -> list[Texts]:
    """Variants of a text or a pair that differ from it; of a pair, the last text is changed, or the order."""
    if name == ORDER:
        variants = [texts[::-1]]
    else:
        function = PERTURBATIONS[name][0]
        variants = [(*texts[:-1], variant) for variant in function(texts[-1], generator, value)]
    return [variant for variant in dict.fromkeys(variants) if variant != texts]
