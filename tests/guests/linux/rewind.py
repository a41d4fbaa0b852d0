"""Restore memory to an earlier state. The host's page tables show which pages were written."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable
from functools import cache

PAGE = 4096
_ENTRY = 8
_WRITTEN = re.compile(rb"[\x40-\x5f\x80-\x9f\xc0-\xdf]")
"""Pattern of the highest byte of the pagemap entry of a page that was written.

Such a page is present (0x80) or swapped (0x40), and is not a page of the file (0x20). Source:
Documentation/admin-guide/mm/pagemap.rst.
"""


class Rewind:
    """Restores the pages of a private mapping that were written.

    Raises: OSError (the host shows no /proc/self/pagemap).
    """

    def __init__(
        self,
        ram: mmap.mmap,
        is_compared: Callable[[int], bool],
        is_left: Callable[[int], bool] = lambda _page: False,
    ) -> None:
        """Prepare to restore the mapping `ram`.

        `is_compared`: whether changed() reports the page at an offset. `is_left`: whether back() leaves the
        page unchanged. The functions are called once for each page.
        """
        self._ram = ram
        self._is_compared = cache(is_compared)
        self._is_left = cache(is_left)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(ram)) // PAGE * _ENTRY
        self._kept: dict[int, bytes] = {}

    def keep(self) -> None:
        """Store the present contents as the state that back() restores."""
        self._kept = {page: self._ram[page : page + PAGE] for page in self.written()}

    def keep_rest(self) -> None:
        """Store the present contents of pages that are not compared. Restore all other pages."""
        compared = {page: kept for page, kept in self._kept.items() if self._is_compared(page)}
        rest = [page for page in self.written() if not self._is_compared(page)]
        self._kept = compared | {page: self._ram[page : page + PAGE] for page in rest}
        self.back()

    def written(self) -> list[int]:
        """Return the offsets of pages that were written."""
        entries = os.pread(self._pagemap, len(self._ram) // PAGE * _ENTRY, self._at)
        pages = (found.start() * PAGE for found in _WRITTEN.finditer(entries[_ENTRY - 1 :: _ENTRY]))
        return [page for page in pages if not self._is_left(page)]

    def _changed(self) -> list[int]:
        pages = sorted({*self.written(), *self._kept})
        return [page for page in pages if self._ram[page : page + PAGE] != self._before(page)]

    def _before(self, page: int) -> bytes:
        """Return the contents of `page` that back() restores: those that keep() has stored, or else those of
        the file.
        """
        before = self._kept.get(page)
        if before is None:
            now = self._ram[page : page + PAGE]
            self._ram.madvise(mmap.MADV_DONTNEED, page, PAGE)
            before = self._ram[page : page + PAGE]
            if now != before:
                self._ram[page : page + PAGE] = now
        return before

    def changed(self) -> dict[int, bytes]:
        """Return offset -> contents of each compared page whose contents differ from those that keep() has
        stored.
        """
        compared = filter(self._is_compared, self._changed())
        return {page: self._ram[page : page + PAGE] for page in compared}

    def others(self) -> list[int]:
        """Return the offsets of the changed pages that are not compared."""
        return [page for page in self._changed() if not self._is_compared(page)]

    def back(self) -> bool:
        """Restore all pages. Return True if some of the restored pages are not compared."""
        others = False
        for page in self._changed():
            others |= not self._is_compared(page)
            before = self._kept.get(page)
            if before is None:
                self._ram.madvise(mmap.MADV_DONTNEED, page, PAGE)
            else:
                self._ram[page : page + PAGE] = before
        return others
