"""Packing of short sequences into one, separated by `sequence_ids` (Krell et al. 2021)."""

from collections.abc import Iterable, Iterator

import numpy as np

MAX_OPEN_BINS = 64  # unfilled bins in memory; beyond that number the fullest one is closed


def pack_sequences(
    sequences: Iterable[dict[str, np.ndarray | int]], max_length: int
) -> Iterator[dict[str, np.ndarray | int]]:
    """Join sequences into bins of at most `max_length` tokens: each goes into the fullest open bin that has room.

    Adds `sequence_ids`, 1, 2, 3, ... for the sequences of a bin; attention stays within a sequence, whose positions
    start at zero. Deterministic, in one pass, with at most `MAX_OPEN_BINS` bins in memory.

    Args:
        sequences: Token-wise columns of equal length, including `input_ids`.
        max_length: Size of a bin, and maximum length of a sequence.
    """
    bins: list[list[dict]] = []
    sizes: list[int] = []
    for sequence in sequences:
        length = len(sequence["input_ids"])  # type: ignore[arg-type]
        fitting = [index for index, size in enumerate(sizes) if size + length <= max_length]
        if fitting:
            target = max(fitting, key=sizes.__getitem__)
        else:
            bins.append([])
            sizes.append(0)
            target = len(bins) - 1
        bins[target].append(sequence)
        sizes[target] += length
        if sizes[target] == max_length or len(bins) > MAX_OPEN_BINS:
            fullest = max(range(len(sizes)), key=sizes.__getitem__)
            sizes.pop(fullest)
            yield _join(bins.pop(fullest))
    for remaining in bins:
        yield _join(remaining)


def _join(sequences: list[dict]) -> dict[str, np.ndarray | int]:
    packed: dict[str, np.ndarray | int] = {
        name: np.concatenate([sequence[name] for sequence in sequences]) for name in sequences[0]
    }
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    packed["sequence_ids"] = np.repeat(np.arange(1, len(sequences) + 1, dtype=np.int32), lengths)
    return packed
