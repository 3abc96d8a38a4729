"""Dependency trees from the scores of edges: the maximum spanning arborescence (Chu & Liu 1965; Edmonds 1967)."""

import numpy as np

from hf_ctxmodels.core.constants import ROOT_HEAD


def best_tree(scores: np.ndarray) -> list[int]:
    """The tree with the highest sum of scores, in which exactly one word depends on the root.

    A constant that exceeds the difference of any two trees is subtracted from the scores of the root, so that a tree
    with more than one such word is never the best (Stanojevic & Cohen 2021, "A Root of Algorithmic Complexity in
    Dependency Parsing").

    Args:
        scores: (words, 1 + words) finite scores of the root, and of each word as the head of each word; the score of a
            word as its head is not read.

    Returns:
        The index of the head of each word, -1 for the root.

    >>> best_tree(np.array([[1.0, 0.0, 5.0], [2.0, 4.0, 0.0]]))
    [1, -1]
    """
    num_words = len(scores)
    graph = np.full((num_words + 1, num_words + 1), -np.inf)  # the last node is the root; rows are dependents
    graph[:num_words, :num_words] = scores[:, 1:]
    np.fill_diagonal(graph, -np.inf)
    finite_scores = np.append(scores[:, 0], graph[np.isfinite(graph)])
    graph[:num_words, -1] = scores[:, 0] - (1 + num_words * np.ptp(finite_scores))
    return [ROOT_HEAD if head == num_words else int(head) for head in _arborescence(graph)[:num_words]]


def _arborescence(graph: np.ndarray) -> np.ndarray:
    """The best head of each node of a graph, (dependents, heads) scores, whose last node is the root.

    If the best heads contain a cycle, it is contracted to one node: an edge into the cycle replaces the edge of the
    cycle with the same dependent.
    """
    heads = graph.argmax(1)
    root = heads[-1] = len(graph) - 1
    cycle = _find_cycle(heads)
    if not len(cycle):
        return heads
    others = np.setdiff1d(np.arange(len(graph)), cycle)  # sorted: the last is the root
    leaving, entering = graph[np.ix_(others, cycle)], graph[np.ix_(cycle, others)]
    entering = entering - graph[cycle, heads[cycle]][:, None]
    contracted = np.full((len(others) + 1, len(others) + 1), -np.inf)  # the first node is the cycle
    contracted[1:, 1:] = graph[np.ix_(others, others)]
    contracted[1:, 0], contracted[0, 1:] = leaving.max(1), entering.max(0)
    contracted_heads = _arborescence(contracted)
    cycle_head = contracted_heads[0] - 1  # index in `others`
    broken = entering[:, cycle_head].argmax()
    heads[cycle[broken]] = others[cycle_head]
    for index, head in enumerate(contracted_heads[1:]):
        heads[others[index]] = others[head - 1] if head else cycle[leaving[index].argmax()]
    heads[-1] = root
    return heads


def _find_cycle(heads: np.ndarray) -> np.ndarray:
    """The nodes of a cycle of at least two nodes; empty if there is none."""
    visits = np.full(len(heads), -1)
    visits[-1] = len(heads)
    for start in range(len(heads)):
        node = start
        while visits[node] < 0:
            visits[node] = start
            node = heads[node]
        if visits[node] == start and node != len(heads) - 1:
            cycle = [node]
            while heads[cycle[-1]] != node:
                cycle.append(heads[cycle[-1]])
            return np.array(cycle)
    return np.array([], dtype=int)
