"""Format of a note in an ELF core: the original text at the addresses that kprobefs's probes have patched."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator

OWNER = b"KPROBEFS"
"""Name of the note's owner. The note has the type 0."""
_PIECE = struct.Struct("<QH")
"""Layout of the header of a piece of text: virtual address, size in bytes. The text follows the header."""
_LIMIT = 16 << 20
"""Maximum size in bytes of the note's contents after decompression."""


def pack_original_text(pieces: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the contents of the note. `pieces`: pairs of an address and its original text."""
    return zlib.compress(b"".join(_PIECE.pack(va, len(text)) + text for va, text in pieces), 1)


def unpack_original_text(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (address, original text) for the pieces in the contents of a note.

    Raises: ValueError (the contents are damaged).
    """
    decoder = zlib.decompressobj()
    try:
        text = decoder.decompress(data, _LIMIT)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not decoder.eof:
        raise ValueError("truncated")
    at = 0
    while at < len(text):
        if at + _PIECE.size > len(text):
            raise ValueError("truncated")
        va, size = _PIECE.unpack_from(text, at)
        at += _PIECE.size
        piece = text[at : at + size]
        if len(piece) < size:
            raise ValueError("truncated")
        yield va, piece
        at += size
