"""Weights in the order in which oneDNN reads them, kept while many products of few rows are made with the same ones.

A product of few rows, for example of one token of each text, takes as long as its weights are read, and oneDNN reads
them up to twice as fast in blocks of its own order ("prepacked"). Such a copy costs what some products gain by it, and
memory. So it is made of a weight that has been used several times, and only within `prepacked_weights`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from hf_ctxmodels.layers.cpu.onednn import prepack_weight

MAX_PREPACKED_BYTES = 1 << 30
_MOST_ROWS = 64  # with more, less than a tenth is gained
_PAYS_AFTER = 6  # products: what a copy costs, with 8 rows


@dataclass(eq=False)
class _Use:
    """Of a weight, or of a range of its rows.

    Attributes:
        weight: It is held, since its `id` is its key.
        state: Where it lay and how often it had been changed in place.
        count: Products so far.
        prepacked: The copy, once it pays.
    """

    weight: Tensor
    state: tuple[int, int]
    count: int = 0
    prepacked: Tensor | None = None


class PrepackedWeights:
    """Copies of weights, each made when as many products have been made without it as pay for it.

    Args:
        max_bytes: Of all copies together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._uses: dict[tuple[int, int | None, int | None], _Use] = {}

    def of(self, weight: Tensor, start: int | None, stop: int | None, rows: int) -> Tensor | None:
        """The copy for a product; None where there is none (yet).

        Args:
            weight: (out, in), a parameter. One that is changed is copied anew, if not by way of `.data`.
            start, stop: The range of `out` that is computed; None for all.
            rows: Of the other operand.
        """
        if rows > _MOST_ROWS or weight.is_inference():  # the latter do not tell that they were changed
            return None
        state = (weight.data_ptr(), weight._version)
        use = self._uses.get((id(weight), start, stop))
        if use is None or use.state != state:
            if use is not None and use.prepacked is not None:
                self._free += use.prepacked.nbytes
            use = self._uses[id(weight), start, stop] = _Use(weight, state)
        if use.prepacked is None:
            use.count += 1
            if use.count > _PAYS_AFTER and (used := weight[start:stop]).nbytes <= self._free:
                use.prepacked = prepack_weight(used)
                self._free -= use.prepacked.nbytes
        return use.prepacked


_active: ContextVar[PrepackedWeights | None] = ContextVar("prepacked_weights", default=None)


def active_prepacked_weights() -> PrepackedWeights | None:
    """Those of `prepacked_weights`; None outside of it."""
    return _active.get()


@contextmanager
def prepacked_weights(max_bytes: int = MAX_PREPACKED_BYTES) -> Iterator[None]:
    """Within, plain linear maps that are applied again and again to few rows without gradients copy their weights.

    The copies are freed at the end. `generate` does this by itself; around several calls it keeps the copies from one
    to the next. A weight that is changed in between is copied anew, unless it is changed by way of `.data`
    (`weight.data.add_(1)`), of which torch keeps no account: end the block before.

    Args:
        max_bytes: Of all copies together, unless in another such block, whose number holds. 0 copies nothing anywhere.
    """
    if max_bytes and active_prepacked_weights() is not None:
        yield
        return
    token = _active.set(PrepackedWeights(max_bytes) if max_bytes else None)
    try:
        yield
    finally:
        _active.reset(token)
