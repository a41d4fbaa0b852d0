"""FlatImage: the memory of a kernel whose file is an Image, a copy of memory that begins with a header."""

from __future__ import annotations

from typing import ClassVar

from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import LinkedMemory, LoadSegment

HEADER_SIZE = 64
"""Size in bytes of the header of an Image for arm64 or riscv64."""
_MEMORY_LIMIT = 1 << 30
_ALL_RIGHTS = 7


class FlatImage(LinkedMemory):
    """The memory of a kernel that is given as an Image. Each architecture has a subclass.

    Raises: KernelError ENOEXEC (the header contains no sensible size).
    """

    magic_at: ClassVar[int]
    """Offset in the header of `magic`, the bytes by which an Image of this class is recognized."""
    magic: ClassVar[bytes]

    def __init__(self, data: bytes, size: int, linked: int) -> None:
        """Store the kernel's memory. `data`: contents of the file.

        `size`: size in bytes of the kernel in memory, from the header. `linked`: virtual address of the first
        byte.
        """
        if not len(data) <= size <= _MEMORY_LIMIT:
            raise unusable(f"its header says that it takes {size:#x} bytes; the file has {len(data):#x}")
        super().__init__(linked, (LoadSegment(linked, 0, data, size, _ALL_RIGHTS),), {})

    @classmethod
    def begins(cls, start: bytes) -> bool:
        """Return True if a file that begins with `start` is an Image of this class."""
        return start.startswith(cls.magic, cls.magic_at)

    def check_complete(self, end: int) -> None:
        """Check that the file reaches to `end`, the address of _edata.

        Raises: KernelError ENOEXEC (the file is truncated).
        """
        size = len(self.segments[0].data)
        if size < end - self.entry:
            raise unusable(f"truncated: its data end at {end - self.entry:#x}, the file at {size:#x}")
