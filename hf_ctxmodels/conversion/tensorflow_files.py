"""Reading of TensorFlow's checkpoints (`PREFIX.index`, `PREFIX.data-00000-of-00001`) without TensorFlow.

The index is a table of the LevelDB format: sorted keys in blocks, each key with the number of bytes that it shares with
the one before, and an index block with the place of every block. The values are protocol buffers: the empty key has
the number of files, every other key is a variable's name with type, shape, file, offset and size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError, wrap_errors

_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER = 5  # a block's kind of compression, and a checksum
_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    19: np.dtype("<f2"),
}


@dataclass(frozen=True)
class Variable:
    """Where a variable lies.

    Attributes:
        dtype: TensorFlow's number of the type.
        shape: Its sizes.
        shard: Number of the data file.
        offset, size: Bytes in it.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int


class TensorFlowCheckpoint(Mapping[str, Tensor]):
    """Variable name -> tensor on the CPU, read when it is looked up.

    Args:
        prefix: Path without `.index`; that file's path is taken, too.

    Raises:
        CtxError: The files are missing, damaged, or compressed; or, when it is looked up, a variable is of a type
            other than float, double, half and integer.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix).removesuffix(".index")
        index = Path(f"{self.prefix}.index")
        hint = "give the path of the checkpoint without .index and .data, such as models/base/model.ckpt."
        with wrap_errors("The index of the checkpoint cannot be read", location=str(index), hint=hint):
            entries = dict(_table(index.read_bytes()))
            self._shards = _numbers(entries.pop(b"", b"")).get(1, [1])[0]
            self.variables = {name.decode(): _variable(entry) for name, entry in entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        variable = self.variables[name]
        file = Path(f"{self.prefix}.data-{variable.shard:05d}-of-{self._shards:05d}")
        if variable.dtype not in _DTYPES:
            raise CtxError(
                f"The variable {name} has TensorFlow's type {variable.dtype}, which is not supported.",
                location=str(file),
                hint="save the checkpoint in single precision.",
            )
        dtype = _DTYPES[variable.dtype]
        hint = "copy both files of the checkpoint again."
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


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a table."""
    footer = content[-_FOOTER:]
    if len(footer) < _FOOTER or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("it is no table of a TensorFlow checkpoint")
    place = 0
    for _ in range(2):  # of a block of filters, which is not used
        _, place = _varint(footer, place)
    for _, handle in _block(content, footer, place):
        yield from _block(content, handle, 0)


def _block(content: bytes, handle: bytes, place: int) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of the block whose offset and size stand at a place of `handle`."""
    offset, place = _varint(handle, place)
    size, _ = _varint(handle, place)
    block = content[offset : offset + size]
    if len(content) < offset + size + _TRAILER or content[offset + size] != 0:
        raise ValueError("a block is compressed or damaged")
    restarts = int.from_bytes(block[-4:], "little")
    end, place, key = len(block) - 4 * (restarts + 1), 0, b""
    while place < end:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        length, place = _varint(block, place)
        key = key[:shared] + block[place : place + own]
        place += own + length
        yield key, block[place - length : place]


def _variable(entry: bytes) -> Variable:
    """A variable's `BundleEntryProto`."""
    fields = _numbers(entry)
    if 7 in fields:
        raise ValueError("a variable is stored in slices")
    shape = _numbers(fields[2][0]) if 2 in fields else {}
    sizes = [_numbers(dimension).get(1, [0])[0] for dimension in shape.get(2, [])]
    dtype, shard, offset, size = (fields.get(number, [0])[0] for number in (1, 3, 4, 5))
    return Variable(dtype, tuple(sizes), shard, offset, size)


def _numbers(message: bytes) -> dict[int, list]:
    """Field number -> values of a protocol buffer: integers, or bytes of strings and messages."""
    fields: dict[int, list] = {}
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        value: int | bytes
        match tag & 7:
            case 0:
                value, place = _varint(message, place)
            case 1 | 5 as kind:
                width = 8 if kind == 1 else 4
                value, place = int.from_bytes(message[place : place + width], "little"), place + width
            case 2:
                length, place = _varint(message, place)
                value, place = message[place : place + length], place + length
            case kind:
                raise ValueError(f"a field is of the unknown kind {kind}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """An integer of seven bits a byte, and the place after it."""
    number = shift = 0
    while True:
        byte = content[place]
        number |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return number, place
        shift += 7
