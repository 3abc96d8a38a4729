"""Subsampling, windows, noise distribution and Huffman tree of word2vec (Mikolov et al. 2013b, sections 2.1 to 2.3);
`window_kernels` has `subsample`, `place_words` and `sample_negatives` compiled, with equal results."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.seeding import uniforms


def word_counts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """(vocabulary,) frequency of each word in the tokenizer's training text, 0 for special tokens; raises CtxError if
    the tokenizer has no counts."""
    counts = getattr(tokenizer, "counts", None)
    if counts is None:
        raise CtxError(
            f"{type(tokenizer).__name__} has no word counts, which this objective requires.",
            hint="train it with `hf-ctxmodels data tokenizer`, or pass counts= to the tokenizer.",
        )
    padded = np.zeros(len(tokenizer), dtype=np.float64)  # added tokens have no counts
    padded[: len(counts)] = counts
    if padded.max() <= 0:
        raise CtxError("The tokenizer's counts are all 0.", hint="train it on text.")
    return padded


def subsampling_probabilities(counts: np.ndarray, threshold: float) -> np.ndarray:
    """(vocabulary,) probability that subsampling keeps an occurrence of a word.

    With f the word's relative frequency and the threshold t, sqrt(t / f) + t / f as in the released code; section 2.3
    has sqrt(t / f). The threshold 0 keeps all words.
    """
    shares = np.maximum(counts, 1) / counts.sum()
    return np.minimum(np.sqrt(threshold / shares) + threshold / shares, 1.0) if threshold else np.ones(len(counts))


class NoiseDistribution:
    """Words in proportion to a power of their counts, for the alias method (Walker 1977; Vose 1991).

    A word with count 0 is never sampled. The power is 0.75 in the paper.

    Attributes:
        probabilities: (vocabulary,).
        table: (vocabulary, 2) for each slot the probability of the word with the same index, and the alias otherwise.
    """

    def __init__(self, counts: np.ndarray, power: float) -> None:
        weights = np.where(counts > 0, np.maximum(counts, 1) ** power, 0.0)
        self.probabilities = weights / weights.sum()
        scaled = (self.probabilities * len(counts)).tolist()
        self.table = np.stack([np.ones(len(counts)), np.arange(len(counts))], 1)
        small = [word for word, value in enumerate(scaled) if value < 1]
        large = [word for word, value in enumerate(scaled) if value >= 1]
        while small and large:
            low, high = small.pop(), large[-1]
            self.table[low] = scaled[low], high
            scaled[high] -= 1 - scaled[low]
            if scaled[high] < 1:
                small.append(large.pop())
        for word in small:  # 1 up to rounding, except words that must never be sampled
            if not weights[word]:
                self.table[word] = 0, int(weights.argmax())


def sample_noise(uniform: np.ndarray, table: np.ndarray) -> np.ndarray:
    """(n,) ids for (n,) uniform numbers, which are overwritten: scaled by the length of the table of a
    `NoiseDistribution`, the integer part is the slot, and the fraction selects."""
    uniform *= len(table)
    slots = uniform.astype(np.int64)
    uniform -= slots
    share, alias = table[slots].T
    return np.where(uniform < share, slots, alias.astype(np.int64))


class HuffmanTree:
    """A Huffman tree: short paths to frequent words.

    Attributes:
        paths: (vocabulary, depth) inner nodes from the root to each word, -1 after the end; -1 everywhere for words
            with count 0.
        codes: (vocabulary, depth) branch of the path at each node, 0 or 1.
    """

    def __init__(self, counts: np.ndarray) -> None:
        words = np.flatnonzero(counts > 0)
        words = words[np.argsort(counts[words], kind="stable")]  # ascending
        leaves = len(words)
        if leaves < 2:
            raise CtxError(f"A Huffman tree needs two words, got {leaves}.", hint="use a larger vocabulary.")
        parents, branches = self._merge(counts[words].astype(np.float64).tolist())
        paths, codes = [], []
        for leaf in range(leaves):
            path, code, node = [], [], leaf
            while node != 2 * leaves - 2:
                code.append(branches[node])
                node = parents[node]
                path.append(node - leaves)
            paths.append(path[::-1])
            codes.append(code[::-1])
        depth = max(map(len, paths))
        self.paths = np.full((len(counts), depth), -1, dtype=np.int64)
        self.codes = np.zeros((len(counts), depth), dtype=np.int64)
        for word, path, code in zip(words, paths, codes, strict=True):
            self.paths[word, : len(path)], self.codes[word, : len(code)] = path, code

    @staticmethod
    def _merge(weights: list[float]) -> tuple[list[int], list[int]]:
        """The parent of each node (leaves first), and the node's branch, 0 or 1."""
        leaves = len(weights)
        parents, branches = [0] * (2 * leaves - 1), [0] * (2 * leaves - 1)
        leaf, inner = 0, leaves
        for new in range(leaves, 2 * leaves - 1):
            pair = []
            for _ in range(2):
                if leaf < leaves and (inner >= new or weights[leaf] <= weights[inner]):
                    pair.append(leaf)
                    leaf += 1
                else:
                    pair.append(inner)
                    inner += 1
            weights.append(weights[pair[0]] + weights[pair[1]])
            for branch, child in enumerate(pair):
                parents[child], branches[child] = new, branch
        return parents, branches

    def scores(self, counts: np.ndarray) -> np.ndarray:
        """(vocabulary,) log odds of branch 0 at every inner node, for words with these counts."""
        branch_counts = np.zeros((2, len(counts)))
        weights = np.broadcast_to(counts[:, None], self.paths.shape)
        for branch in (0, 1):
            selected = (self.paths >= 0) & (self.codes == branch)
            np.add.at(branch_counts[branch], self.paths[selected], weights[selected])
        return np.log(branch_counts[0] + 1) - np.log(branch_counts[1] + 1)


def _positions(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) the row of each value of rows of these lengths, and its position in the row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - (lengths.cumsum() - lengths)[row]


def subsample(
    ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, shares: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Subsample each row: the remaining words and their number per row, at least the rarest word of each.

    Args:
        ids: (n,) words.
        lengths, keys: (rows,) none 0; see `seeding.row_hashes`.
        shares, counts: (vocabulary,) probability of keeping each word, and its frequency.
    """
    rows, positions = _positions(lengths)
    is_kept = uniforms(keys[rows], positions) < shares[ids]
    for row in np.flatnonzero(np.bincount(rows[is_kept], minlength=len(lengths)) == 0):
        in_row = np.flatnonzero(rows == row)
        is_kept[in_row[counts[ids[in_row]].argmin()]] = True
    return ids[is_kept], np.bincount(rows[is_kept], minlength=len(lengths))


def place_words(
    ids: np.ndarray, lengths: np.ndarray, first: np.ndarray, keys: np.ndarray, window: int, size: int, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(size,) each: words, their mask, labels, and random windows from 1 to `window`.

    Args:
        ids, lengths: The results of `subsample`.
        first, keys: (rows,) start of each row, and its key.
        padding: Id at padding positions.
    """
    rows, positions = _positions(lengths)
    columns = first[rows] + positions
    words, mask = np.full(size, padding, dtype=np.int64), np.zeros(size, dtype=np.int64)
    labels, windows = np.full(size, IGNORE_INDEX, dtype=np.int64), np.ones(size, dtype=np.int64)
    words[columns], mask[columns], labels[columns] = ids, 1, ids
    windows[columns] += (uniforms(keys[rows], positions) * window).astype(np.int64)
    return words, mask, labels, windows


def sample_negatives(
    blocks: np.ndarray, first: np.ndarray, keys: np.ndarray, table: np.ndarray, per_block: int, size: int
) -> np.ndarray:
    """(size, per_block) words of the noise distribution, 0 at padding.

    Args:
        blocks, first, keys: (rows,) number of blocks of a row, its first block, and its key.
        table: See `NoiseDistribution`.
    """
    rows, positions = _positions(blocks)
    numbers = positions[:, None] * per_block + np.arange(per_block)
    words = sample_noise(uniforms(np.repeat(keys[rows], per_block), numbers.ravel()), table)
    result = np.zeros((size, per_block), dtype=np.int64)
    result[first[rows] + positions] = words.reshape(-1, per_block)
    return result
