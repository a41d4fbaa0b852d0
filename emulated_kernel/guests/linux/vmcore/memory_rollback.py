"""MemoryRollback: undoes a call's writes to guest memory.

It uses /proc/self/pagemap to find the pages that the call has written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl

from emulated_kernel.guests.linux.pc.ram import PAGE

_ENTRY = 8
_WRITTEN = re.compile(rb"[\x40-\x5f\x80-\x9f\xc0-\xdf]")
"""Matches the highest byte of a pagemap entry for a page that has been written.

The page is present (0x80) or swapped (0x40), and is not a file page (0x20).
Source: Documentation/admin-guide/mm/pagemap.rst.
"""
_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("<12Q")
_REGION = struct.Struct("<3Q")
_FILE = 1 << 2
_PRESENT_OR_SWAPPED = 1 << 3 | 1 << 4
_REGIONS = 4096
"""Maximum number of regions (ranges of written pages) that one PAGEMAP_SCAN request returns.

The request exists since Linux 6.7 and skips pages that were never touched.

Source: Documentation/admin-guide/mm/pagemap.rst.
"""


class MemoryRollback:
    """Rolls back writes to the first `size` bytes of `ram`, a private mapping of a file.

    If the host does not provide /proc/self/pagemap, nothing can be rolled back; see `is_possible`.
    """

    def __init__(self, ram: mmap.mmap, size: int) -> None:
        self._ram = ram
        self._pages = size // PAGE
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(ram))
        self._found = ctypes.create_string_buffer(_REGIONS * _REGION.size)
        self._scans = True
        self._kept: dict[int, bytes] = {}
        self._file = -1
        with suppress(OSError):
            self._file = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_possible(self) -> bool:
        """Whether the host reports which pages were written."""
        return self._file >= 0

    def checkpoint(self) -> None:
        """Copy the pages that have been written so far, so that rollback() restores the current memory."""
        if self.is_possible:
            self._kept = {page: self._ram[page : page + PAGE] for page in self._written()}

    def _written(self) -> list[int]:
        """Return the offsets in RAM of the pages that have been written since the file was mapped."""
        if self._scans:
            try:
                return [*self._scanned()]
            except OSError:
                self._scans = False
        entries = os.pread(self._file, self._pages * _ENTRY, self._start // PAGE * _ENTRY)
        return [found.start() * PAGE for found in _WRITTEN.finditer(entries[_ENTRY - 1 :: _ENTRY])]

    def _scanned(self) -> Iterator[int]:
        """Yield the offsets in RAM of written pages. Raises: OSError (the host lacks PAGEMAP_SCAN)."""
        at = self._start
        end = self._start + self._pages * PAGE
        wanted = 0, _FILE, _FILE, _PRESENT_OR_SWAPPED, _FILE
        while at < end:
            asked = _SCAN.size, 0, at, end, 0, ctypes.addressof(self._found), _REGIONS
            request = bytearray(_SCAN.pack(*asked, *wanted))
            count = ioctl(self._file, _PAGEMAP_SCAN, request)
            at = _SCAN.unpack(request)[4]
            for first, stop, _ in _REGION.iter_unpack(memoryview(self._found)[: count * _REGION.size]):
                yield from range(first - self._start, stop - self._start, PAGE)

    def rollback(self) -> None:
        """Undo all writes since the last checkpoint()."""
        # Pages of the checkpoint may have become pages of the file.
        for page in {*self._written(), *self._kept}:
            kept = self._kept.get(page)
            if kept is None:
                # The page of the file shows again.
                self._ram.madvise(mmap.MADV_DONTNEED, page, PAGE)
            elif self._ram[page : page + PAGE] != kept:
                self._ram[page : page + PAGE] = kept

    def close(self) -> None:
        """Close /proc/self/pagemap."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
