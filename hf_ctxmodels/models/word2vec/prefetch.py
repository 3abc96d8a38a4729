"""Prefetching of embedding rows, for code compiled by numba (extra `words`)."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_CACHE_LINE = 16  # float32 numbers
_FOR_WRITING, _KEEP_IN_CACHE, _DATA = 1, 3, 1  # arguments of LLVM's instruction


@intrinsic
def _prefetch(context: Any, table: Any, row: Any, column: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        pointer = cgutils.get_item_pointer(target, builder, signature.args[0], array, arguments[1:], wraparound=False)
        address, number = builder.bitcast(pointer, ir.IntType(8).as_pointer()), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [address, *(number(value) for value in (_FOR_WRITING, _KEEP_IN_CACHE, _DATA))])
        return target.get_dummy_value()

    return types.void(table, row, column), generate


@njit(nogil=True, cache=True, inline="always")
def prefetch_row(table: np.ndarray, row: int) -> None:
    """Prefetch a row of a (rows, width) float32 table for reading and writing."""
    for column in range(0, table.shape[1], _CACHE_LINE):
        _prefetch(table, row, column)
