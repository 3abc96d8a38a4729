"""Tiny generated treebanks."""

import random
from pathlib import Path

_NOUNS = ["dogs", "sailors", "cats", "letters", "bridges"]
_VERBS = ["see", "carry", "find"]
_ADJECTIVES = ["old", "small"]


def make_tree(rng: random.Random) -> list[tuple[str, int, str]]:
    """Word, head (from 1, 0 is the root) and relation: [adjective] noun verb [adjective] noun ["."]."""
    subject, nominal_object = ([*rng.sample(_ADJECTIVES, rng.randint(0, 1)), rng.choice(_NOUNS)] for _ in range(2))
    verb = len(subject) + 1
    tree = []
    for words, relation in ((subject, "nsubj"), ([rng.choice(_VERBS)], "root"), (nominal_object, "obj")):
        noun = len(tree) + len(words)
        tree += [(word, noun, "amod") for word in words[:-1]]
        tree.append((words[-1], 0 if relation == "root" else verb, relation))
    return [*tree, (".", verb, "punct")] if rng.random() < 0.5 else tree


def to_conllu(trees: list[list[tuple[str, int, str]]]) -> str:
    """The text of a CoNLL-U file."""
    blocks = []
    for tree in trees:
        rows = (
            f"{number}\t{word}\t_\t_\t_\t_\t{head}\t{relation}\t_\t_\n"
            for number, (word, head, relation) in enumerate(tree, 1)
        )
        blocks.append("".join(rows))
    return "\n".join(blocks) + "\n"


def write_treebank(file: Path, number: int, seed: int) -> Path:
    """Write a CoNLL-U file with random sentences."""
    rng = random.Random(seed)
    file.write_text(to_conllu([make_tree(rng) for _ in range(number)]))
    return file
