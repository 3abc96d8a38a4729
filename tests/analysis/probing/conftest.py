"""Fixture of a small random treebank."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

NOUNS = {"Sing": ["cat", "dog", "sailor", "boat"], "Plur": ["cats", "dogs", "sailors", "boats"]}
VERBS = {
    "Pres": ["see", "find", "like", "hold", "paint", "sell", "take", "want"],
    "Past": ["saw", "found", "liked", "held", "painted", "sold", "took", "wanted"],
}
ADJECTIVES = ["red", "old", "small"]


def conllu_sentence(generator: random.Random, number: int) -> str:
    """A sentence like "the old sailors saw a boat near the dog ." with random words."""
    rows: list[tuple[str, str, str, int, str]] = []
    verb_index = 4 if generator.random() < 0.5 else 3

    def noun_phrase(first: int, relation: str, adjective: bool) -> None:
        head = first + 1 + adjective
        rows.append((generator.choice(["the", "a"]), "DET", "_", head, "det"))
        if adjective:
            rows.append((generator.choice(ADJECTIVES), "ADJ", "_", head, "amod"))
        form = generator.choice(sorted(NOUNS))
        rows.append((generator.choice(NOUNS[form]), "NOUN", f"Number={form}", verb_index, relation))

    noun_phrase(1, "nsubj", verb_index == 4)
    tense = generator.choice(sorted(VERBS))
    rows.append((generator.choice(VERBS[tense]), "VERB", f"Tense={tense}|VerbForm=Fin", 0, "root"))
    noun_phrase(verb_index + 1, "obj", generator.random() < 0.5)
    if generator.random() < 0.5:
        noun_index = len(rows) + 3
        rows.append(("near", "ADP", "_", noun_index, "case"))
        rows.append(("the", "DET", "_", noun_index, "det"))
        rows.append((generator.choice(NOUNS["Sing"]), "NOUN", "Number=Sing", verb_index, "obl"))
    rows.append((".", "PUNCT", "_", verb_index, "punct"))
    lines = [
        f"{i}\t{word}\t{word}\t{tag}\t_\t{features}\t{head}\t{relation}\t_\t_"
        for i, (word, tag, features, head, relation) in enumerate(rows, 1)
    ]
    return "\n".join([f"# sent_id = {number}", *lines])


def long_sentence(size: int = 150) -> str:
    """A sentence longer than tiny models, whose second word has no token in most tokenizers."""
    words = ["cats", "\x00", *["sailors", "dogs"] * (size // 2 - 1)]
    lines = [f"{i}\t{word}\t_\tNOUN\t_\tNumber=Plur\t{i - 1}\tdep\t_\t_" for i, word in enumerate(words, 1)]
    return "\n".join(lines)


def write_treebank(file: Path, size: int, seed: int) -> str:
    generator = random.Random(seed)
    sentences = [conllu_sentence(generator, number) for number in range(size - 1)]
    file.write_text("\n\n".join([*sentences, long_sentence()]) + "\n")
    return str(file)


@pytest.fixture(scope="session")
def treebank_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of files with 60, 20 and 20 sentences; the last sentence of each file is long."""
    folder = tmp_path_factory.mktemp("treebank")
    sizes: Sequence[tuple[str, int]] = (("train", 60), ("dev", 20), ("test", 20))
    return {split: write_treebank(folder / f"{split}.conllu", size, seed) for seed, (split, size) in enumerate(sizes)}
