"""ELF files for i386 with a minimum of debug information: one unit, and functions in .text."""

from __future__ import annotations

import struct
from collections.abc import Sequence

TEXT = 0xC010_0000
_HEADER_SIZE, _SECTION_SIZE = 52, 40
_ABBREVIATIONS = (
    b"\x01\x11\x01" + b"\x11\x01\x12\x01\x00\x00"  # compile unit, children: low_pc addr, high_pc addr
    b"\x02\x2e\x00"
    + b"\x03\x08\x11\x01\x12\x06\x00\x00"  # subprogram: name string, low_pc addr, high_pc data4
    b"\x00"
)


def dwarf_file(functions: Sequence[tuple[str, bytes]], *, text: bool = True, debug: bool = True) -> bytes:
    """Return an ELF file whose .text, at TEXT, contains the functions one after the other.

    `functions`: (name, code) of each. Without `text`, the contents of .text are left out, as in a debug file.
    `debug`: with debug information.
    """
    code = b"".join(body for _, body in functions)
    sections = [(".text", 1 if text else 8, 6, TEXT, code if text else b"", len(code))]
    if debug:
        info = _debug_info(functions)
        sections += [(".debug_abbrev", 1, 0, 0, _ABBREVIATIONS, None), (".debug_info", 1, 0, 0, info, None)]
    return _elf(sections)


def _debug_info(functions: Sequence[tuple[str, bytes]]) -> bytes:
    dies = b"\x01" + struct.pack("<II", TEXT, TEXT + sum(len(body) for _, body in functions))
    at = TEXT
    for name, body in functions:
        dies += b"\x02" + name.encode() + b"\0" + struct.pack("<II", at, len(body))
        at += len(body)
    unit = struct.pack("<HIB", 4, 0, 4) + dies + b"\0"
    return struct.pack("<I", len(unit)) + unit


def _elf(sections: list[tuple[str, int, int, int, bytes, int | None]]) -> bytes:
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections = [*sections, (".shstrtab", 3, 0, 0, names, None)]
    body, headers = b"", bytes(_SECTION_SIZE)
    for name, kind, flags, addr, data, size in sections:
        place = _HEADER_SIZE + len(body)
        number = names.index(name.encode() + b"\0")
        in_memory = len(data) if size is None else size
        headers += struct.pack("<10I", number, kind, flags, addr, place, in_memory, 0, 0, 1, 0)
        body += data
    table = _HEADER_SIZE + len(body)
    header = b"\x7fELF\x01\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIIIIIHHHHHH",
        *(2, 3, 1, TEXT, 0, table, 0, _HEADER_SIZE, 0, 0, _SECTION_SIZE, len(sections) + 1, len(sections)),
    )
    return header + body + headers


# Line tables

_UNIT = b"\x01\x11\x00" + b"\x03\x08\x1b\x08\x10\x17\x00\x00" + b"\x00"
"""Abbreviation of a compile unit without children: name string, comp_dir string, stmt_list sec_offset."""


def line_sections(
    units: Sequence[tuple[str, Sequence[tuple[str, int, int]]]], folder: str = "/build/linux"
) -> dict[str, bytes]:
    """Return debug sections (DWARF 4) with line tables of `units`.

    A unit is a source file, and rows of (path, line, address). `folder`: directory of the compilation.
    """
    info, lines = b"", b""
    for source, rows in units:
        die = b"\x01" + f"{source}\0{folder}\0".encode() + struct.pack("<I", len(lines))
        unit = struct.pack("<HIB", 4, 0, 8) + die
        info += struct.pack("<I", len(unit)) + unit
        lines += _program(rows)
    return {".debug_info": info, ".debug_abbrev": _UNIT, ".debug_line": lines}


def _program(rows: Sequence[tuple[str, int, int]]) -> bytes:
    paths = list(dict.fromkeys(path for path, *_ in rows))
    folders = list(dict.fromkeys(path.rpartition("/")[0] for path in paths))
    tables = b"".join(folder.encode() + b"\0" for folder in folders) + b"\0"
    for path in paths:
        place, _, name = path.rpartition("/")
        tables += name.encode() + bytes([0, folders.index(place) + 1, 0, 0])
    tables += b"\0"
    head = bytes([1, 1, 1, 0xFB, 14, 13, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1]) + tables
    code = b""
    for path, line, address in rows:
        code += b"\0\x09\x02" + struct.pack("<Q", address)
        # One sequence for each row: the line starts at 1.
        code += bytes([4, paths.index(path) + 1, 3]) + _sleb(line - 1) + b"\x01"
        code += b"\0\x09\x02" + struct.pack("<Q", address + 1) + b"\0\x01\x01"
    body = struct.pack("<HI", 4, len(head)) + head + code
    return struct.pack("<I", len(body)) + body


def _sleb(number: int) -> bytes:
    found = b""
    while number > 63:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])
