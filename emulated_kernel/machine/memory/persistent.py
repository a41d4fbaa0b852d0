"""Storage of a RecordMemory in a file: the layout of the file, and mapping of its pages into guest RAM."""

from __future__ import annotations

import ctypes
import mmap
import os

from emulated_kernel.util.fast_dataclass import dataclass

_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2


@dataclass(frozen=True)
class PersistentLayout:
    """Layout of the file that holds a RecordMemory; all offsets and sizes are in bytes.

    The layout is equal for all machines with the same image and number of CPUs.
    """

    cells_at: tuple[int, ...]
    """File offset of each CPU's cells, the per-CPU variables of compiled handlers."""
    cells_base: int
    """Offset of the first cell in a per-CPU area."""
    cells_size: int
    pages_at: int
    pages_base: int
    """Virtual address of the first page of the window for record pages."""
    pages_size: int

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.pages_at + self.pages_size

    def cells(self, cpu: int, offset: int, size: int) -> int:
        """Return the file offset of the cells [offset, offset + size) in the per-CPU area of `cpu`.

        Raises: ValueError (not all of this range is cells).
        """
        at = offset - self.cells_base
        if not 0 <= at <= self.cells_size - size:
            raise ValueError(f"no cells at {offset:#x}")
        return self.cells_at[cpu] + at

    def pages(self, address: int, size: int) -> int:
        """Return the file offset of the pages at the virtual addresses [address, address + size).

        Raises: ValueError (not all of this range is in the window for record pages).
        """
        at = address - self.pages_base
        if not 0 <= at <= self.pages_size - size:
            raise ValueError(f"no pages at {address:#x}")
        return self.pages_at + at


def put_into(descriptor: int, offset: int, data: bytes) -> None:
    """Write `data` at `offset` of the file `descriptor`, after allocating disk space for the data.

    Raises: OSError (no disk space is left, or a write failed).
    """
    os.posix_fallocate(descriptor, offset, len(data))
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def map_over(ram: mmap.mmap, start: int, size: int, descriptor: int, offset: int) -> None:
    """Replace [start, start + size) of `ram` by a mapping of a file.

    `descriptor`: descriptor of the open file. `offset`: offset in the file at which the mapping begins. All
    numbers are multiples of the page size. Hazard: a store to a page without disk space kills the process.
    Raises: OSError (the file can't be mapped; nothing was changed).
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(ram)) + start
    # Hazard: mmap() with MAP_FIXED removes the old mapping before it calls the file system, which can refuse.
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    new = _call("mmap", None, size, prot, mmap.MAP_SHARED, descriptor, ctypes.c_long(offset))
    try:
        _call("mremap", new, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(address))
    except OSError:
        _call("munmap", new, size)
        raise


def _call(name: str, address: int | None, size: int, *further: object) -> int:
    """Call the C library's function `name` with `address`, `size` and `further` arguments; return its result.

    Raises: OSError (the function returned -1).
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t
    found: int = function(ctypes.c_void_p(address), ctypes.c_size_t(size), *further)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
