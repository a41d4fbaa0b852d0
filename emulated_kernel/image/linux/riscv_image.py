"""Reading of an Image, the flat form of a riscv64 kernel, and of an EFI zboot file, which contains one.

Source: Documentation/arch/riscv/boot-image-header.rst, drivers/firmware/efi/libstub/zboot-header.S (v6.12).
"""

from __future__ import annotations

import io
import struct

from emulated_kernel.image.linux.compression import unpack
from emulated_kernel.image.linux.flat_image import HEADER_SIZE, FlatImage
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import FILE_LIMIT

_OFFSET_AT = 8
_TEXT_OFFSET = 0x200000
"""Offset in bytes of the image from the start of RAM.

A kernel for riscv32 or without an MMU has another offset, and is not supported.
"""
_ZBOOT_AT = 4
_ZBOOT = b"zimg"
_ZBOOT_HEADER = struct.Struct("<4x4sII")
_LINKED = 0xFFFFFFFF80000000
"""Virtual address of the image. Mirrors: arch/riscv/include/asm/pgtable.h:KERNEL_LINK_ADDR (v6.12)."""


def is_zboot(start: bytes) -> bool:
    """Return True if a file that begins with `start` is an EFI zboot file of any machine."""
    return start[_ZBOOT_AT : _ZBOOT_AT + len(_ZBOOT)] == _ZBOOT


def unpack_zboot(data: bytes) -> bytes:
    """Unpack and return the Image that a zboot file contains.

    Raises: KernelError ENOEXEC (the file is truncated or damaged).
    """
    if len(data) < _ZBOOT_HEADER.size:
        raise unusable("truncated within the zboot header")
    _, offset, size = _ZBOOT_HEADER.unpack_from(data)
    if offset + size > len(data):
        raise unusable(f"truncated: its payload ends at {offset + size:#x}, the file at {len(data):#x}")
    return b"".join(unpack(io.BytesIO(data[offset : offset + size]), FILE_LIMIT))


class RiscvImage(FlatImage):
    """The memory of a riscv64 kernel that is given as an Image.

    Raises: KernelError ENOEXEC (no sensible size, or a kernel that does not have the offset _TEXT_OFFSET).
    """

    architecture = "riscv64"
    magic_at = 0x30
    magic = b"RISCV\0\0\0RSC\x05"

    def __init__(self, data: bytes) -> None:
        offset, size = struct.unpack_from("<QQ", data, _OFFSET_AT) if len(data) >= HEADER_SIZE else (0, 0)
        if offset != _TEXT_OFFSET:
            raise unusable(f"its text offset is {offset:#x}; use a kernel for riscv64 with an MMU")
        super().__init__(data, size, _LINKED)
