"""Loading of an image into RAM, mapped as in Linux: text RX, rodata R, data RW, direct map of RAM."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, Prot

Placed = tuple[int, int, bool]
"""A physical range: its start, its end (exclusive), and whether it is writable."""


def page_up(value: int) -> int:
    """Return `value` (bytes) rounded up to a multiple of the page size."""
    return -(-value // PAGE_SIZE) * PAGE_SIZE


def load(memory: Memory, image: KernelImage, layout: MemoryLayout) -> int:
    """Copy the image's segments to RAM, and map them; return the first physical address after them.

    Also map all RAM at the direct map. `layout` has the addresses of the direct map and of the kernel map.
    Raises: HardwareError (the image does not fit in RAM, or the RAM does not fit in the direct map).
    """
    limit = memory.host_pages.base
    if len(memory.ram) > layout.direct_map_size:
        raise HardwareError(f"{len(memory.ram)} bytes of RAM; at most {layout.direct_map_size} can be mapped")
    free = 0
    placed = []
    for va, data, mem_size, rights in image.segments:
        pa = va - layout.kernel_map
        size = page_up(va % PAGE_SIZE + mem_size)
        page = va - va % PAGE_SIZE
        pa_page = pa - pa % PAGE_SIZE
        if pa_page < 0 or pa_page + size > limit:
            raise HardwareError(
                f"a segment of {mem_size} bytes at {va:#x} does not fit in {limit} bytes of RAM"
            )
        memory.ram[pa : pa + len(data)] = data
        prot = Prot(rights) & (Prot.READ | Prot.WRITE | Prot.EXEC)
        memory.map(page, pa_page, size, prot)
        placed.append((pa_page, pa_page + size, bool(prot & Prot.WRITE)))
        free = max(free, pa_page + size)
    _map_direct(memory, layout, placed)
    return free


def _map_direct(memory: Memory, layout: MemoryLayout, placed: list[Placed]) -> None:
    """Map all RAM in the direct map, never executable; read-only parts of the image stay read-only.

    `placed`: physical ranges of the image's segments. If the image itself is in the direct map, its
    segments are already mapped.
    """
    image_is_inside = layout.direct_map == layout.kernel_map
    special = [span for span in placed if image_is_inside or not span[2]]
    for span in _spans(sorted(special), memory.ram_size):
        if image_is_inside and span in special:
            continue
        start, end, writable = span
        prot = Prot.READ | Prot.WRITE if writable else Prot.READ
        memory.map(layout.direct_map + start, start, end - start, prot)


def _spans(placed: list[Placed], size: int) -> Iterator[Placed]:
    """Yield the ranges of `placed`, and a writable range for each gap between these ranges in [0, size)."""
    done = 0
    for start, end, writable in placed:
        if done < start:
            yield done, start, True
        yield start, end, writable
        done = end
    if done < size:
        yield done, size, True
