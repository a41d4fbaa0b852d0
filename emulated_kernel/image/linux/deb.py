"""Packages that contain a compressed tar: Debian's packages, which are ar archives, and Arch's."""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Iterator
from os import SEEK_END
from typing import BinaryIO

from emulated_kernel.image.linux.compression import PIECE, Pieces, Readable, unpack
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.xz_blocks import XZ_HEADER, xz_blocks
from emulated_kernel.util.lazy_pattern import lazy_pattern

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile

AR_MAGIC = b"!<arch>\n"
FILE_LIMIT = 256 << 20
"""Maximum size in bytes of a kernel or module in a package."""
_UNPACKED_LIMIT = 1 << 30
"""Maximum number of unpacked bytes of a package that are searched."""
_DEPENDS = lazy_pattern(r"^Depends:(.*)$", re.MULTILINE)
_BLOCK = 512
"""Size in bytes of a block of a tar. Mirrors: tar(5)."""
_AR_HEADER = 60
_AR_END = b"`\n"


class _Part:
    """Reader of the bytes `front`, followed by the part of a file from offset `start` to `end`."""

    def __init__(self, file: BinaryIO, start: int, end: int, front: bytes = b"") -> None:
        self._file = file
        self._at = start
        self._end = end
        self._front = front

    def read(self, size: int) -> bytes:
        if self._front:
            data = self._front[:size]
            self._front = self._front[size:]
            return data
        self._file.seek(self._at)
        data = self._file.read(max(min(size, self._end - self._at), 0))
        self._at += len(data)
        return data


class PackageTar:
    """The tar archive of a package. Reading can begin at each compressed block.

    Raises: KernelError ENOEXEC (a damaged package; in the constructor and in all methods that read).
    """

    def __init__(self, package: BinaryIO, start: int, end: int, *, is_packed: bool = True) -> None:
        """Open the archive between the offsets `start` and `end` of the file `package`.

        `is_packed`: whether the archive is compressed. Otherwise it is a plain tar.
        """
        self._package = package
        self._start = start
        self._end = end
        self._is_packed = is_packed
        self._blocks, self._index = xz_blocks(package, start, end) or ([(0, 0)], end)
        self._tar: Readable | None = None
        self._at = 0

    def seek(self, offset: int) -> None:
        """Set the position in the unpacked tar to `offset`, by unpacking from the closest block before it."""
        if offset > _UNPACKED_LIMIT:
            raise unusable(f"more than {_UNPACKED_LIMIT >> 20} MiB come out of it")
        index = bisect_right(self._blocks, offset, key=lambda block: block[1]) - 1
        packed, at = self._blocks[index]
        # Data is unpacked in pieces: skipping less than a piece is faster than opening the block again.
        if self._tar is None or not at - PIECE <= self._at <= offset:
            self._tar = self._open(packed)
            self._at = at
        _skip(self, offset - self._at)

    def _open(self, packed: int) -> Readable:
        part = _Part(self._package, self._start, self._end)
        if packed:
            # Any block can follow the stream's header, which names the checksum type; the index can't.
            part = _Part(self._package, self._start + packed, self._index, part.read(XZ_HEADER))
        return io.BufferedReader(Pieces(unpack(part, _UNPACKED_LIMIT)), PIECE) if self._is_packed else part

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes from the position in the unpacked tar on; b"" at the end."""
        assert self._tar is not None
        data = self._tar.read(size)
        self._at += len(data)
        return data

    def read_file(self, offset: int, size: int) -> bytes:
        """Return the contents of a file in the tar; `offset` and `size` are from files()."""
        if size > FILE_LIMIT:
            raise unusable(f"a file of {size} bytes")
        self.seek(offset)
        pieces = []
        while size > 0:
            piece = self.read(min(size, PIECE))
            if not piece:
                raise unusable("truncated tar archive")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def files(self, offset: int = 0) -> Iterator[tuple[str, int, int, int]]:
        """Yield (path, offset, size, offset of the next header) for each regular file in the tar.

        All offsets are in the unpacked tar; the first is that of the file's contents. The parameter `offset`
        is the offset of the first header to read.

        Deviates: tarfile reads long names of any length; here the headers of long names are skipped.
        """
        while True:
            self.seek(offset)
            member = _tar_header(self)
            if member is None:
                return
            start = offset + _BLOCK
            offset = start + -(-member.size // _BLOCK) * _BLOCK
            if member.isreg():
                yield member.name, start, member.size, offset


def deb_tar(package: BinaryIO, part: str = "data.tar") -> PackageTar:
    """Return the tar archive `part` of a Debian package.

    The archive data.tar has the package's files, and control.tar has the package's description.

    Raises: KernelError ENOEXEC (a damaged package, or one without the archive).
    """
    for name, start, end in _ar_members(package):
        if name.startswith(part):
            return PackageTar(package, start, end, is_packed=name != part)
    raise unusable(f"a package without {part}")


def deb_depends(package: BinaryIO) -> list[str]:
    """Return the names of the packages on which a Debian package depends; empty if it names none."""
    tar = deb_tar(package, "control.tar")
    for name, start, size, _ in tar.files():
        if name in ("control", "./control"):
            found = _DEPENDS.search(tar.read_file(start, size).decode("utf-8", "replace"))
            return re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)", found[1]) if found else []
    return []


def _ar_members(archive: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Yield name, start offset and end offset of each member of an ar archive."""
    end = archive.seek(0, SEEK_END)
    archive.seek(len(AR_MAGIC))
    while header := archive.read(_AR_HEADER):
        size = header[48:58].strip()
        if len(header) < _AR_HEADER or header[58:] != _AR_END or not size.isdigit():
            raise unusable("damaged ar archive")
        start = archive.tell()
        stop = start + int(size)
        if stop > end:
            raise unusable(f"truncated package: {stop - end} bytes are missing")
        yield header[:16].decode("ascii", "replace").strip().rstrip("/"), start, stop
        archive.seek(stop + int(size) % 2)


def _tar_header(tar: Readable) -> tarfile.TarInfo | None:
    """Read and return the next header of a tar; None at its end."""
    block = tar.read(_BLOCK)
    if not any(block):
        return None
    # A start from a snapshot reads no tar.
    import tarfile

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
