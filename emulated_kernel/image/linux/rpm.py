"""RPM packages: their files are in a compressed cpio archive that follows two headers.

Source: the format of RPM packages, version 3 of the file format (https://rpm-software-management.github.io).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from os import SEEK_END
from typing import BinaryIO

from emulated_kernel.image.linux.deb import PackageTar
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.util.lazy_pattern import lazy_pattern

RPM_MAGIC = b"\xed\xab\xee\xdb"
_LEAD = 96
_HEADER = struct.Struct(">4s4xII")
_HEADER_MAGIC = b"\x8e\xad\xe8\x01"
_ENTRY = 16
"""Size in bytes of an entry of a header's index."""
_CPIO = lazy_pattern(rb"07070[12][0-9a-fA-F]{104}")
_CPIO_SIZE = 110
_ALIGNMENT = 4
_TRAILER = "TRAILER!!!"
_NAME_LIMIT = 1 << 16
_REGULAR = 0o100000
_KINDS = 0o170000


class RpmPackage(PackageTar):
    """The cpio archive of an RPM package, with the methods of PackageTar."""

    def __init__(self, package: BinaryIO) -> None:
        end = package.seek(0, SEEK_END)
        signature = _after_header(package, _LEAD)
        super().__init__(package, _after_header(package, signature + -signature % 8), end)

    def files(self, offset: int = 0) -> Iterator[tuple[str, int, int, int]]:
        while True:
            self.seek(offset)
            header = self._read_all(_CPIO_SIZE)
            if not _CPIO.fullmatch(header):
                raise unusable("damaged cpio archive")
            fields = [int(header[at : at + 8], 16) for at in range(6, _CPIO_SIZE, 8)]
            mode, size, name_size = fields[1], fields[6], fields[11]
            if name_size > _NAME_LIMIT:
                raise unusable("damaged cpio archive: a name without end")
            name = self._read_all(name_size).rstrip(b"\0").decode("utf-8", "replace")
            start = _aligned(offset + _CPIO_SIZE + name_size)
            offset = _aligned(start + size)
            if name == _TRAILER:
                return
            if mode & _KINDS == _REGULAR:
                yield name, start, size, offset

    def _read_all(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.read(size - len(data))
            if not piece:
                raise unusable("truncated cpio archive")
            data += piece
        return data


def _after_header(package: BinaryIO, at: int) -> int:
    """Return the offset after the RPM header that begins at offset `at` of a package's file.

    Raises: KernelError ENOEXEC (no header begins at `at`).
    """
    package.seek(at)
    data = package.read(_HEADER.size)
    if len(data) < _HEADER.size:
        raise unusable("truncated package: its header is missing")
    magic: bytes
    entries: int
    size: int
    magic, entries, size = _HEADER.unpack(data)
    if magic != _HEADER_MAGIC:
        raise unusable("damaged package: no header where one must be")
    return at + _HEADER.size + entries * _ENTRY + size


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
