"""Debian packages: kernel and modules of a linux-image-*.deb, an ar archive with a compressed tar in it."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from os import SEEK_END
from typing import BinaryIO

from emulated_kernel.image.linux.compression import PIECE, Pieces, Readable, unpack
from emulated_kernel.image.linux.unusable import unusable

AR_MAGIC = b"!<arch>\n"
FILE_LIMIT = 256 << 20
"""Bytes of a kernel or module within a package."""
_UNPACKED_LIMIT = 1 << 30
"""How much of a package is searched; boot/ comes first in it."""
_KERNEL = re.compile(r"(\./)?(boot/vmlinu[xz]-[^/]+|(usr/)?lib/modules/[^/]+/vmlinuz)")
_AR_HEADER, _AR_END = 60, b"`\n"


class _Member:
    """A member of an ar archive: its bytes, and none of those behind it."""

    def __init__(self, archive: BinaryIO, size: int) -> None:
        self._archive = archive
        self._left = size

    def read(self, size: int) -> bytes:
        data = self._archive.read(min(size, self._left))
        self._left -= len(data)
        return data


def read_kernel(package: BinaryIO) -> bytes:
    """The kernel of a package, as it stands there: compressed. Raises: KernelError ENOEXEC."""
    for _, data in read_files(package, lambda name: bool(_KERNEL.fullmatch(name)), 1):
        return data
    raise unusable("a package without a kernel in boot/; one that only depends on it has none")


def read_files(
    package: BinaryIO, is_wanted: Callable[[str], bool], count: int
) -> Iterator[tuple[str, bytes]]:
    """Paths and contents of the first `count` files whose path is wanted. Raises: KernelError ENOEXEC."""
    for name, member in _ar_members(package):
        if name.startswith("data.tar"):
            tar: Readable = member
            if name != "data.tar":
                tar = io.BufferedReader(Pieces(unpack(member, _UNPACKED_LIMIT)), PIECE)
            return islice(_files_of_tar(tar, is_wanted), count)
    raise unusable("a package without data.tar")


def _ar_members(archive: BinaryIO) -> Iterator[tuple[str, _Member]]:
    """Names and contents; a member can be read until the next one is asked for."""
    end = archive.seek(0, SEEK_END)
    archive.seek(len(AR_MAGIC))
    while header := archive.read(_AR_HEADER):
        size = header[48:58].strip()
        if len(header) < _AR_HEADER or header[58:] != _AR_END or not size.isdigit():
            raise unusable("damaged ar archive")
        start = archive.tell()
        if start + int(size) > end:
            raise unusable(f"truncated package: {start + int(size) - end} bytes are missing")
        yield header[:16].decode("ascii", "replace").strip().rstrip("/"), _Member(archive, int(size))
        archive.seek(start + int(size) + int(size) % 2)


def _files_of_tar(tar: Readable, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Deviates: tarfile would read a long name of any length; here what isn't wanted is skipped."""
    while (member := _tar_header(tar)) is not None:
        padded = -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if not member.isreg() or not is_wanted(member.name):
            _skip(tar, padded)
            continue
        if member.size > FILE_LIMIT:
            raise unusable(f"{member.name} has {member.size} bytes")
        yield member.name, _exactly(tar, member.size)
        _skip(tar, padded - member.size)


def _tar_header(tar: Readable) -> tarfile.TarInfo | None:
    """The next header; None at the end."""
    block = tar.read(tarfile.BLOCKSIZE)
    if not any(block):
        return None
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise unusable(f"damaged tar archive: {error}") from error
    if member.size < 0:
        raise unusable("damaged tar archive: a member with a negative size")
    return member


def _skip(tar: Readable, size: int) -> None:
    while size > 0:
        skipped = len(tar.read(min(size, PIECE)))
        if not skipped:
            raise unusable("truncated tar archive")
        size -= skipped


def _exactly(tar: Readable, size: int) -> bytes:
    pieces = []
    while size > 0:
        piece = tar.read(min(size, PIECE))
        if not piece:
            raise unusable("truncated tar archive")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
