"""Prefetching of a table's rows, for code compiled by numba (extra `words`)."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE = 16  # float32 numbers in a cache line
_FOR_WRITING, _KEEP, _DATA = 1, 3, 1  # the arguments of LLVM's instruction


@intrinsic
def _prefetch(context: Any, table: Any, row: Any, column: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        place = cgutils.get_item_pointer(target, builder, signature.args[0], array, arguments[1:], wraparound=False)
        address, number = builder.bitcast(place, ir.IntType(8).as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, *(number(each) for each in (_FOR_WRITING, _KEEP, _DATA))])
        return target.get_dummy_value()

    return types.void(table, row, column), generate


@njit(nogil=True, cache=True, inline="always")
def fetch(table: np.ndarray, row: int) -> None:
    """Prefetch a row of a (rows, width) float32 table for reading and writing."""
    for column in range(0, table.shape[1], _LINE):
        _prefetch(table, row, column)
