"""Placing an image in RAM and mapping it as Linux does: text RX, rodata R, data RW, and all RAM."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.machine import layout
from emulated_kernel.machine.guest_image import GuestImage
from emulated_kernel.machine.memory import Memory
from emulated_kernel.machine.paging import Prot
from emulated_kernel.machine.traps import HardwareError

Span = tuple[int, int]


def page_up(value: int) -> int:
    """Round up to a page."""
    return -(-value // PAGE_SIZE) * PAGE_SIZE


def load(memory: Memory, image: GuestImage) -> int:
    """Copy and map all segments, then the direct map; returns the first free physical address behind them.

    Raises:
        HardwareError: the image does not fit in RAM.
    """
    limit = memory.host_pages.base
    free, protected = 0, []
    for va, data, mem_size, rights in image.segments:
        pa = va - layout.KERNEL_MAP
        size = page_up(va % PAGE_SIZE + mem_size)
        page, pa_page = va - va % PAGE_SIZE, pa - pa % PAGE_SIZE
        if pa_page < 0 or pa_page + size > limit:
            raise HardwareError(
                f"a segment of {mem_size} bytes at {va:#x} does not fit in {limit} bytes of RAM"
            )
        memory.ram[pa : pa + len(data)] = data
        prot = Prot(rights) & (Prot.READ | Prot.WRITE | Prot.EXEC)
        memory.map(page, pa_page, size, prot)
        if not prot & Prot.WRITE:
            protected.append((pa_page, pa_page + size))
        free = max(free, pa_page + size)
    _map_direct(memory, protected)
    return free


def _map_direct(memory: Memory, protected: list[Span]) -> None:
    """All RAM at DIRECT_MAP, never executable; what the image has read-only is read-only here too."""
    for start, end, writable in _spans(sorted(protected), len(memory.ram)):
        prot = Prot.READ | Prot.WRITE if writable else Prot.READ
        memory.map(layout.DIRECT_MAP + start, start, end - start, prot)


def _spans(protected: list[Span], size: int) -> Iterator[tuple[int, int, bool]]:
    done = 0
    for start, end in protected:
        if done < start:
            yield done, start, True
        yield start, end, False
        done = end
    if done < size:
        yield done, size, True
