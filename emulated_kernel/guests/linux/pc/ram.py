"""The guest's RAM, reached by the page tables that a CPU would walk."""

from __future__ import annotations

import mmap
import struct

PAGE = 4096
FRAME = 0x000FFFFFFFFFF000
PRESENT = 1
WRITABLE = 2
_LARGE = 0x80
_SHIFTS = (39, 30, 21, 12)


class LinuxMemory:
    """All of RAM in one mapping; `root`: physical address of page tables. Raises: KeyError (not mapped)."""

    def __init__(self, ram: mmap.mmap) -> None:
        self.ram = ram
        self.words = memoryview(ram).cast("Q")

    def walk(self, root: int, va: int) -> tuple[int, int, int] | None:
        """Physical address, last entry and bytes of its page; None where nothing is mapped."""
        table = root & FRAME
        for shift in _SHIFTS:
            slot = table + (va >> shift & 511) * 8 >> 3
            entry = self.words[slot] if slot < len(self.words) else 0
            if not entry & PRESENT:
                return None
            if shift == 12 or (shift < 39 and entry & _LARGE):
                inside = (1 << shift) - 1
                return entry & FRAME & ~inside | va & inside, entry, inside + 1
            table = entry & FRAME
        return None

    def last(self, root: int, va: int) -> tuple[int, int]:
        """Number of the word that has the last entry on the way, and bytes that this maps or would map."""
        table = root & FRAME
        slot = 0
        size = 0
        for shift in _SHIFTS:
            slot = table + (va >> shift & 511) * 8 >> 3
            size = 1 << shift
            entry = self.words[slot]
            if not entry & PRESENT or (shift < _SHIFTS[0] and entry & _LARGE):
                break
            table = entry & FRAME
        return slot, size

    def translate(self, root: int, va: int) -> int:
        """The physical address."""
        found = self.walk(root, va)
        if found is None:
            raise KeyError(f"{va:#x} isn't mapped")
        return found[0]

    def read(self, root: int, va: int, size: int) -> bytes:
        """Bytes of virtual memory."""
        parts = []
        while size:
            here = min(size, PAGE - va % PAGE)
            at = self.translate(root, va)
            parts.append(self.ram[at : at + here])
            va = va + here
            size = size - here
        return b"".join(parts)

    def write(self, root: int, va: int, data: bytes) -> None:
        """Bytes of virtual memory, whatever its pages allow."""
        while data:
            here = min(len(data), PAGE - va % PAGE)
            at = self.translate(root, va)
            self.ram[at : at + here] = data[:here]
            va = va + here
            data = data[here:]

    def read_word(self, root: int, va: int) -> int:
        """Eight bytes; they needn't be aligned."""
        return int(struct.unpack("<Q", self.read(root, va, 8))[0])

    def close(self) -> None:
        """Let go of the mapping."""
        self.words.release()
