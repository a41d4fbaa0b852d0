"""KernelMemory: the guest's virtual memory through its page tables, to which the host adds mappings."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from emulated_kernel.guests.linux.pc.linux_cpu import LinuxCpu
from emulated_kernel.guests.linux.pc.ram import PRESENT, LinuxMemory
from emulated_kernel.machine.memory.guest_memory import GuestMemory, MappedRange
from emulated_kernel.machine.memory.paging import LARGE_PAGE_SIZE, PageTables
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE, Prot

RECORDS_SIZE = 32 << 20
"""Size in bytes of the host-owned memory for pages of records, which is at the end of RAM."""
RISCV_CELLS = 0xFFFFFFFFA0000000
"""Virtual address of the handlers' variables (cells) on RISC-V, where all code can reach them by `lui`.

The address is after the kernel.
"""
_ENTRIES = 512
_WORD = (1 << 64) - 1
_MAX_RUN = 16 * PAGE_SIZE
"""Maximum size in bytes of contiguous pages that are given back to the host at once.

Afterwards, a comparison reads the pages from the file. At each page fault, the host's kernel maps this many
bytes around the address (fault_around_bytes).
"""


def kernel_ranges(memory: LinuxMemory, tables: PageTables) -> Iterator[MappedRange]:
    """Yield the ranges of RAM that page tables map for the kernel, in order of addresses."""
    merged: MappedRange | None = None
    for each in _leaves(memory, tables, tables.root, 0, 0):
        if merged is None:
            merged = each
        elif (merged.end, merged.pa + merged.end - merged.start, merged.prot) == (
            each.start,
            each.pa,
            each.prot,
        ):
            merged = MappedRange(merged.start, each.end, merged.pa, merged.prot)
        else:
            yield merged
            merged = each
    if merged is not None:
        yield merged


def _leaves(
    memory: LinuxMemory, tables: PageTables, table: int, va: int, level: int
) -> Iterator[MappedRange]:
    """Yield the range of each page that the page table at `table` and the tables below it map.

    `level`: number of tables above `table`. In the root table (level 0), only the kernel's entries count.
    `va`: first address that the table covers; not used for the root table.
    """
    shift = tables.shifts[level]
    limit = len(memory.ram)
    if table >= limit:
        return
    first = 0
    if level == 0:
        first = tables.kernel_entries
        va = -_ENTRIES << shift
    entries = memory.words[table >> 3 : (table >> 3) + _ENTRIES].tolist()
    for number in range(first, len(entries)):
        entry = entries[number]
        if not entry & PRESENT:
            continue
        start = va + (number << shift) & _WORD
        if tables.is_leaf(entry, shift):
            size = 1 << shift
            pa = tables.target(entry) & ~(size - 1)
            if pa + size <= limit:
                prot = Prot.READ | (Prot.WRITE if memory.is_writable(entry) else Prot(0))
                prot |= Prot.EXEC if memory.is_executable(entry) else Prot(0)
                yield MappedRange(start, start + size, pa, prot)
        else:
            yield from _leaves(memory, tables, tables.target(entry), start, level + 1)


class KernelMemory(GuestMemory):
    """Virtual memory as the guest's current task and its kernel see it.

    `host`: range of physical memory that the guest does not use, from which the host allocates its pages.
    Host-owned memory for records is after this range. `root`: physical address of the page tables of any
    task, because all tasks share the kernel's half. `on_remap`: function that is called after a mapping was
    removed; it must flush the TLB.
    """

    def __init__(
        self,
        memory: LinuxMemory,
        cpu: LinuxCpu,
        root: int,
        host: range,
        on_remap: Callable[[], None],
    ) -> None:
        super().__init__()
        self.ram = memory.ram
        self.ram_size = host.stop
        self.host_pages = UnitPool(host.start, len(host), PAGE_SIZE)
        self._tables = memory.tables(memory.ram, self.host_pages, memory.kernel_root(root))
        self._memory = memory
        self._cpu = cpu
        self._all = memoryview(memory.ram)
        self._on_remap = on_remap

    def map(self, va: int, pa: int, size: int, prot: Prot) -> None:
        if (va | pa | size) % PAGE_SIZE:
            raise MemoryFault(va, "not page-aligned")
        page = va
        while page < va + size:
            slot, size_of_hole = self._memory.last(self._cpu.root, page)
            if self._memory.words[slot] & PRESENT:
                raise MemoryFault(page, "already mapped")
            page = (page | size_of_hole - 1) + 1
        self._tables.map(va, pa, size, prot)

    def prepare(self, va: int, size: int) -> None:
        pool = self.host_pages
        for part in range(va, va + size, LARGE_PAGE_SIZE):
            self._tables.make_tables(part, lambda slot: pool.base <= slot < pool.end)

    def unmap(self, va: int, size: int) -> None:
        for page in range(va, va + size, PAGE_SIZE):
            self.translate(page)
        self._tables.unmap(va, size)
        self._on_remap()

    def _entry(self, va: int) -> tuple[int, int, int] | None:
        """Return (physical address, page table entry, page size) of `va`; None if `va` is not mapped."""
        return self._memory.walk(self._cpu.root, va)

    def mapped_ranges(self) -> Iterator[MappedRange]:
        memory = self._memory
        return kernel_ranges(
            memory, memory.tables(memory.ram, self.host_pages, memory.kernel_root(self._cpu.root))
        )

    def is_mapped(self, va: int) -> bool:
        return self._entry(va) is not None

    def translate(self, va: int) -> int:
        found = self._entry(va)
        if found is None:
            raise MemoryFault(va)
        return found[0]

    def _pages(self, va: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (virtual address, physical address, length, page table entry) for each page of a range.

        The addresses and the length describe the part of the range that is in the page. Raises: MemoryFault
        (a page is not mapped).
        """
        end = va + size
        while va < end:
            found = self._entry(va)
            if found is None:
                raise MemoryFault(va)
            pa, entry, page = found
            length = min(end - va, page - va % page, len(self.ram) - pa)
            yield va, pa, length, entry
            va += length

    def pieces(self, va: int, size: int) -> Iterator[tuple[int, int]]:
        return ((pa, length) for _, pa, length, _ in self._pages(va, size))

    def locate_text(self, va: int, size: int) -> int | None:
        if size <= PAGE_SIZE - va % PAGE_SIZE:
            # Tracers of all functions locate more than 100,000 sites, each of which is in one page.
            found = self._entry(va)
            if found is None or not self._memory.is_executable(found[1]) or found[0] + size > len(self.ram):
                return None
            return found[0]
        try:
            return self._contiguous(va, size, self._memory.is_executable)
        except MemoryFault:
            return None

    def _contiguous(self, va: int, size: int, fits: Callable[[int], bool]) -> int | None:
        """Return the physical address of a virtual range; None if its pages are not contiguous in RAM.

        Also return None if `fits` returns False for the page table entry of one of the pages.
        Raises: MemoryFault (a page is not mapped).
        """
        start = None
        expected = None
        for _, pa, length, entry in self._pages(va, size):
            start = pa if start is None else start
            if not fits(entry) or pa != (pa if expected is None else expected):
                return None
            expected = pa + length
        return start

    def read(self, va: int, size: int) -> bytes:
        if size <= PAGE_SIZE - va % PAGE_SIZE:
            pa = self.translate(va)
            return self.ram[pa : pa + size]
        return b"".join([self.ram[pa : pa + length] for pa, length in self.pieces(va, size)])

    def write(self, va: int, data: bytes) -> None:
        try:
            pages = [*self._pages(va, len(data))]
        except MemoryFault as fault:
            raise MemoryFault(fault.address, write=True) from None
        for page, _, _, entry in pages:
            if not self._memory.is_writable(entry):
                raise MemoryFault(page, "not writable", write=True)
        done = 0
        for _, pa, length, _ in pages:
            self.ram[pa : pa + length] = data[done : done + length]
            done += length

    def give_back(self, pages: Iterable[int]) -> None:
        """Give pages back to the host if their content equals that of the file from which RAM is mapped.

        `pages`: virtual addresses of the pages.

        Hazard: a page that differs from the file loses its content when it is given back. So its content is
        written again.
        """
        run = range(0)
        for pa in sorted(map(self.translate, pages)):
            if pa != run.stop or len(run) == _MAX_RUN:
                self._give_back_run(run)
                run = range(pa, pa)
            run = range(run.start, pa + PAGE_SIZE)
        self._give_back_run(run)

    def _give_back_run(self, run: range) -> None:
        if not run:
            return
        ram = self.ram
        now = ram[run.start : run.stop]
        is_same = False
        try:
            # Locked memory is not given back.
            with suppress(OSError):
                ram.madvise(mmap.MADV_DONTNEED, run.start, len(run))
            is_same = ram[run.start : run.stop] == now
        finally:
            if not is_same:
                ram[run.start : run.stop] = now
        if is_same:
            # The comparison has mapped the file's pages. Unmap them until the guest uses them.
            with suppress(OSError):
                ram.madvise(mmap.MADV_DONTNEED, run.start, len(run))
        elif len(run) > PAGE_SIZE:
            for pa in range(run.start, run.stop, PAGE_SIZE):
                self._give_back_run(range(pa, pa + PAGE_SIZE))

    def view(self, va: int, size: int) -> memoryview:
        start = self._contiguous(va, size, self._memory.is_writable)
        if start is None:
            raise MemoryFault(va, "not writable in one piece")
        return self._all[start : start + size]
