"""Sparse files: search for the parts of a file with data, and copies of memory that leave zeros out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import IO

_BLOCK = 64 << 10


def data_ranges(descriptor: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each part of a file with data, not a hole, in [start, start + size).

    The file position is not changed. Raises: OSError (the file is not seekable).
    """
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        at = start
        end = start + size
        while at < end:
            try:
                at = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError:
                return
            if at >= end:
                return
            stop = min(os.lseek(descriptor, at, os.SEEK_HOLE), end)
            yield at, stop - at
            at = stop
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


def copy_data(memory: memoryview, ranges: Iterable[tuple[int, int]], file: IO[bytes], offset: int) -> None:
    """Copy the ranges (start, size) of `memory` to a new file. Zeros become holes of the file.

    The file's offset `offset` corresponds to the start of `memory`.
    Raises: OSError (a write failed).
    """
    zeros = bytes(_BLOCK)
    descriptor = file.fileno()
    os.ftruncate(descriptor, offset + len(memory))
    for start, size in ranges:
        for at in range(start, start + size, _BLOCK):
            # Comparing a memoryview takes forty times as long as copying it and comparing the copy.
            block = bytes(memory[at : min(at + _BLOCK, start + size)])
            if block != zeros[: len(block)]:
                write_all(descriptor, block, offset + at)


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset` of the file `descriptor`. Raises: OSError (a write failed)."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
