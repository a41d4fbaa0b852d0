"""Memory as it was at a moment: what was written since is told by the host's page tables, and taken back."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable

PAGE = 4096
_ENTRY = 8
_WRITTEN = re.compile(rb"[\x40-\x5f\x80-\x9f\xc0-\xdf]")
"""Highest byte of a page's entry that is present (0x80) or swapped (0x40), and no page of the file (0x20).

Source: Documentation/admin-guide/mm/pagemap.rst.
"""


class Rewind:
    """For a private mapping of a file. Raises: OSError where the host shows no /proc/self/pagemap."""

    def __init__(
        self,
        ram: mmap.mmap,
        is_compared: Callable[[int], bool],
        is_left: Callable[[int], bool] = lambda _page: False,
    ) -> None:
        """Of a page's offset: whether `changed` tells of it, and whether it is left as it is."""
        self._ram = ram
        self._is_compared = is_compared
        self._is_left = is_left
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(ram)) // PAGE * _ENTRY
        self._kept: dict[int, bytes] = {}

    def keep(self) -> None:
        """This is the moment."""
        self._kept = {page: self._ram[page : page + PAGE] for page in self.written()}

    def keep_rest(self) -> None:
        """What isn't compared is kept as it is now, all else as it was."""
        compared = {page: kept for page, kept in self._kept.items() if self._is_compared(page)}
        rest = [page for page in self.written() if not self._is_compared(page)]
        self._kept = compared | {page: self._ram[page : page + PAGE] for page in rest}
        self.back()

    def written(self) -> list[int]:
        """Offsets of pages that aren't the file's any more."""
        entries = os.pread(self._pagemap, len(self._ram) // PAGE * _ENTRY, self._at)
        pages = (found.start() * PAGE for found in _WRITTEN.finditer(entries[_ENTRY - 1 :: _ENTRY]))
        return [page for page in pages if not self._is_left(page)]

    def _changed(self) -> list[int]:
        ram, kept = self._ram, self._kept
        return [
            page for page in sorted({*self.written(), *kept}) if kept.get(page) != ram[page : page + PAGE]
        ]

    def changed(self) -> dict[int, bytes]:
        """The pages that were written to, but for those that hold what they held."""
        compared = filter(self._is_compared, self._changed())
        return {page: self._ram[page : page + PAGE] for page in compared}

    def others(self) -> list[int]:
        """Pages that were changed and aren't compared."""
        return [page for page in self._changed() if not self._is_compared(page)]

    def back(self) -> bool:
        """Take it all back; whether some of it isn't compared."""
        others = False
        for page in self._changed():
            others |= not self._is_compared(page)
            before = self._kept.get(page)
            if before is None:
                self._ram.madvise(mmap.MADV_DONTNEED, page, PAGE)
            else:
                self._ram[page : page + PAGE] = before
        return others
