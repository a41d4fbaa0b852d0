"""Decompression of kernels and packages. The magic selects the format, and the unpacked size is limited."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Protocol

from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.util.errors import KernelError

PIECE = 1 << 18
"""Maximum number of bytes that are read or unpacked at once."""
MEMORY_LIMIT = 192 << 20
"""Maximum memory of a decompressor in bytes: `zstd --ultra` and `xz -9e` need 128 MiB."""
GZIP_MAGIC = b"\x1f\x8b"
_LZ4_BLOCK = 8 << 20
_LZ4_BOUND = _LZ4_BLOCK + _LZ4_BLOCK // 255 + 16
"""Maximum size in bytes of a compressed block, which is reached if its data is incompressible."""
_TOO_EARLY = "it ends too early"


class Readable(Protocol):
    """Source of compressed data: a file, or a part of a file."""

    def read(self, size: int, /) -> bytes: ...


def unpack(packed: Readable, limit: int) -> Iterator[bytes]:
    """Yield the unpacked data of `packed` in pieces. Ignore data after the end of the compressed stream.

    Raises: KernelError ENOEXEC (an unknown format, damaged data, or more than `limit` unpacked bytes).
    """
    start = packed.read(6)
    for magic, name, unpacked in _FORMATS:
        if start.startswith(magic):
            yield from _limited(name, unpacked(_Rest(start, packed)), limit)
            return
    raise unusable(f"nothing known is compressed like this (it begins with {start.hex(' ') or 'nothing'})")


class _Rest:
    """A file whose first bytes were already read. Reads return `start`, followed by the rest of `file`."""

    def __init__(self, start: bytes, file: Readable) -> None:
        self._start = start
        self._file = file

    def read(self, size: int) -> bytes:
        start = self._start[:size]
        self._start = self._start[size:]
        return start + self._file.read(size - len(start))


def _limited(name: str, pieces: Iterator[bytes], limit: int) -> Iterator[bytes]:
    total = 0
    try:
        for piece in pieces:
            total += len(piece)
            if total > limit:
                raise unusable(f"more than {limit >> 20} MiB come out of its {name} data")
            yield piece
    except KernelError:
        raise
    except ImportError as error:
        raise unusable(f"{name} needs the Python package {error.name}, which isn't installed") from error
    except _damages() as error:
        raise unusable(f"damaged {name} data: {error or type(error).__name__}") from error


def _damages() -> tuple[type[Exception], ...]:
    """Return the exceptions that decompressors raise for bad data.

    The exception of zstandard is included if this optional package is installed.
    """
    import lzma
    import zlib

    found: list[type[Exception]] = [EOFError, zlib.error, lzma.LZMAError, OSError, ValueError]
    try:
        from zstandard import ZstdError

        found.append(ZstdError)
    except ImportError:
        pass
    return tuple(found)


def _gzip(packed: _Rest) -> Iterator[bytes]:
    import zlib

    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    while not decompressor.eof:
        data = decompressor.unconsumed_tail or _next(packed)
        yield decompressor.decompress(data, PIECE)


def _pieces(decompressor: Any, packed: _Rest) -> Iterator[bytes]:
    """Yield the output of a bz2 or lzma decompressor, in pieces."""
    while not decompressor.eof:
        yield decompressor.decompress(_next(packed) if decompressor.needs_input else b"", PIECE)


def _bzip2(packed: _Rest) -> Iterator[bytes]:
    import bz2

    return _pieces(bz2.BZ2Decompressor(), packed)


def _xz(packed: _Rest) -> Iterator[bytes]:
    import lzma

    return _pieces(lzma.LZMADecompressor(lzma.FORMAT_XZ, MEMORY_LIMIT), packed)


def _lzma(packed: _Rest) -> Iterator[bytes]:
    import lzma

    return _pieces(lzma.LZMADecompressor(lzma.FORMAT_ALONE, MEMORY_LIMIT), packed)


def _zstd(packed: _Rest) -> Iterator[bytes]:
    import zstandard

    decompressor: Any = zstandard.ZstdDecompressor(max_window_size=MEMORY_LIMIT)
    with decompressor.stream_reader(packed, read_size=PIECE, read_across_frames=True) as reader:
        while piece := reader.read(PIECE):
            yield piece


def _lz4_legacy(packed: _Rest) -> Iterator[bytes]:
    """Yield the unpacked data of the format of `lz4 -l`: a sequence of compressed blocks of 8 MiB."""
    lz4_block: Any = import_module("lz4.block")
    packed.read(4)
    while size := packed.read(4):
        length = int.from_bytes(size, "little")
        if length > _LZ4_BOUND:
            raise ValueError(f"a block of {length} bytes")
        block = packed.read(length)
        if len(block) < length:
            raise EOFError(_TOO_EARLY)
        try:
            yield lz4_block.decompress(block, uncompressed_size=_LZ4_BLOCK)
        except lz4_block.LZ4BlockError as error:
            raise ValueError(str(error)) from error


def _lzo(_packed: _Rest) -> Iterator[bytes]:
    raise unusable("it is compressed with LZO, which nothing here unpacks")


def _next(packed: _Rest) -> bytes:
    data = packed.read(PIECE)
    if not data:
        raise EOFError(_TOO_EARLY)
    return data


_FORMATS: tuple[tuple[bytes, str, Callable[[_Rest], Iterator[bytes]]], ...] = (
    (GZIP_MAGIC, "gzip", _gzip),
    (b"\xfd7zXZ\0", "xz", _xz),
    (b"\x28\xb5\x2f\xfd", "zstd", _zstd),
    (b"\x02\x21\x4c\x18", "lz4", _lz4_legacy),
    (b"BZh", "bzip2", _bzip2),
    (b"\x5d\0\0", "lzma", _lzma),
    (b"\x89LZO", "lzo", _lzo),
)

MAGICS = tuple(magic for magic, _, _ in _FORMATS if len(magic) > 3 or magic == GZIP_MAGIC)
"""First bytes of the formats in which packages and their archives are compressed."""


class Pieces(io.RawIOBase):
    """A file object with the bytes that an iterator yields in pieces. They can be read once, in order."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            try:
                self._piece = next(self._pieces)
            except StopIteration:
                return 0
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size
