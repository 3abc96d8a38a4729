"""Reader of TensorFlow checkpoints (`PREFIX.index`, `PREFIX.data-00000-of-00001`) without TensorFlow.

The index is a table in LevelDB format: blocks of sorted keys, each with the number of bytes shared with the previous
key, and an index block with the offsets of all blocks. The values are protocol buffers: the empty key has the number of
files; each other key is the name of a variable with its type, shape, file, offset and size.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError, wrap_errors

_FOOTER_SIZE, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER_SIZE = 5  # type of compression and checksum of a block
_DTYPES = {number: np.dtype(name) for number, name in {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}.items()}


class Variable(NamedTuple):
    """TensorFlow's id of a data type, the shape, the number of the data file, and the offset and size in bytes."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int


class TensorFlowCheckpoint(Mapping[str, Tensor]):
    """Variable name -> tensor on the CPU, read when it is looked up; `prefix` is the path, with or without `.index`.
    Raises CtxError for missing, damaged or compressed files and, on access, for unsupported data types."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix).removesuffix(".index")
        index = Path(f"{self.prefix}.index")
        hint = "use the path of the checkpoint without .index and .data, such as models/base/model.ckpt."
        with wrap_errors("The index of the checkpoint cannot be read", location=str(index), hint=hint):
            entries = dict(_read_table(index.read_bytes()))
            self._shards = _parse_message(entries.pop(b"", b"")).get(1, [1])[0]
            self.variables = {name.decode(): _parse_variable(entry) for name, entry in entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        variable = self.variables[name]
        file = Path(f"{self.prefix}.data-{variable.shard:05d}-of-{self._shards:05d}")
        if variable.dtype not in _DTYPES:
            raise CtxError(
                f"The variable {name} has TensorFlow's data type {variable.dtype}, which is not supported.",
                location=str(file),
                hint="save the checkpoint in float32.",
            )
        dtype = _DTYPES[variable.dtype]
        hint = "copy the files of the checkpoint again."
        with wrap_errors(f"The variable {name} cannot be read", location=str(file), hint=hint):
            with file.open("rb") as opened:
                opened.seek(variable.offset)
                content = opened.read(variable.size)
            values = np.frombuffer(content, dtype=dtype).reshape(variable.shape)
            return torch.from_numpy(values.astype(dtype.newbyteorder("=")))

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)


def _read_table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a table."""
    footer = content[-_FOOTER_SIZE:]
    if len(footer) < _FOOTER_SIZE or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("it is not a table of a TensorFlow checkpoint")
    position = 0
    for _ in range(2):  # offset and size of the filter block, which is not used
        _, position = _read_varint(footer, position)
    for _, handle in _read_block(content, footer, position):
        yield from _read_block(content, handle, 0)


def _read_block(content: bytes, handle: bytes, position: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the block whose offset and size are at a position of `handle`."""
    offset, position = _read_varint(handle, position)
    size, _ = _read_varint(handle, position)
    block = content[offset : offset + size]
    if len(content) < offset + size + _TRAILER_SIZE or content[offset + size] != 0:
        raise ValueError("a block is compressed or damaged")
    restarts = int.from_bytes(block[-4:], "little")
    end, position, key = len(block) - 4 * (restarts + 1), 0, b""
    while position < end:
        shared_length, position = _read_varint(block, position)
        suffix_length, position = _read_varint(block, position)
        value_length, position = _read_varint(block, position)
        key = key[:shared_length] + block[position : position + suffix_length]
        position += suffix_length + value_length
        yield key, block[position - value_length : position]


def _parse_variable(entry: bytes) -> Variable:
    """Parse a `BundleEntryProto`."""
    fields = _parse_message(entry)
    if 7 in fields:
        raise ValueError("a variable is stored in slices")
    shape = _parse_message(fields[2][0]) if 2 in fields else {}
    sizes = [_parse_message(dimension).get(1, [0])[0] for dimension in shape.get(2, [])]
    dtype, shard, offset, size = (fields.get(number, [0])[0] for number in (1, 3, 4, 5))
    return Variable(dtype, tuple(sizes), shard, offset, size)


def _parse_message(message: bytes) -> dict[int, list]:
    """Parse a protocol buffer to field number -> values: integers, or bytes of strings and messages."""
    fields: dict[int, list] = {}
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value: int | bytes
        match tag & 7:
            case 0:
                value, position = _read_varint(message, position)
            case 5:
                value = int.from_bytes(message[position : position + 4], "little")
                position += 4
            case 2:
                length, position = _read_varint(message, position)
                value = message[position : position + length]
                position += length
            case wire_type:
                raise ValueError(f"a field has the unknown wire type {wire_type}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    """An integer with seven bits per byte, and the position after it."""
    number = shift = 0
    while True:
        byte = content[position]
        number |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return number, position
        shift += 7
