"""Trees of token sequences with common prefixes: a language model computes each shared prefix once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

# A shared prefix gets a node if that saves this fraction of the tokens of its sequences. A node costs a forward pass
# and a copy of its keys and values for every child, so that short common beginnings stay with their sequences.
MIN_SAVED_FRACTION = 0.2


@dataclass(frozen=True)
class TokenRow:
    """Input of a causal language model for one request.

    Attributes:
        ids: (length,) tokens, int32.
        targets: (targets,) tokens to predict, from the inputs at the last columns of `ids`.
        request: Index of the request.
    """

    ids: np.ndarray
    targets: Sequence[int]
    request: int


class Target(NamedTuple):
    """A token to predict after the token in a column of a node."""

    column: int
    token_id: int
    request: int


@dataclass
class PrefixNode:
    """Tokens that follow the tokens of the parent node.

    Attributes:
        ids: (length,) tokens.
        targets: Predictions after tokens of this node.
        requests: Indices of the requests whose rows end here.
        children: Continuations of the node.
        layout: Positions and attended columns of the tokens of flattened trees; None for successive tokens.
    """

    ids: np.ndarray
    targets: list[Target] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    children: "list[PrefixNode]" = field(default_factory=list)
    layout: "TreeLayout | None" = None

    @property
    def first_target(self) -> int:
        """Column of the first prediction; the last column without targets."""
        return min((target.column for target in self.targets), default=len(self.ids) - 1)

    @cached_property
    def num_following(self) -> int:
        """Tokens of the longest path of descendants."""
        return max((len(child.ids) + child.num_following for child in self.children), default=0)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the node and of all descendants."""
        return len(self.ids) + sum(child.num_tokens for child in self.children)


class TreeLayout(NamedTuple):
    """Tokens of trees in one row.

    Attributes:
        positions: (length,) number of tokens before each token in its branch.
        visible: (length, length) bool, the columns to which each token attends.
    """

    positions: np.ndarray
    visible: np.ndarray


def flatten(trees: Sequence[PrefixNode]) -> PrefixNode:
    """A node without children, whose tokens are the tokens of trees that continue the same text.

    A token attends to the tokens of its node up to itself and to the tokens of the ancestors of its node. Tokens with
    targets are the last columns, so that logits are needed for few columns.
    """
    num_tokens = sum(tree.num_tokens for tree in trees)
    flat = PrefixNode(np.empty(num_tokens, dtype=np.int32))
    positions = np.empty(num_tokens, dtype=np.int64)
    visible = np.zeros((num_tokens, num_tokens), dtype=bool)
    stack = [(tree, 0, np.zeros(num_tokens, dtype=bool)) for tree in trees]
    start = 0
    while stack:
        node, depth, ancestors = stack.pop()
        stop = start + len(node.ids)
        flat.ids[start:stop] = node.ids
        positions[start:stop] = range(depth, depth + len(node.ids))
        visible[start:stop] = ancestors
        visible[start:stop, start:stop] = np.tri(len(node.ids), dtype=bool)
        flat.targets.extend(target._replace(column=start + target.column) for target in node.targets)
        stack.extend((child, depth + len(node.ids), visible[stop - 1]) for child in node.children)
        start = stop
    has_target = np.zeros(num_tokens, dtype=bool)
    has_target[[target.column for target in flat.targets]] = True
    order = np.argsort(has_target, kind="stable")
    columns = np.argsort(order)
    flat.ids = flat.ids[order]
    flat.targets = [target._replace(column=int(columns[target.column])) for target in flat.targets]
    flat.layout = TreeLayout(positions[order], visible[order][:, order])
    return flat


def pack_trees(trees: Sequence[tuple[PrefixNode, int]], max_tokens: int) -> list[tuple[PrefixNode, int]]:
    """Flatten trees with the same second value, the row of the tokens before them, to rows of at most `max_tokens`;
    larger trees are unchanged."""
    packed = [(tree, row) for tree, row in trees if tree.num_tokens > max_tokens]
    group: list[PrefixNode] = []
    group_row, size = -1, 0
    for tree, row in sorted(trees, key=lambda item: item[1]):
        if tree.num_tokens > max_tokens:
            continue
        if group and (row != group_row or size + tree.num_tokens > max_tokens):
            packed.append((flatten(group), group_row))
            group, size = [], 0
        group.append(tree)
        group_row, size = row, size + tree.num_tokens
    return [*packed, (flatten(group), group_row)] if group else packed


def prefix_trees(rows: Iterable[TokenRow], *, shares_prefixes: bool = True) -> list[PrefixNode]:
    """The nodes without a parent of the tree of all rows. Equal rows share a node.

    Args:
        rows: Rows of at least one token.
        shares_prefixes: Whether different rows may share nodes.
    """
    equal_rows: dict[bytes, list[TokenRow]] = {}  # big-endian bytes have the order of the ids
    for row in rows:
        equal_rows.setdefault(row.ids.astype(">u4").tobytes(), []).append(row)
    groups = [equal_rows[key] for key in sorted(equal_rows)]
    if not shares_prefixes:
        return [_node(group[0].ids, 0, [group], is_end=True) for group in groups]
    roots: list[PrefixNode] = []
    stack = [(groups, 0, 0, roots)] if groups else []
    while stack:
        groups, start, depth, siblings = stack.pop()
        shortest, longest = groups[0][0].ids, groups[-1][0].ids
        shared = _common_length(shortest, longest, depth)
        saved = (shared - start) * (len(groups) - 1)
        if len(groups) == 1 or saved > MIN_SAVED_FRACTION * sum(len(group[0].ids) - start for group in groups):
            node = _node(shortest[:shared], start, groups, is_end=len(shortest) == shared)
            siblings.append(node)
            siblings, start = node.children, shared
            if len(shortest) == shared:
                groups = groups[1:]
        elif len(shortest) == shared:
            siblings.append(_node(shortest, start, groups[:1], is_end=True))
            groups = groups[1:]
        for _, branch in groupby(groups, key=lambda group: int(group[0].ids[shared])):
            stack.append((list(branch), start, shared, siblings))
    return roots


def _node(ids: np.ndarray, start: int, groups: Sequence[Sequence[TokenRow]], *, is_end: bool) -> PrefixNode:
    """The node of the columns from `start` on, with their targets in groups of equal rows; the first group ends with
    the node if `is_end`."""
    node = PrefixNode(ids[start:])
    for group in groups:
        for row in group:
            first_column = len(row.ids) - len(row.targets)
            columns = range(max(start, first_column), min(len(ids), len(row.ids)))
            node.targets.extend(
                Target(column - start, row.targets[column - first_column], row.request) for column in columns
            )
    if is_end:
        node.requests = [row.request for row in groups[0]]
    return node


def _common_length(first: np.ndarray, second: np.ndarray, start: int) -> int:
    """Length of the common prefix of two rows, which are equal before `start`."""
    length = min(len(first), len(second))
    differs = first[start:length] != second[start:length]
    return start + int(differs.argmax()) if differs.any() else length
