"""Snapshots of guest memory, to compare with and to go back to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

from emulated_kernel.abi import PAGE_SIZE, Prot
from emulated_kernel.machine import boot, loader
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.memory import Memory

_LINE = 128
_BLOCK = 64 * PAGE_SIZE
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class DataSnapshot:
    """Contents of writable guest memory at one moment, to compare with and to go back to."""

    def __init__(self, memory: Memory, spans: Iterable[tuple[int, int]]) -> None:
        """Keep [va, va + size) of each span; each must be physically contiguous."""
        ram_address = ctypes.addressof(ctypes.c_char.from_buffer(memory.ram))
        saved = [(va, ctypes.create_string_buffer(memory.read(va, size), size)) for va, size in spans]
        self._spans = [
            (va, ram_address + memory.translate(va), ctypes.addressof(data), len(data)) for va, data in saved
        ]
        self._keep = saved

    def unchanged(self) -> bool:
        """Whether memory is as it was; one memcmp a span."""
        return not any(_memcmp(where, kept, size) for _, where, kept, size in self._spans)

    def changes(self) -> dict[int, tuple[int, int]]:
        """Address of each byte that differs, to what it was and what it is."""
        return {
            va + i: (before[i], now[i])
            for va, before, now in self.changed_lines()
            for i in range(len(now))
            if before[i] != now[i]
        }

    def changed_lines(self) -> Iterator[tuple[int, bytes, bytes]]:
        """(va, what it was, what it is) of each line with bytes that differ."""
        for va, where, kept, span in self._spans:
            for page, page_size in _differing(kept, where, span, _BLOCK, PAGE_SIZE):
                for line, size in _differing(kept + page, where + page, page_size, _LINE):
                    at = page + line
                    yield va + at, ctypes.string_at(kept + at, size), ctypes.string_at(where + at, size)

    def restore(self) -> None:
        """Make memory as it was."""
        for _, where, kept, span in self._spans:
            for at, size in _differing(kept, where, span, _BLOCK, PAGE_SIZE):
                ctypes.memmove(where + at, kept + at, size)


def _differing(before: int, now: int, size: int, grain: int, *finer: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of each finest grain in which two places in the host's memory differ; most don't."""
    for at in range(0, size, grain):
        part = min(grain, size - at)
        if not _memcmp(before + at, now + at, part):
            continue
        if finer:
            yield from ((at + inner, n) for inner, n in _differing(before + at, now + at, part, *finer))
        else:
            yield at, part


def image_data(machine: Machine) -> list[tuple[int, int]]:
    """(va, size) of the image's writable pages.

    What it reserves for handlers' cells is left out: those count what the host knows of.
    """
    reserved = boot.per_cpu_address(machine.image, "reserved")
    return [
        (va, loader.page_up(size))
        for va, _, size, rights in machine.image.segments
        if rights & Prot.WRITE and va != reserved
    ]


def data_snapshot(machine: Machine, spans: Iterable[tuple[int, int]] | None = None) -> DataSnapshot:
    """Snapshot of (va, size) spans; by default `image_data` and the host-call stack."""
    if spans is None:
        top = machine._stack
        spans = [*image_data(machine), (top - 4 * PAGE_SIZE, 4 * PAGE_SIZE)]
    return DataSnapshot(machine.memory, spans)
