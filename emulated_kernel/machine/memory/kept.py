"""Record memory in a file: where its bytes lie there, and guest pages that are the file's."""

from __future__ import annotations

import ctypes
import mmap
import os

from emulated_kernel.dataclass import dataclass

_MAP_FIXED = 0x10


@dataclass(frozen=True)
class KeptLayout:
    """Offsets in bytes; the same for all machines with one image and number of CPUs."""

    cells_at: tuple[int, ...]
    """Where the cells of each CPU begin."""
    cells_base: int
    """The first cell's offset from a CPU's base."""
    cells_size: int
    pages_at: int
    pages_base: int
    """Address of the first page."""
    pages_size: int

    @property
    def size(self) -> int:
        """Of the file."""
        return self.pages_at + self.pages_size

    def cells(self, cpu: int, offset: int, size: int) -> int:
        """Where cells are in the file. Raises: ValueError: there are none of that offset."""
        at = offset - self.cells_base
        if not 0 <= at <= self.cells_size - size:
            raise ValueError(f"no cells at {offset:#x}")
        return self.cells_at[cpu] + at

    def pages(self, address: int, size: int) -> int:
        """Where pages are in the file. Raises: ValueError: there are none of that address."""
        at = address - self.pages_base
        if not 0 <= at <= self.pages_size - size:
            raise ValueError(f"no pages at {address:#x}")
        return self.pages_at + at


def put_into(descriptor: int, offset: int, data: bytes) -> None:
    """Have these bytes, and room for them on the disk, in a file. Raises: OSError."""
    os.posix_fallocate(descriptor, offset, len(data))
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def map_over(ram: mmap.mmap, start: int, size: int, descriptor: int, offset: int) -> None:
    """Let a range of `ram` be a file's pages from now on, whatever it was; all in whole pages.

    Hazard: a store to a page that the disk has no room for kills the process.
    Raises: OSError, with nothing changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    function = libc.mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    address = ctypes.addressof(ctypes.c_char.from_buffer(ram)) + start
    flags = mmap.MAP_SHARED | _MAP_FIXED
    found = function(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
