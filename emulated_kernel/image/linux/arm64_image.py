"""Arm64Image: reads an Image, the flat form of an arm64 kernel, and applies the kernel's relocations.

Source: Documentation/arm64/booting.rst (v6.1).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from emulated_kernel.image.linux.flat_image import HEADER_SIZE, FlatImage
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import LoadSegment
from emulated_kernel.util.fast_dataclass import replace

ARM64: Final = "arm64"
"""Name of the architecture in LinkedMemory.architecture."""
_HEADER = struct.Struct("<8x3Q")
_BIG_ENDIAN = 1
_PAGE_SIZE_AT = 1
_PAGE_SIZES = {0: "an unknown size", 2: "16 KiB", 3: "64 KiB"}
"""Value of the header's page size field -> text for an error, for each size that is not supported."""
_SMALL_PAGES = 1
"""Value of the page size field in the header's flags for pages of 4 KiB."""
_RELATIVE = struct.pack("<Q", 0x403)
"""The relocation type R_AARCH64_RELATIVE, which stores an address, as bytes in the file."""
_ENTRY = 24
"""Size in bytes of an entry of the relocation table (Elf64_Rela): offset, type and addend."""
_ALIGNMENT = 2 << 20
"""Alignment in bytes of the address at which an Image is loaded."""
_LINKED = 0xFFFF800080000000
"""Address at which kernels with 48-bit virtual addresses are linked. The 2 GiB before it are for modules.

Mirrors: arch/arm64/include/asm/memory.h:KIMAGE_VADDR (v6.12).
"""


class Arm64Image(FlatImage):
    """The memory of an arm64 kernel that is given as an Image, after its relocations.

    Raises: KernelError ENOEXEC (the Image is truncated or big-endian, its size is not sensible, its pages do
    not have 4 KiB, it has no relocations, or its link address is not supported).
    """

    architecture = ARM64
    magic_at = 0x38
    magic = b"ARMd"

    def __init__(self, data: bytes) -> None:
        if len(data) < HEADER_SIZE:
            raise unusable("truncated within the header of the Image")
        offset, size, flags = _HEADER.unpack_from(data)
        if flags & _BIG_ENDIAN:
            raise unusable("a big-endian kernel; use a little-endian one")
        pages = flags >> _PAGE_SIZE_AT & 3
        if pages != _SMALL_PAGES:
            raise unusable(f"its pages have {_PAGE_SIZES[pages]}; use a kernel with pages of 4 KiB")
        if offset:
            raise unusable(f"its text offset is {offset:#x}; use Linux 6.5 or later")
        relocations = _relocations(data)
        if not relocations:
            raise unusable("it has no table of relocations; a kernel needs CONFIG_RELOCATABLE")
        linked = _lowest(relocations) & -_ALIGNMENT
        check_linked(linked)
        super().__init__(data, size, linked)
        self.segments = relocated(self.segments)


def check_linked(address: int) -> None:
    """Check that kernels linked at `address` are supported. Raises: KernelError ENOEXEC (not supported)."""
    if address != _LINKED:
        raise unusable(f"it is linked at {address:#x}; use Linux 6.5 or later for addresses of 48 or 52 bits")


def _lowest(relocations: memoryview) -> int:
    """Return the lowest address that occurs in a table of relocations.

    This address is near the start of the kernel. The table has the address of each relocated word, and the
    address to store in the word.
    """
    places = relocations[0::3].tolist()
    return min(places + relocations[2::3].tolist())


def relocated(segments: Sequence[LoadSegment]) -> tuple[LoadSegment, ...]:
    """Return the segments of an arm64 kernel as they are after the kernel has relocated itself at boot.

    The relocation stores addresses in the kernel's data. In the kernel's file, there may be zeros in place of
    the addresses.
    Mirrors: arch/arm64/kernel/head.S:__relocate_kernel (v6.1), arch/arm64/kernel/pi/relocate.c (v6.12).

    Raises: KernelError ENOEXEC (a relocation of a word that is not aligned).
    """
    table = max((_relocations(segment.data) for segment in segments), key=len)
    changed = [bytearray(segment.data) for segment in segments]
    for segment, data in zip(segments, changed, strict=True):
        data.extend(bytes(-len(data) % 8))
        words = memoryview(data).cast("Q")
        start = segment.va
        end = start + len(segment.data)
        for place, value in zip(table[0::3], table[2::3], strict=True):
            if start <= place < end:
                if place - start & 7:
                    raise unusable(f"a relocation at {place:#x}, which is not aligned")
                words[place - start >> 3] = value
        words.release()
        del data[len(segment.data) :]
    return tuple(replace(segment, data=bytes(data)) for segment, data in zip(segments, changed, strict=True))


def _relocations(data: bytes | memoryview) -> memoryview:
    """Find the longest table of relocations in `data`; return it as 64-bit words.

    A relocation has three words: the address to relocate, the type, and the address to store. The result is
    empty if there is no table.
    """
    text = bytes(data)
    first = 0
    count = 0
    at = text.find(_RELATIVE)
    while at >= 0:
        end = at
        if not at % 8 and at >= 8:
            while text.startswith(_RELATIVE, end):
                end += _ENTRY
            if end - at > count * _ENTRY:
                first = at - 8
                count = (end - at) // _ENTRY
        at = text.find(_RELATIVE, max(end, at + 1))
    count = min(count, (len(text) - first) // _ENTRY)
    return memoryview(text)[first : first + count * _ENTRY].cast("Q")
