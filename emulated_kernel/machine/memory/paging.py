"""Page tables in guest RAM, so that the guest has kernel addresses, NX data and real page faults."""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable

from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.util.abi import PAGE_SIZE, Prot

LARGE_PAGE_SIZE = 2 << 20
_ENTRY = struct.Struct("<Q")


class PageTables(ABC):
    """Radix page tables with 512 eight-byte entries and two page sizes, 4 KiB and 2 MiB.

    Subclasses define the levels and the bits of entries. The caller must flush the TLB after a change of an
    existing entry.
    """

    shifts: tuple[int, ...]
    """Number of the lowest address bit of each level's index, from the root down."""
    kernel_entries: int = 256
    """Index, in the root table, of the first entry for kernel addresses."""
    page_step: int = PAGE_SIZE
    """Difference between the values of the entries for adjacent 4 KiB pages."""

    def __init__(self, ram: mmap.mmap, pool: UnitPool, root: int | None = None) -> None:
        """Use the tables in `ram` with the root at physical address `root`; None creates an empty root table.

        `pool` allocates the pages for new tables.
        """
        self._ram = ram
        self._pool = pool
        self.root = self._new_table() if root is None else root

    @abstractmethod
    def leaf(self, pa: int, prot: Prot, large: bool) -> int:
        """Return the entry that maps the page at physical address `pa` with the rights `prot`.

        The page has 2 MiB if `large` is True, else 4 KiB.
        """

    @abstractmethod
    def branch(self, pa: int, shift: int) -> int:
        """Return the entry that points to the next table, at physical address `pa`.

        `shift`, one of `shifts`, is the level of the table that contains the entry.
        """

    @abstractmethod
    def target(self, entry: int) -> int:
        """Return the physical address to which an entry points."""

    @abstractmethod
    def is_leaf(self, entry: int, shift: int) -> bool:
        """Return True if `entry`, in a table of the level `shift`, maps a page."""

    def map(self, va: int, pa: int, size: int, prot: Prot) -> None:
        """Map [va, va + size) to [pa, pa + size) with the rights `prot`, by the largest possible pages."""
        end = va + size
        while va < end:
            step = 0 if (va | pa) % LARGE_PAGE_SIZE else self._map_large(va, pa, end - va, prot)
            if not step:
                step = min(end - va, LARGE_PAGE_SIZE - va % LARGE_PAGE_SIZE)
                self._map_small(va, pa, step, prot)
            va += step
            pa += step

    def unmap(self, va: int, size: int) -> None:
        """Unmap [va, va + size), splitting large pages at its borders."""
        end = va + size
        while va < end:
            step = min(end - va, LARGE_PAGE_SIZE - va % LARGE_PAGE_SIZE)
            first = self._slot(va, PAGE_SIZE)
            length = step // PAGE_SIZE * _ENTRY.size
            self._ram[first : first + length] = bytes(length)
            va += step

    def make_tables(self, va: int, is_own: Callable[[int], bool]) -> None:
        """Create tables for the page at `va`, so that mapping this page later changes only the host's tables.

        `is_own`: function that returns True if a physical address is in pages of the host, not of the guest.
        """
        slot = self._slot(va, LARGE_PAGE_SIZE)
        if not is_own(slot) and not self._get(slot):
            self._slot(va, PAGE_SIZE)

    def _map_large(self, va: int, pa: int, size: int, prot: Prot) -> int:
        """Map the beginning of [va, va + size) by large pages, and return the number of bytes mapped.

        Stop at the end of the table of `va`, and before an entry that points to a table of small pages.
        """
        count = min(size // LARGE_PAGE_SIZE, 512 - va // LARGE_PAGE_SIZE % 512)
        if not count:
            return 0
        first = self._slot(va, LARGE_PAGE_SIZE)
        there = struct.unpack_from(f"<{count}Q", self._ram, first)
        count = next((n for n, entry in enumerate(there) if entry and not self.is_leaf(entry, 21)), count)
        entry = self.leaf(pa, prot, True)
        step = 512 * self.page_step
        struct.pack_into(f"<{count}Q", self._ram, first, *range(entry, entry + count * step, step))
        return count * LARGE_PAGE_SIZE

    def _map_small(self, va: int, pa: int, size: int, prot: Prot) -> None:
        first = self._slot(va, PAGE_SIZE)
        entry = self.leaf(pa, prot, False)
        count = size // PAGE_SIZE
        step = self.page_step
        entries = range(entry, entry + count * step, step)
        struct.pack_into(f"<{count}Q", self._ram, first, *entries)

    def _slot(self, va: int, page_size: int) -> int:
        """Return the physical address of the entry for the page of `page_size` bytes at `va`.

        Create missing tables, and replace the entry of a larger page by a table.
        """
        table = self.root
        for shift in self.shifts:
            slot = table + (va >> shift & 511) * 8
            if 1 << shift == page_size:
                return slot
            entry = self._get(slot)
            if not entry:
                entry = self._grow(slot, shift)
            elif self.is_leaf(entry, shift):
                entry = self._split(slot, shift, entry)
            table = self.target(entry)
        raise AssertionError(f"no level for pages of {page_size} bytes")

    def _grow(self, slot: int, shift: int) -> int:
        entry = self.branch(self._new_table(), shift)
        self._put(slot, entry)
        return entry

    def _split(self, slot: int, shift: int, entry: int) -> int:
        """Replace the entry of a 2 MiB page by a table of 4 KiB pages with the same rights.

        `slot`: physical address of the entry. `shift`: level of its table. Return the new entry, which
        points to the table of 4 KiB pages.
        """
        table = self._new_table()
        small = self.shrink(entry)
        step = self.page_step
        struct.pack_into("<512Q", self._ram, table, *range(small, small + 512 * step, step))
        branch = self.branch(table, shift)
        self._put(slot, branch)
        return branch

    @abstractmethod
    def shrink(self, entry: int) -> int:
        """Return the entry that maps the first 4 KiB of the 2 MiB page that `entry` maps."""

    def _new_table(self) -> int:
        table = self._pool.alloc(PAGE_SIZE)
        self._ram[table : table + PAGE_SIZE] = bytes(PAGE_SIZE)
        return table

    def _get(self, slot: int) -> int:
        return int(_ENTRY.unpack_from(self._ram, slot)[0])

    def _put(self, slot: int, entry: int) -> None:
        _ENTRY.pack_into(self._ram, slot, entry)


class X86PageTables(PageTables):
    """4-level paging with NX. Bits A and D are set in advance, so that the CPU never writes entries."""

    shifts: tuple[int, ...] = (39, 30, 21, 12)
    _PRESENT = 1
    _WRITE = 2
    _USER = 4
    _ACCESSED_DIRTY = 0x60
    _LARGE = 0x80
    _NX = 1 << 63
    _TARGET = 0x000FFFFFFFFFF000

    def leaf(self, pa: int, prot: Prot, large: bool) -> int:
        bits = self._PRESENT | self._ACCESSED_DIRTY
        bits |= self._WRITE if prot & Prot.WRITE else 0
        bits |= self._USER if prot & Prot.USER else 0
        bits |= 0 if prot & Prot.EXEC else self._NX
        bits |= self._LARGE if large else 0
        return pa | bits

    def branch(self, pa: int, shift: int) -> int:  # noqa: ARG002 - PAE's root needs the level
        """Return the entry that points to the next table.

        The entry permits all accesses, because only the entries of pages restrict rights.
        """
        return pa | self._PRESENT | self._WRITE | self._USER | 0x20

    def target(self, entry: int) -> int:
        return entry & self._TARGET

    def is_leaf(self, entry: int, shift: int) -> bool:
        return shift == 12 or (shift < 39 and bool(entry & self._LARGE))

    def shrink(self, entry: int) -> int:
        return entry & ~self._LARGE


class PaePageTables(X86PageTables):
    """3-level paging of i386 with PAE and NX; the root has 4 entries, one per GiB."""

    shifts = (30, 21, 12)

    def branch(self, pa: int, shift: int) -> int:
        """Return the entry that points to the next table.

        In the root table, the bits for rights are 0, because PAE reserves them.
        """
        return pa | self._PRESENT if shift == self.shifts[0] else super().branch(pa, shift)


class Sv39PageTables(PageTables):
    """3-level paging of 39-bit addresses.

    The bits A (accessed) and D (dirty) are set in advance, so that the CPU never writes entries.
    """

    shifts = (30, 21, 12)
    page_step = 1 << 10
    _VALID = 1
    _READ = 2
    _WRITE = 4
    _EXEC = 8
    _USER = 16
    _ACCESSED_DIRTY = 0xC0
    _RIGHTS = _READ | _WRITE | _EXEC

    def leaf(self, pa: int, prot: Prot, large: bool) -> int:  # noqa: ARG002 - the level determines the size
        bits = self._VALID | self._ACCESSED_DIRTY
        bits |= self._READ if prot & Prot.READ else 0
        bits |= self._WRITE if prot & Prot.WRITE else 0
        bits |= self._EXEC if prot & Prot.EXEC else 0
        bits |= self._USER if prot & Prot.USER else 0
        return pa >> 2 | bits

    def branch(self, pa: int, shift: int) -> int:  # noqa: ARG002 - all levels are alike
        """Return the entry that points to the next table.

        The bits for rights are 0, because an entry with such a bit is a leaf.
        """
        return pa >> 2 | self._VALID

    def target(self, entry: int) -> int:
        return entry >> 10 << 12

    def is_leaf(self, entry: int, shift: int) -> bool:  # noqa: ARG002 - all levels are alike
        return bool(entry & self._RIGHTS)

    def shrink(self, entry: int) -> int:
        """Return the entry itself: in Sv39 an entry has the same form on each level."""
        return entry


class Arm64PageTables(PageTables):
    """4-level paging with pages of 4 KiB. Kernel addresses and user addresses have separate root tables.

    The attribute index of each entry is 0, that of normal memory in Linux. Each new entry has the bit AF
    (accessed), because the CPU would raise a fault on an access without it.
    Mirrors: arch/arm64/include/asm/pgtable-hwdef.h, arch/arm64/include/asm/memory.h:MT_NORMAL (v6.1).
    """

    shifts = (39, 30, 21, 12)
    kernel_entries = 0
    _VALID = 1
    _TABLE = 2
    """Bit that is set in an entry that points to a table, and in the entry of a 4 KiB page."""
    _USER = 1 << 6
    _READ_ONLY = 1 << 7
    _INNER_SHAREABLE = 3 << 8
    _ACCESSED = 1 << 10
    _NO_KERNEL_EXEC = 1 << 53
    _NO_USER_EXEC = 1 << 54
    _TARGET = 0x0000FFFFFFFFF000

    def leaf(self, pa: int, prot: Prot, large: bool) -> int:
        bits = self._VALID | self._ACCESSED | self._INNER_SHAREABLE | (0 if large else self._TABLE)
        bits |= 0 if prot & Prot.WRITE else self._READ_ONLY
        bits |= self._USER if prot & Prot.USER else 0
        bits |= 0 if prot & Prot.EXEC and not prot & Prot.USER else self._NO_KERNEL_EXEC
        bits |= 0 if prot & Prot.EXEC and prot & Prot.USER else self._NO_USER_EXEC
        return pa | bits

    def branch(self, pa: int, shift: int) -> int:  # noqa: ARG002 - all levels are alike
        """Return the entry that points to the next table.

        The entry permits all accesses, because only the entries of pages restrict rights.
        """
        return pa | self._VALID | self._TABLE

    def target(self, entry: int) -> int:
        return entry & self._TARGET

    def is_leaf(self, entry: int, shift: int) -> bool:
        return shift == 12 or not entry & self._TABLE

    def shrink(self, entry: int) -> int:
        return entry | self._TABLE
