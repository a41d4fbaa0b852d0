"""Record memory in a file: where its bytes lie there, and guest pages that are the file's."""

from __future__ import annotations

import ctypes
import mmap
import os

from emulated_kernel.util.fast_dataclass import dataclass

_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2


@dataclass(frozen=True)
class PersistentLayout:
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
        """Where cells are in the file. Raises: ValueError (there are none of that offset)."""
        at = offset - self.cells_base
        if not 0 <= at <= self.cells_size - size:
            raise ValueError(f"no cells at {offset:#x}")
        return self.cells_at[cpu] + at

    def pages(self, address: int, size: int) -> int:
        """Where pages are in the file. Raises: ValueError (there are none of that address)."""
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
    Raises: OSError (with nothing changed).
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(ram)) + start
    # Hazard: what MAP_FIXED replaces is gone before the file system is asked, which may refuse.
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    new = _call("mmap", None, size, prot, mmap.MAP_SHARED, descriptor, ctypes.c_long(offset))
    try:
        _call("mremap", new, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(address))
    except OSError:
        _call("munmap", new, size)
        raise


def _call(name: str, address: int | None, size: int, *further: object) -> int:
    """A system call about a range of this process's memory. Raises: OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t
    found: int = function(ctypes.c_void_p(address), ctypes.c_size_t(size), *further)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
