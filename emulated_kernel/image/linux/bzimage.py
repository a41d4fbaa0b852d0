"""Unpacking of the vmlinux that a bzImage contains.

Source: Documentation/x86/boot.rst, protocol 2.08 and later.
"""

from __future__ import annotations

import io
import struct

from emulated_kernel.image.linux.compression import GZIP_MAGIC, unpack
from emulated_kernel.image.linux.unusable import unusable

SECTOR = 512
_MAGIC_AT = 0x202
_MAGIC = b"HdrS"
_PAYLOAD_PROTOCOL = 0x208
_HEADER_END = 0x250
VMLINUX_LIMIT = 256 << 20
"""Maximum size of an unpacked kernel in bytes; kernels of distributions have 50 to 70 MiB."""
ELF_MAGIC = b"\x7fELF"


def is_bzimage(start: bytes) -> bool:
    """Return True if a file that begins with `start` is a bzImage, whose setup header is at 0x1f1."""
    return start[_MAGIC_AT : _MAGIC_AT + 4] == _MAGIC


def unpack_bzimage(data: bytes) -> bytes:
    """Unpack and return the vmlinux that a bzImage contains.

    Raises: KernelError ENOEXEC (damaged, or of a protocol before 2.08).
    """
    payload = _payload(data)
    declared = struct.unpack("<I", payload[-4:])[0]
    if not 0 < declared <= VMLINUX_LIMIT:
        raise unusable(f"its payload says that {declared >> 20} MiB come out of it")
    # gzip itself appends the size; for the other formats the kernel's build appends it to their output.
    packed = payload if payload.startswith(GZIP_MAGIC) else payload[:-4]
    vmlinux = b"".join(unpack(io.BytesIO(packed), declared))
    if len(vmlinux) != declared:
        raise unusable(f"its payload gives {len(vmlinux)} bytes, where it says {declared}")
    if not vmlinux.startswith(ELF_MAGIC):
        raise unusable("its payload is not an ELF file")
    return vmlinux


def _payload(data: bytes) -> bytes:
    if len(data) < _HEADER_END:
        raise unusable("truncated within the setup header")
    protocol = struct.unpack_from("<H", data, _MAGIC_AT + 4)[0]
    if protocol < _PAYLOAD_PROTOCOL:
        raise unusable(
            f"boot protocol {protocol >> 8}.{protocol & 255:02} is too old: it has no payload offset"
        )
    setup = ((data[0x1F1] or 4) + 1) * SECTOR
    offset, length = struct.unpack_from("<II", data, 0x248)
    if length < 8:
        raise unusable("its payload is empty")
    payload = data[setup + offset : setup + offset + length]
    if len(payload) < length:
        raise unusable(
            f"truncated: its payload ends at {setup + offset + length:#x}, the file at {len(data):#x}"
        )
    return payload
