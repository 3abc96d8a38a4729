"""NER sentences in several languages, and a tiny BERT whose vocabulary covers them."""

import random
from pathlib import Path

from commands import save, tiny_pair

NAMES, PLACES = ["Anna", "Boris", "Clara", "David"], ["Paris", "Rome", "Athens", "Lima"]
VERBS = {"en": "saw", "de": "sah", "fr": "vit"}
WORDS = {language: (NAMES, verb, PLACES) for language, verb in VERBS.items()}  # the same entities in all languages
TaggedWords = list[tuple[str, str]]


def tagged_sentences(
    language: str, size: int, words: dict[str, tuple[list[str], str, list[str]]] = WORDS, seed: str = ""
) -> list[TaggedWords]:
    """Sentences of a name, a verb and a place, in this or the reverse order, with their tags."""
    rng, (names, verb, places) = random.Random(language + seed), words[language]
    sentences = ([(rng.choice(names), "B-PER"), (verb, "O"), (rng.choice(places), "B-LOC")] for _ in range(size))
    return [sentence[:: rng.choice([1, -1])] for sentence in sentences]


def write_wikiann(file: Path, language: str, sentences: list[TaggedWords]) -> Path:
    """Write a file in WikiANN's format."""
    blocks = ["\n".join(f"{language}:{word}\t{tag}" for word, tag in sentence) for sentence in sentences]
    file.write_text("\n\n".join(blocks) + "\n")
    return file


def save_tiny_bert(folder: Path, auto_class: str) -> Path:
    """Save a tiny BERT whose vocabulary covers all languages."""
    words, fields = " ".join([*NAMES, *PLACES, *VERBS.values()]), {"initializer_range": 0.2, "hidden_dropout_prob": 0.1}
    return save(folder, *tiny_pair("bert", auto_class, [words], vocab_size=120, **fields))
