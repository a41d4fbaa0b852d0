"""Snapshots of guest memory, which can be compared with the memory and restored."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

from emulated_kernel.machine import boot_params, loader
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.util.abi import PAGE_SIZE, Prot

_LINE = 128
_BLOCK = 64 * PAGE_SIZE
_ZEROS = ctypes.create_string_buffer(_BLOCK)
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_mincore = ctypes.PyDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
# mincore(2) shows a swapped-out page as absent, like a page that was never written.
_TELLS_UNTOUCHED = len(Path("/proc/swaps").read_text().splitlines()) == 1

Span = tuple[int, int, int, int]
"""(virtual address, host address of the memory, host address of the kept copy, size)."""


class DataSnapshot:
    """Contents of writable guest memory at one moment, which can be compared with the memory and restored.

    RAM is anonymous memory. Most pages were never written; they are known to be zero and are not read.
    """

    def __init__(self, memory: Memory, spans: Iterable[tuple[int, int]]) -> None:
        """Keep [va, va + size) of each span (va, size); each span must be physically contiguous."""
        ram_address = ctypes.addressof(ctypes.c_char.from_buffer(memory.ram))
        self._keep: list[ctypes.Array[ctypes.c_char]] = []
        found: list[Span] = []
        for va, size in spans:
            where = ram_address + memory.translate(va)
            for at in range(0, size, _BLOCK):
                length = min(_BLOCK, size - at)
                found.append((va + at, where + at, self._kept(where + at, length), length))
        zeros = ctypes.addressof(_ZEROS)
        self._spans = [span for span in found if span[2] != zeros]
        self._runs: list[list[Span]] = []
        for run in _contiguous([span for span in found if span[2] == zeros]):
            # mincore(2) takes as long as the comparison of some pages.
            if sum(size for *_, size in run) < _BLOCK:
                self._spans += run
            else:
                self._runs.append(run)

    def _kept(self, where: int, size: int) -> int:
        """Return the host address of a copy; all zero blocks share one copy."""
        if not any(_touched(where, size)) or not _memcmp(where, _ZEROS, size):
            return ctypes.addressof(_ZEROS)
        self._keep.append(ctypes.create_string_buffer(ctypes.string_at(where, size), size))
        return ctypes.addressof(self._keep[-1])

    def unchanged(self) -> bool:
        """Return True if memory has the contents of the snapshot."""
        return not any(_memcmp(where, kept, size) for _, where, kept, size in self._candidates())

    def changes(self) -> dict[int, tuple[int, int]]:
        """Return address -> (old byte, new byte) of all bytes that differ."""
        return _changed_bytes(self.changed_lines())

    def changed_lines(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (virtual address, old bytes, new bytes) of each line of memory that differs."""
        for page in self._pages():
            yield from _changed_lines(*page)

    def restore(self) -> None:
        """Restore the kept contents."""
        for _, kept, where, size in self._pages():
            ctypes.memmove(where, kept, size)

    def undo(self) -> dict[int, tuple[int, int]]:
        """Return the changes as changes() does, and restore the kept contents, in one pass through memory."""
        pages = list(self._pages())
        # Collect all changes before the first restore, because a page may be mapped at two addresses.
        found = _changed_bytes(line for page in pages for line in _changed_lines(*page))
        for _, kept, where, size in pages:
            ctypes.memmove(where, kept, size)
        return found

    def _candidates(self) -> Iterator[Span]:
        """Yield the spans that may differ."""
        yield from self._spans
        for run in self._runs:
            start = run[0][1] & -PAGE_SIZE
            touched = _touched(start, run[-1][1] + run[-1][3] - start)
            for span in run:
                first, end = span[1] - start, span[1] - start + span[3]
                if any(touched[first // PAGE_SIZE : -(-end // PAGE_SIZE)]):
                    yield span

    def _pages(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each page that differs.

        A page is (virtual address, host address of the kept copy, host address of the memory, size).
        """
        for va, where, kept, span in self._candidates():
            if _memcmp(kept, where, span):
                for at, size in _differing(kept, where, span, PAGE_SIZE):
                    yield va + at, kept + at, where + at, size


def _contiguous(spans: list[Span]) -> Iterator[list[Span]]:
    """Yield the spans in groups that are contiguous in the host's memory."""
    run: list[Span] = []
    end = 0
    for span in spans:
        _, where, _, size = span
        if run and where != end:
            yield run
            run = []
        run.append(span)
        end = where + size
    if run:
        yield run


def _touched(where: int, size: int) -> bytes:
    """Return a byte for each page of the host's memory, 0 for pages that were never written."""
    start = where & -PAGE_SIZE
    pages = -(-(where + size - start) // PAGE_SIZE)
    vector = ctypes.create_string_buffer(pages)
    if not _TELLS_UNTOUCHED or _mincore(start, pages * PAGE_SIZE, vector):
        return b"\1" * pages
    return vector.raw


def _changed_lines(va: int, kept: int, where: int, size: int) -> Iterator[tuple[int, bytes, bytes]]:
    for at, length in _differing(kept, where, size, _LINE):
        yield va + at, ctypes.string_at(kept + at, length), ctypes.string_at(where + at, length)


def _changed_bytes(lines: Iterable[tuple[int, bytes, bytes]]) -> dict[int, tuple[int, int]]:
    return {
        va + at: (before[at], now[at])
        for va, before, now in lines
        for at in range(len(now))
        if before[at] != now[at]
    }


def _differing(before: int, now: int, size: int, grain: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of each block of `grain` bytes in which two areas of the host's memory differ."""
    for at in range(0, size, grain):
        part = min(grain, size - at)
        if _memcmp(before + at, now + at, part):
            yield at, part


def image_data(machine: Machine) -> list[tuple[int, int]]:
    """Return (virtual address, size) of the image's writable segments, in whole pages.

    The segment that the image reserves for the cells of handlers is left out, because hits change the cells.
    """
    reserved = boot_params.per_cpu_address(machine.image, "reserved")
    return [
        (va, loader.page_up(size))
        for va, _, size, rights in machine.image.segments
        if rights & Prot.WRITE and va != reserved
    ]


def data_snapshot(machine: Machine, spans: Iterable[tuple[int, int]] | None = None) -> DataSnapshot:
    """Return a snapshot of (virtual address, size) spans; by default `image_data` and the host-call stack."""
    if spans is None:
        top = machine._stack
        spans = [*image_data(machine), (top - 4 * PAGE_SIZE, 4 * PAGE_SIZE)]
    return DataSnapshot(machine.memory, spans)
