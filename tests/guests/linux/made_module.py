"""Module files that tests create, with undefined symbols that they choose."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_HEADER = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PROGBITS, _SYMTAB, _STRTAB = 1, 2, 3
_GLOBAL = 1 << 4


def made_module(wanted: Sequence[str], defined: Sequence[str] = (), needs: Sequence[str] = ()) -> bytes:
    """Return a module file that is laid out as by a linker.

    `wanted`: undefined symbols. `defined`: defined symbols. `needs`: names of modules that must be loaded
    before. A name that is the end of a longer name shares the string of the longer name.
    """
    strings = b"\0"
    for name in sorted((*wanted, *defined), key=len, reverse=True):
        if f"{name}\0".encode() not in strings:
            strings += f"{name}\0".encode()
    symbols = bytes(_SYMBOL.size)
    for section, names in ((0, wanted), (1, defined)):
        for name in names:
            symbols += _SYMBOL.pack(strings.index(f"{name}\0".encode()), _GLOBAL, 0, section, 0, 0)
    names = b"\0.modinfo\0.symtab\0.strtab\0.shstrtab\0"
    contents = (
        (b".modinfo", _PROGBITS, b"depends=%s\0name=made\0" % ",".join(needs).encode(), 0, 0),
        (b".symtab", _SYMTAB, symbols, 3, _SYMBOL.size),
        (b".strtab", _STRTAB, strings, 0, 0),
        (b".shstrtab", _STRTAB, names, 0, 0),
    )
    headers, data = bytes(_SECTION.size), b""
    for name, kind, content, link, entry in contents:
        headers += _SECTION.pack(
            names.index(name), kind, 0, 0, _HEADER.size + len(data), len(content), link, 1, 1, entry
        )
        data += content
    header = _HEADER.pack(
        b"\x7fELF", 2, 1, 1, 1, 62, 1, 0, 0, _HEADER.size + len(data), 0, 64, 0, 0, 64, len(contents) + 1, 4
    )
    return header + data + headers
