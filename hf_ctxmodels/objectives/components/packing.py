"""Packing of short rows into one, separated by `sequence_ids` (Krell et al. 2021, "Efficient Sequence Packing")."""

from collections.abc import Iterable, Iterator

import numpy as np

OPEN_BINS = 64  # bins that are not full; beyond that number the fullest one is closed


def pack_rows(rows: Iterable[dict[str, np.ndarray | int]], max_length: int) -> Iterator[dict[str, np.ndarray | int]]:
    """Join rows into bins of at most `max_length` tokens: each goes into the fullest open bin that has room.

    Adds `sequence_ids`, 1, 2, 3, ... for the rows of a bin; attention stays within a sequence, whose positions start at
    zero. Deterministic, in one pass, with at most `OPEN_BINS` bins in memory.

    Args:
        rows: Token-wise columns of equal length, `input_ids` among them.
        max_length: Size of a bin, and the longest row allowed.
    """
    bins: list[list[dict]] = []
    sizes: list[int] = []
    for row in rows:
        length = len(row["input_ids"])  # type: ignore[arg-type]
        fitting = [index for index, size in enumerate(sizes) if size + length <= max_length]
        if fitting:
            target = max(fitting, key=sizes.__getitem__)
        else:
            bins.append([])
            sizes.append(0)
            target = len(bins) - 1
        bins[target].append(row)
        sizes[target] += length
        if sizes[target] == max_length or len(bins) > OPEN_BINS:
            fullest = max(range(len(sizes)), key=sizes.__getitem__)
            sizes.pop(fullest)
            yield _joined(bins.pop(fullest))
    for remaining in bins:
        yield _joined(remaining)


def _joined(rows: list[dict]) -> dict[str, np.ndarray | int]:
    bin_: dict[str, np.ndarray | int] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    lengths = [len(row["input_ids"]) for row in rows]
    bin_["sequence_ids"] = np.repeat(np.arange(1, len(rows) + 1, dtype=np.int32), lengths)
    return bin_
