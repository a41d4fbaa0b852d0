"""xz_blocks(): the offsets at which unpacking of an xz stream can begin, from the index at its end."""

from __future__ import annotations

from typing import BinaryIO
from zlib import crc32

XZ_HEADER = 12
"""Size in bytes of an xz stream's header, and of its footer."""
_MAGIC = b"\xfd7zXZ\0"
_END = b"YZ"
_INDEX_LIMIT = 1 << 16
"""Maximum size of an index in bytes; a package of a gigabyte has an index of about a hundred bytes."""
_MAX_BITS = 56
"""Maximum number of bits of an integer in the bytes before its last byte; see _number()."""


def xz_blocks(file: BinaryIO, start: int, end: int) -> tuple[list[tuple[int, int]], int] | None:
    """Return the blocks of the xz stream between two offsets of a file, and the file offset of its index.

    Each block is a pair: its offset in the stream, which is 0 for the first block, and its offset in the
    unpacked data. If the range isn't a single stream with a valid index, return None. Unpacking from the
    beginning then reports the error.
    """
    file.seek(start)
    header = file.read(XZ_HEADER)
    file.seek(max(start, end - XZ_HEADER))
    footer = file.read(XZ_HEADER)
    if not header.startswith(_MAGIC) or footer[10:] != _END:
        return None
    size = (int.from_bytes(footer[4:8], "little") + 1) * 4
    place = end - XZ_HEADER - size
    if size > _INDEX_LIMIT or place < start + XZ_HEADER:
        return None
    file.seek(place)
    index = file.read(size)
    if crc32(index[:-4]) != int.from_bytes(index[-4:], "little"):
        return None
    try:
        blocks, packed = _blocks(index)
    except IndexError:
        return None
    return (blocks, place) if blocks and start + packed == place else None


def _blocks(index: bytes) -> tuple[list[tuple[int, int]], int]:
    """Decode the index of an xz stream; return its blocks, and the offset of the index in the stream.

    The blocks are pairs of offsets, as in the result of xz_blocks().
    Raises: IndexError (a truncated index).
    """
    count, at = _number(index, 1)
    blocks = list[tuple[int, int]]()
    packed = XZ_HEADER
    unpacked = 0
    for _ in range(count):
        blocks.append((packed if blocks else 0, unpacked))
        size, at = _number(index, at)
        packed += -(-size // 4) * 4
        size, at = _number(index, at)
        unpacked += size
    return blocks, packed


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Decode the variable-length integer at offset `at` of `data`; return it and the offset after it.

    Each byte has 7 bits of the integer, the lowest first. The highest bit is 0 only in the last byte.
    """
    value = 0
    shift = 0
    while data[at] & 0x80 and shift < _MAX_BITS:
        value |= (data[at] & 0x7F) << shift
        shift = shift + 7
        at = at + 1
    return value | data[at] << shift, at + 1
