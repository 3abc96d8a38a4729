"""The best tree of a sentence, compared with all trees of short sentences."""

from itertools import product

import numpy as np
import pytest

from hf_ctxmodels.downstream.tasks.dependency_trees import best_tree


def is_tree(heads: tuple[int, ...]) -> bool:
    """Whether exactly one word depends on the root (-1), and all words are below it."""
    for word in range(len(heads)):
        path = [word]
        while heads[path[-1]] >= 0 and len(path) <= len(heads):
            path.append(heads[path[-1]])
        if len(path) > len(heads):
            return False
    return sum(head < 0 for head in heads) == 1


def brute_force_tree(scores: np.ndarray) -> list[int]:
    num_words = len(scores)
    trees = [heads for heads in product(range(-1, num_words), repeat=num_words) if is_tree(heads)]
    return [*max(trees, key=lambda heads: sum(scores[word, 1 + head] for word, head in enumerate(heads)))]


@pytest.mark.parametrize("num_words", [1, 2, 3, 4, 5])
def test_tree_equals_brute_force(num_words: int) -> None:
    rng = np.random.default_rng(num_words)
    for _ in range(40 if num_words < 5 else 5):
        scores = rng.normal(size=(num_words, 1 + num_words))
        assert best_tree(scores) == brute_force_tree(scores)


def test_nested_cycles_are_broken() -> None:
    """The best heads of all words are cycles, and all edges from the root are poor."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.normal(size=(4, 5))
        scores[:, 0] -= 100
        for word, head in ((0, 1), (1, 0), (2, 3), (3, 2)):
            scores[word, 1 + head] += 10
        scores[0, 3] += 5
        assert best_tree(scores) == brute_force_tree(scores)


def test_root_has_one_word_in_long_sentences() -> None:
    """Although the root is the best head of all words; a word as its head is ignored."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(60, 61))
    scores[:, 0] += 1000
    scores[np.arange(60), 1 + np.arange(60)] = np.finfo(np.float32).min
    assert is_tree(tuple(best_tree(scores)))
